"""What the trusted lane passes around: the four ways a call fails, a call, and its bytes.

TrustedError
  TargetRaised   the function raised, or returned what is not JSON
  TargetLate     no answer before the deadline; the worker was killed and replaced
  TargetTooBig   a fresh worker passed the memory limit on this payload; killed and replaced
  TrustedDown    we are at fault: the worker died twice, none could be started, or the pool is closed
"""

from __future__ import annotations

import json
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


class TrustedError(Exception):
    """Base of the four ways a call ends without a value."""


class TargetRaised(TrustedError):
    """The function raised; `str` is type and message, `trace` the traceback of the worker."""

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text)
        self.trace = trace


class TargetLate(TrustedError):
    """No answer before the deadline."""


class TargetTooBig(TrustedError):
    """The memory limit was passed."""


class TrustedDown(TrustedError):
    """The lane failed, which says nothing about the payload; the message says why."""


@dataclass(slots=True, eq=False)
class Call:
    line: bytes
    seconds: float
    future: Future[Any] = field(default_factory=Future)
    deaths: int = 0

    def resolve(self, value: Any) -> None:
        with suppress(InvalidStateError):  # the caller has cancelled
            self.future.set_result(value)

    def fail(self, error: TrustedError) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


Chunk = deque[Call]  # calls that travel together; the first is running


def encoded(payload: Any, seconds: float) -> bytes:
    """The line that asks for one call. Raises TypeError or ValueError for what JSON cannot hold."""
    return json.dumps({"payload": payload, "seconds": seconds}).encode() + b"\n"
