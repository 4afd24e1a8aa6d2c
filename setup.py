"""The two parts that are not Python, and the recipes. Everything else about the package stands in pyproject.toml."""

import shutil
import sys
from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# Optional, so that all else can be installed without a compiler: the sandbox then says what to install.
FORK = Extension(
    "rocstar.sandbox.slot._fork",
    ["rocstar/sandbox/slot/_fork.c"],
    extra_compile_args=["-O2", "-std=gnu11"],
    # An older one would go on being loaded after an update; `slot/zygote.py` refuses it.
    define_macros=[("SOURCE", str(crc32(Path("rocstar/sandbox/slot/_fork.c").read_bytes())))],
    optional=True,
)
# Optional: without a compiler the torch engine attends through torch, slower (docs/engines.md).
ATTENTION = Extension(
    "rocstar.engines._attention",
    ["rocstar/engines/_attention.c"],
    depends=["rocstar/engines/_attention.h"],
    extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
    libraries=["m"],
    optional=True,
)


class BuildWithRecipes(build_py):
    """A package carries the recipes and the pages that messages name, which lie beside it in a checkout."""

    def run(self):
        super().run()
        if not self.editable_mode:
            there = Path(self.build_lib, "rocstar")
            shutil.copytree("recipes", there / "recipe_files", dirs_exist_ok=True)
            aside = shutil.ignore_patterns("_build", "images", "conf.py")
            shutil.copytree("docs", there / "docs", dirs_exist_ok=True, ignore=aside)


setup(cmdclass={"build_py": BuildWithRecipes}, ext_modules=[FORK, ATTENTION] if sys.platform == "linux" else [])
