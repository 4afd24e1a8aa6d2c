"""What the attack tests share.

A test is skipped only where the level in force does not promise what it checks (docs/sandbox.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocstar.sandbox.call import ProgramOutcome, Response
from tests.sandbox.driver import Daemon

REPOSITORY = Path(__file__).resolve().parents[2]


def promised(daemon: Daemon, *levels: str, without: str = "") -> None:
    if daemon.info.isolation not in levels:
        pytest.skip(f"isolation {daemon.info.isolation} does not promise this, {' and '.join(levels)} do")
    if without in daemon.info.failed_probes:
        pytest.skip(f"the sandbox reports {without} here")


def attack(daemon: Daemon, code: str, **limits: Any) -> Response:
    """Run it, then see that the next call is served by an unharmed sandbox."""
    response = daemon.run(code, **limits)
    # An interpreter that is installed below the working directory's path is mounted there, and is no leftover.
    after = daemon.run("import os\nprint(1 + 1, [name for name in os.listdir('.') if not os.path.ismount(name)])")
    assert (after.outcome, after.stdout) == (ProgramOutcome.OK, "2 []\n"), after
    return response


def tried(*calls: str) -> str:
    """A program that prints, for each expression, its value or the name of its exception."""
    body = "import ctypes, os, signal, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for call in calls:
        body += f"try:\n    print({call})\nexcept Exception as error:\n    print(type(error).__name__)\n"
    return body


def names(daemon: Daemon, *calls: str, **limits: Any) -> list[str]:
    """What each of these expressions came to."""
    return attack(daemon, tried(*calls), **limits).stdout.split()
