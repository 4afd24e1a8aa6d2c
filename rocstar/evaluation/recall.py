"""Stores an evaluation's answers as they come, so that a repetition after a kill requests only the missing ones.

One JSONL file, a line per answer: an attempt, a judge's text, or a model's name. A service failure is no answer and is
repeated, and so is a request made under other settings. Not here: the finished evaluation (`evaluate.py`), after which
the file is deleted."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from rocstar.errors import ConfigError
from rocstar.record.journal import Journal, read_journal
from rocstar.types import Stop, Trajectory

FILE = "asked.jsonl"
NEEDS = {"asked": str, "answer": object}
FIRST = "first/"
"""Begins the keys of first values, which are no answers."""


class Recall(AbstractContextManager["Recall"]):
    """Answers, as texts, by the key of their request. Without a folder nothing is stored and all is requested."""

    def __init__(self, folder: Path | None = None, setup: str = "") -> None:
        """setup: a name of the settings (`evaluate.name_of`); answers under other settings are ignored. Raises
        ConfigError if another process makes the same evaluation, DataError for an invalid file."""
        self._setup = setup
        self._journal = Journal(folder / FILE) if folder else None
        self._lock: int | None = None
        self._known: dict[str, str] = {}
        if self._journal and self._journal.path.exists():
            self._hold(self._journal.path)
            rows = read_journal(self._journal.path, NEEDS)
            texts = (row for row in rows if isinstance(row["answer"], str))  # older ones kept attempts as objects
            self._known = {row["asked"]: row["answer"] for row in texts if row.get("setup", "") == setup}
        self.found = sum(not key.startswith(FIRST) for key in self._known)
        """Number of answers from an earlier process."""
        self._known = self._known if self.found else {}

    async def answer(self, key: str, ask: Callable[[], Awaitable[str | None]]) -> str | None:
        """The stored answer of `key`, else the result of `ask`; None is returned and not stored."""
        if key in self._known:
            return self._known[key]
        answer = await ask()
        if answer is not None:
            self._store(key, answer)
        return answer

    def first(self, key: str, value: str) -> str:
        """The first value that was given for `key`, in this process or in one whose answers are stored."""
        if FIRST + key not in self._known:
            self._known[FIRST + key] = value
            self._store(FIRST + key, value)
        return self._known[FIRST + key]

    def _store(self, key: str, answer: str) -> None:
        if self._journal:
            self._hold(self._journal.path)
            self._journal.append({"setup": self._setup, "asked": key, "answer": answer})

    async def attempt(self, key: str, ask: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
        """The same for an attempt. One ended by a service failure, or before the model said anything, is not stored."""
        attempts: list[Trajectory] = []

        async def packed() -> str | None:
            attempts.append(await ask())
            return None if attempts[0].stop is Stop.ENVIRONMENT_FAILED or not attempts[0].turns else pack(attempts[0])

        answer = await self.answer(key, packed)
        return attempts[0] if answer is None or attempts else unpack(answer)

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Delete the file: the evaluation is finished and saved elsewhere."""
        if self._journal:
            self._journal.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._journal:
            self._journal.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self, path: Path) -> None:
        """Become the only process that appends."""
        if self._lock is not None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(f"another process makes the evaluation in {path.parent}; wait until it ends") from None
        self._lock = handle


def pack(attempt: Trajectory) -> str:
    """An attempt as compressed JSON in base64: its token ids and log-probabilities are most of it."""
    return base64.b64encode(zlib.compress(json.dumps(msgspec.to_builtins(attempt)).encode(), 1)).decode()


def unpack(text: str) -> Trajectory:
    return msgspec.convert(json.loads(zlib.decompress(base64.b64decode(text))), Trajectory)
