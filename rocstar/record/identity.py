"""Facts about a run's environment: versions, commit, hardware. Reads only; imports nothing heavy."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import rocstar

PACKAGES = (
    "rocstar",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "sympy",
    "pyarrow",
    "pydantic",
    "math-verify",
)
GIT_SECONDS = 10.0  # a checkout on a slow network disk; never worth holding a run up for longer


def versions() -> dict[str, str | None]:
    """Installed versions by package; None for packages that are not installed."""
    return {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


@cache
def version_of(package: str) -> str | None:
    """The installed version of a package, rocstar's from its repository's tags; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def git_state() -> dict[str, Any] | None:
    """`{commit, changed}` of the checkout that rocstar was imported from, at the first call; None if there is none."""
    source = Path(rocstar.__file__)
    # An installed copy may lie inside an unrelated repository.
    if not _git(source.parent, "ls-files", source.name):
        return None
    commit = _git(source.parent, "rev-parse", "HEAD")
    changed = _git(source.parent, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"commit": commit, "changed": bool(changed)} if commit else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=GIT_SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in bytes, system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
