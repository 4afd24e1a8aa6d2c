"""The two parts that are not Python. Everything else about the package stands in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Optional: without a compiler the sandbox forks from Python, slower, and says so (docs/sandbox.md).
FORK = Extension(
    "rocstar.sandbox.slot._fork",
    ["rocstar/sandbox/slot/_fork.c"],
    extra_compile_args=["-O2", "-std=gnu11"],
    optional=True,
)
# Optional: without a compiler the torch engine attends through torch, slower (docs/engines.md).
ATTENTION = Extension(
    "rocstar.engines._attention",
    ["rocstar/engines/_attention.c"],
    extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[FORK, ATTENTION] if sys.platform == "linux" else [])
