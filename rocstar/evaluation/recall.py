"""What an evaluation has asked already, kept as it comes: a killed one that is made again asks only what is missing.

One JSONL file, a line for each answer that came: an attempt, or what a judge said. A fault of ours is no answer and is
asked again, and so is what was asked under other settings. Not here: the finished evaluation (`evaluate.py`), after
which the file goes."""

from __future__ import annotations

import base64
import fcntl
import os
import zlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rocstar.errors import ConfigError
from rocstar.record.journal import Journal, read_journal
from rocstar.types import Stop, Trajectory

FILE = "asked.jsonl"
IDS, NUMBERS = "i", "f"
NEEDS = {"asked": str, "answer": object}


class Recall:
    """Answers by the name of their question. Without a folder nothing is kept and everything is asked."""

    def __init__(self, folder: Path | None = None, setup: str = "") -> None:
        """setup: a name of the settings under which is asked (`evaluate.name_of`); what was answered under others is
        not known. Raises ConfigError where another process makes the same evaluation, DataError for a file that is not
        one."""
        self._setup = setup
        self._journal = Journal(folder / FILE) if folder else None
        self._lock: int | None = None
        self._known: dict[str, Any] = {}
        if self._journal and self._journal.path.exists():
            self._hold(self._journal.path)
            rows = read_journal(self._journal.path, NEEDS)
            self._known = {row["asked"]: row["answer"] for row in rows if row.get("setup", "") == setup}
        self.found = len(self._known)
        """Answers that an earlier process had got."""

    async def answer(self, asked: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What is known of `asked`, else what `ask` gives, in JSON's own types; None is returned and not kept."""
        if asked in self._known:
            return self._known[asked]
        answer = await ask()
        if answer is not None and self._journal:
            self._hold(self._journal.path)
            self._journal.append({"setup": self._setup, "asked": asked, "answer": answer})
        return answer

    async def attempt(self, asked: str, ask: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
        """The same for an attempt. One that a fault of ours ended is not kept."""
        made: list[Trajectory] = []

        async def packed() -> Any:
            made.append(await ask())
            return None if made[0].stop is Stop.ENVIRONMENT_FAILED else pack(made[0])

        answer = await self.answer(asked, packed)
        return made[0] if made else unpack(answer)

    def __enter__(self) -> Recall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Delete the file: the evaluation is finished and kept elsewhere."""
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


def pack(attempt: Trajectory) -> dict[str, Any]:
    """An attempt in JSON's own types; its lists of numbers as base64 of their compressed bytes (log-probabilities as
    float32, as in parquet)."""
    return _with_lists_as(_text, msgspec.to_builtins(attempt))


def unpack(row: dict[str, Any]) -> Trajectory:
    return msgspec.convert(_with_lists_as(_numbers, row), Trajectory)


def _with_lists_as(form: Callable[[Any, str], Any], row: dict[str, Any]) -> dict[str, Any]:
    """`row` with each of its lists of numbers in another form."""

    def turn(one: dict[str, Any]) -> dict[str, Any]:
        written = one["completion"]
        lists = {"token_ids": form(written["token_ids"], IDS), "logprobs": form(written["logprobs"], NUMBERS)}
        return {**one, "completion": {**written, **lists}, "reply_ids": form(one["reply_ids"], IDS)}

    return {**row, "prompt_ids": form(row["prompt_ids"], IDS), "turns": [turn(one) for one in row["turns"]]}


def _text(numbers: Sequence[float], kind: str) -> str:
    return base64.b64encode(zlib.compress(array(kind, numbers).tobytes(), 1)).decode()


def _numbers(text: str, kind: str) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(zlib.decompress(base64.b64decode(text)))
    return numbers.tolist()
