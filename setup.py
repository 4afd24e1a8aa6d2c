"""The one part that is not Python. Everything else about the package stands in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Optional: without a compiler the sandbox forks from Python, slower, and says so (docs/sandbox.md).
FORK = Extension(
    "rocstar.sandbox.slot._fork",
    ["rocstar/sandbox/slot/_fork.c"],
    extra_compile_args=["-O2", "-std=gnu11"],
    optional=True,
)

setup(ext_modules=[FORK] if sys.platform == "linux" else [])
