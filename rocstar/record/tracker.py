"""The Tracker over a run folder: writes metrics and events at once, rollouts in a thread. A full disk never raises into
training: it is reported once on stderr and in `failure`, on which the trainer acts, and writing stops."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rocstar.errors import is_disk_full
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import AttemptRecord, Decode, write_attempts

WAITING_STEPS = 4  # if the writer is further behind, the trainer waits, which bounds memory and drops nothing


class RunTracker(AbstractContextManager["RunTracker"]):
    """Records a run into its folder. Use it as a context manager, or call `close`.

    Thread `rollout-writer`: consumes steps of attempts, produces parquet files, waits for the disk; `close` ends it."""

    def __init__(self, folder: RunFolder, *, decode: Decode | None = None) -> None:
        """`decode` turns token ids into the text stored beside them; without it no text is stored."""
        self.folder = folder
        self.failure: str | None = None
        """One sentence once a write has failed; None before."""
        self._decode = decode
        self._stage: dict[str, str] = {}
        self._metrics = Journal(folder.metrics)
        self._events = Journal(folder.events)
        self._writer = ThreadPoolExecutor(1, "rollout-writer")
        self._waiting = deque[Future[None]]()
        self._failing = threading.Lock()

    def start_stage(self, name: str, kind: str, steps: int) -> None:
        """Metrics from here on belong to this stage; `runs show` counts steps by it."""
        self._stage = {"stage": name}
        self.event("stage", name=name, kind=kind, steps=steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics.jsonl; numbers that JSON lacks become null."""
        self._attempt(lambda: self._metrics.append({"step": step, **self._stage, **metrics}))

    def event(self, event: str, **details: Any) -> None:
        """One row of events.jsonl: a span, a warning, a fault, a stage change. `details` are JSON values."""
        row = {"time": round(time.time(), 3), "event": event, **details}
        self._attempt(lambda: self._events.append(row))

    def record_attempts(self, step: int, attempts: Sequence[AttemptRecord]) -> None:
        """Every attempt of a step, kept or not; written by the thread."""
        if self.failure:
            return
        if len(self._waiting) == WAITING_STEPS:
            self._waiting.popleft().result()
        self._waiting.append(self._writer.submit(self._write, step, attempts))

    def flush(self) -> None:
        """Wait until everything recorded is on disk, or `failure` is set."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Flush and end the thread. Calling it again does nothing."""
        self._writer.shutdown()
        self._metrics.close()
        self._events.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, step: int, attempts: Sequence[AttemptRecord]) -> None:
        try:
            self._attempt(partial(write_attempts, self.folder.rollout_file(step), step, attempts, self._decode))
        except Exception as error:
            self._fail(f"the rollouts of step {step} could not be written: {error!r}")

    def _attempt(self, write: Callable[[], None]) -> None:
        """Call `write`, unless an earlier one failed: a record with gaps would be taken for a complete one."""
        if self.failure:
            return
        try:
            write()
        except OSError as error:
            remedy = "free some space" if is_disk_full(error) else "mend that"
            self._fail(f"cannot write to {self.folder.path}: {error.strerror or error}; {remedy} and resume")

    def _fail(self, sentence: str) -> None:
        with self._failing:
            if self.failure is None:
                self.failure = sentence
                print(f"warning: {sentence}", file=sys.stderr)
