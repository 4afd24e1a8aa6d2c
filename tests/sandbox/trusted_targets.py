"""What an operator's verifier may do, for the trusted lane's tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

_PREPARED: list[str] = []
_KEPT: list[bytearray] = []


def prepare() -> None:
    _PREPARED.append("yes")


def broken_prepare() -> None:
    raise RuntimeError("no licence")


def answer(payload: dict[str, Any]) -> Any:
    """Does what `payload["do"]` says."""
    result: Any = ACTIONS[payload["do"]](payload)
    return result


def die_the_first_time(payload: dict[str, Any]) -> str:
    mark = Path(payload["mark"])
    if mark.exists():
        return "second time"
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def die(payload: dict[str, Any]) -> None:
    with open(payload["log"], "a") as log:
        log.write("ran\n")
    os._exit(3)


def fail(payload: dict[str, Any]) -> None:
    raise ValueError(payload["text"])


def keep(payload: dict[str, Any]) -> int:
    _KEPT.append(bytearray(b"x" * payload["bytes"]))
    return sum(map(len, _KEPT))


def use_own_alarm(payload: dict[str, Any]) -> str:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    time.sleep(1.2)
    return "its own alarm worked"


ACTIONS: dict[str, Any] = {
    "echo": lambda payload: payload["value"],
    "pid": lambda payload: os.getpid(),
    "prepared": lambda payload: _PREPARED,
    "print": lambda payload: print("noise", flush=True),
    "loop": lambda payload: [None for _ in iter(int, 1)],
    "hold_the_interpreter": lambda payload: 7 ** (7**30),
    "sleep": lambda payload: time.sleep(payload["seconds"]),
    "exit": lambda payload: exit(4),
    "set": lambda payload: {1, 2},
    "die_once": die_the_first_time,
    "die": die,
    "fail": fail,
    "keep": keep,
    "alarm": use_own_alarm,
}
