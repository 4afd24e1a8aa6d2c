"""What runs in the worker processes of the checker's tests, in place of `judge`; the predicted text says what to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocstar.answers.pool import DeadlinePool
from rocstar.answers.symbolic import SymbolicChecker

_KEPT: list[bytearray] = []


def worker_pids(of: DeadlinePool | SymbolicChecker) -> list[int]:
    """Process ids of the workers alive."""
    pool = of._pool if isinstance(of, SymbolicChecker) else of
    warm = pool._warm[0].pid if pool._warm else 0
    return [worker for keeper in children(warm) for worker in children(keeper)]


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(pid) for pid in found.read_text().split()] if found.exists() else []


def scripted(question: Mapping[str, Any]) -> tuple[str, str]:
    """`hang` (also of a reference; one that is `slow` takes 0.7 s of CPU), `hold` (the interpreter), `die`, `raise`,
    `die-once:PATH` (after a nap) as named; `nap:X` sleeps a moment; `eat:MEGABYTES` takes and returns them,
    `keep:MEGABYTES` keeps them; anything else is right."""
    word, _, argument = question["predicted"].partition(":")
    started = time.process_time()
    if word == "hang" or question.get("gold") == "hang":
        while True:
            pass
    elif question.get("gold") == "slow":
        while time.process_time() - started < 0.7:
            pass
    elif word == "sleep":
        time.sleep(600)
    elif word == "hold":
        7 ** (7**30)
    elif word == "eat":
        len(bytearray(b"1") * (int(argument) << 20))
    elif word == "keep":
        _KEPT.append(bytearray(b"1") * (int(argument) << 20))
    elif word == "raise":
        raise ValueError("a bug of ours")
    elif word == "nap":
        time.sleep(0.05)
    elif word == "die" or (word == "die-once" and not Path(argument).exists()):
        if argument:
            time.sleep(0.05)
            Path(argument).touch()
        os.abort()
    return "right", question["graders"][0]


def asleep() -> None:
    time.sleep(600)


def killed_once() -> None:
    if not (said := Path(os.environ["KILLED_ONCE"])).exists():
        said.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def broken() -> None:
    raise ImportError("no math-verify")
