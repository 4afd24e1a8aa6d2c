"""Symbolic equality behind a killable process: math-verify can run for ever, so it never runs in ours.

One child, started at the first question and kept warm; a deadline or memory limit that is passed kills it, the next
question starts another. Whether two answers *should* count as equal is math-verify's business, not decided here.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rocstar.answers.worker_process import WorkerDied, WorkerLate, WorkerProcess, WorkerTooBig
from rocstar.errors import VerifierUnavailable
from rocstar.types import Verdict

# -P and -s with a scrubbed environment isolate like -I does, but leave the hash seed ours to fix.
COMMAND = (sys.executable, "-P", "-s", str(Path(__file__).with_name("symbolic_worker.py")))
CACHE_SIZE = 4096  # siblings give the same few answers; two texts of at most some kB each


class SymbolicChecker:
    """Asks the child, one question at a time. Usable from any event loop, several in turn included.

    Its thread consumes questions, produces verdicts, and waits for the child; the deadline or `close` unblocks it.
    Time spent waiting for an earlier question does not count against the deadline."""

    def __init__(
        self,
        *,
        deadline_seconds: float = 5.0,
        start_seconds: float = 60.0,
        memory_bytes: int = 2**30,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """deadline_seconds: wall time per question. start_seconds: wall time for a child to get ready.
        memory_bytes: resident memory of the child. command: what to start, for tests."""
        self._deadline_seconds = deadline_seconds
        self._start_seconds = start_seconds
        self._memory_bytes = memory_bytes
        self._command = command
        self._worker: WorkerProcess | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="symbolic")
        # Runs in the one thread only. Exceptions are not kept, verdicts are, UNDECIDED included: siblings with the
        # same hard answer cost one deadline together and get the same verdict.
        self._remembered = functools.lru_cache(CACHE_SIZE)(self._decide)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return self._worker.pid if self._worker else None

    async def compare(self, gold: str, predicted: str, *, prose: bool = False) -> tuple[Verdict, str]:
        """(verdict, method): UNDECIDED with `deadline` or `memory` when a limit was hit, or with `gold_unparsed`.
        `prose`: `predicted` is running text in which math-verify looks for an answer.

        Raises VerifierUnavailable when a child died twice on the question, could not be started, or after close."""
        self._refuse_if_closed()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._remembered, gold, predicted, prose)

    async def close(self) -> None:
        """End the child and the thread; questions still waiting raise VerifierUnavailable. May be called twice."""
        self._closed = True
        if worker := self._worker:
            worker.interrupt()
        await asyncio.to_thread(self._thread.shutdown)
        self._drop_worker()

    def _decide(self, gold: str, predicted: str, prose: bool) -> tuple[Verdict, str]:
        question = {"gold": gold, "predicted": predicted, "prose": prose, "seconds": self._deadline_seconds}
        line = json.dumps(question).encode() + b"\n"
        for _ in range(2):
            worker = self._ready_worker()
            try:
                answer = worker.ask(line, seconds=self._deadline_seconds, memory_bytes=self._memory_bytes)
            except WorkerDied:
                self._drop_worker()
                continue
            except (WorkerLate, WorkerTooBig) as limit:
                self._drop_worker()
                return Verdict.UNDECIDED, "deadline" if isinstance(limit, WorkerLate) else "memory"
            found = json.loads(answer)
            return Verdict(found["verdict"]), found["method"]
        self._refuse_if_closed()
        raise VerifierUnavailable(f"the math-verify process died twice on {predicted[:80]!r} against {gold[:80]!r}.")

    def _ready_worker(self) -> WorkerProcess:
        self._refuse_if_closed()
        if self._worker is None:
            try:
                self._worker = WorkerProcess(self._command)
                greeting = self._worker.ask(b"", seconds=self._start_seconds, memory_bytes=self._memory_bytes)
            except (OSError, WorkerDied, WorkerLate, WorkerTooBig) as error:
                self._drop_worker()
                reason = str(error) or type(error).__name__
                raise VerifierUnavailable(f"the math-verify process did not start: {reason}.") from error
            if failure := json.loads(greeting).get("failed"):
                self._drop_worker()
                raise VerifierUnavailable(f"the math-verify process did not start: {failure}.")
            self._refuse_if_closed()  # close may have come while it started
        return self._worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise VerifierUnavailable("the answer checker was closed; make a new Grader.")
