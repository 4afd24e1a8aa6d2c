"""The trusted lane: the operator's own verifier code in warm worker processes, under hard deadlines.

A call costs about a tenth of a millisecond of CPU because nothing is forked for it. There is no wall either: it is for
code that the operator wrote and that may loop, blow up or crash on what the model wrote. Never run model code here.

A target that raises, takes too long or takes too much memory has said something about the payload; a worker that dies
has not, so its call is tried once more and then raises TrustedDown. The errors are drawn in `trusted_calls`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from rocstar.sandbox.trusted_calls import (
    Call,
    TargetLate,
    TargetRaised,
    TargetTooBig,
    TrustedDown,
    TrustedError,
    encoded,
)
from rocstar.sandbox.trusted_crew import TrustedCrew

__all__ = ["TargetLate", "TargetRaised", "TargetTooBig", "TrustedDown", "TrustedError", "TrustedPool"]

CHUNKS_PER_WORKER = 4  # a batch is cut so that each worker gets about four pieces: few trips, and the load evens out
MAX_CHUNK = 32


class TrustedPool:
    """Calls `target` in worker processes. Usable from any thread and any event loop, several at once included.

    Payloads and values are JSON. Nothing is started before the first call."""

    def __init__(
        self,
        *,
        target: str,
        prepare: str = "",
        workers: int = 2,
        memory_bytes: int = 2**30,
        start_seconds: float = 60.0,
    ) -> None:
        """target: `module:function` of one argument, importable here. prepare: `module:function` of none, run once in
        each worker before its first call. workers: processes at most, started when there is work. memory_bytes:
        resident memory of a worker, imports included. start_seconds: wall time for a worker to import and prepare."""
        self._settings = {"target": target, "prepare": prepare, "memory_bytes": memory_bytes}
        self._workers = workers
        self._start_seconds = start_seconds
        self._lock = threading.Lock()  # one crew, however many threads call first
        self._crew: TrustedCrew | None = None
        self._closed = False

    def submit(self, payloads: Sequence[Any], *, deadline_seconds: float) -> list[Future[Any]]:
        """Queue calls and return their futures, in order. The deadline is wall time of each call from its own start;
        waiting for earlier ones does not count. Raises TypeError for a payload that is not JSON, and TrustedDown."""
        calls = [Call(encoded(payload, deadline_seconds), deadline_seconds) for payload in payloads]
        size = min(MAX_CHUNK, 1 + len(calls) // (CHUNKS_PER_WORKER * self._workers))
        self._get_crew().submit([deque(calls[at : at + size]) for at in range(0, len(calls), size)])
        return [call.future for call in calls]

    async def call(self, payload: Any, *, deadline_seconds: float) -> Any:
        """What the target returns for this payload. Raises TrustedError. Cancelling drops a call that waits; one that
        runs goes on until it ends or its deadline, and its result is dropped."""
        (future,) = self.submit([payload], deadline_seconds=deadline_seconds)
        return await asyncio.wrap_future(future)

    async def call_batch(self, payloads: Sequence[Any], *, deadline_seconds: float) -> list[Any]:
        """One value or TrustedError per payload, in order; one call's end does not touch the others."""
        futures = self.submit(payloads, deadline_seconds=deadline_seconds)
        return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive, those that start included."""
        return [worker.process.pid for worker in list(self._crew.workers)] if self._crew else []

    def close(self) -> None:
        """End workers and thread; calls not finished raise TrustedDown. May be called twice, from any thread."""
        with self._lock:
            self._closed = True
        if self._crew is not None:
            self._crew.stop()

    def __enter__(self) -> TrustedPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _get_crew(self) -> TrustedCrew:
        with self._lock:
            if self._closed:
                raise TrustedDown("the trusted pool was closed; make a new one")
            if self._crew is None:
                self._crew = TrustedCrew(self._settings, workers=self._workers, start_seconds=self._start_seconds)
            return self._crew
