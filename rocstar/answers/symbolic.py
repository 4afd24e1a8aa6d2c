"""Graders that may never end, in warm worker processes, which are killed at a deadline (`pool.py`, `judge.py`).

Not here: which grader to ask, and what several of them mean together (`grade.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

from rocstar.answers.caps import PLAIN
from rocstar.answers.pool import DeadlinePool, PoolError
from rocstar.errors import VerifierUnavailable
from rocstar.types import Verdict

Found = tuple[Verdict, str]

JUDGE, WARM = "rocstar.answers.judge:judge", "rocstar.answers.judge:warm"
LIMITS: tuple[Found, Found] = ((Verdict.UNDECIDED, "deadline"), (Verdict.UNDECIDED, "memory"))
PATIENCE = 4  # deadlines for a reference alone: where it is near the limit, the prediction is still what exceeds it
CACHE_SIZE = 8192  # siblings give the same few answers; two texts of at most some kB each


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    graders: tuple[str, ...]
    """Names in the order they are asked; see `judge.py`."""
    gold: str
    predicted: str


class SymbolicChecker:
    """Asks the workers. Usable from any thread and any event loop; workers start at the first question.

    A question that hits a limit is WRONG where the reference alone does not: its prediction is what cannot be computed.
    Verdicts are remembered, also after a limit, so siblings with the same hard answer cost one deadline together and
    get the same verdict."""

    def __init__(self, *, target: str = JUDGE, prepare: str = WARM, **settings: Any) -> None:
        """target, prepare: what workers run, for tests. settings: of the DeadlinePool."""
        self._pool = DeadlinePool(target=target, prepare=prepare, **settings)
        self._lock = threading.Lock()  # guards what is below
        self._asked: OrderedDict[Question, Future[list[str]]] = OrderedDict()

    async def compare(self, questions: Sequence[Question]) -> list[Found | VerifierUnavailable]:
        """(verdict, method) of each, as `judge.py` gives it; with `deadline` or `memory` at a limit, UNDECIDED where
        the reference alone meets one too.

        VerifierUnavailable stands in the place of a question on which a worker died twice, or for which none could be
        started; the others have their answers. Raises it after close."""
        found = await self._ask(questions)
        limited = [question for question, answer in zip(questions, found, strict=True) if answer in LIMITS]
        if not limited:
            return found
        alone = [replace(question, predicted=PLAIN) for question in limited]
        found_alone = await self._ask(alone, deadlines=PATIENCE)
        affordable = {q for q, answer in zip(limited, found_alone, strict=True) if answer not in LIMITS}
        return [
            (Verdict.WRONG, answer[1]) if question in affordable and isinstance(answer, tuple) else answer
            for question, answer in zip(questions, found, strict=True)
        ]

    async def close(self) -> None:
        """End the workers; questions still waiting raise VerifierUnavailable. May be called twice."""
        await asyncio.to_thread(self._pool.close)

    async def _ask(self, questions: Sequence[Question], *, deadlines: int = 1) -> list[Found | VerifierUnavailable]:
        futures = self._submit(questions, deadlines)
        waits = [asyncio.shield(asyncio.wrap_future(future)) for future in futures]
        found = await asyncio.gather(*waits, return_exceptions=True)
        return [self._verdict(question, answer) for question, answer in zip(questions, found, strict=True)]

    def _submit(self, questions: Sequence[Question], deadlines: int) -> list[Future[list[str]]]:
        """One future per question; questions that were asked before share theirs."""
        with self._lock:
            new = [question for question in dict.fromkeys(questions) if question not in self._asked]
            payloads = [asdict(question) for question in new]
            try:
                futures = self._pool.submit(payloads, deadlines=deadlines)
            except PoolError as error:
                raise VerifierUnavailable(f"{error}.") from error
            self._asked.update(zip(new, futures, strict=True))
            mine = []
            for question in questions:
                self._asked.move_to_end(question)
                mine.append(self._asked[question])
            while len(self._asked) > CACHE_SIZE:
                self._asked.popitem(last=False)
            return mine

    def _verdict(self, question: Question, answer: list[str] | BaseException) -> Found | VerifierUnavailable:
        if isinstance(answer, TimeoutError | MemoryError):
            return LIMITS[isinstance(answer, MemoryError)]
        if isinstance(answer, BaseException):
            with self._lock:
                self._asked.pop(question, None)  # an outage is not remembered
            if isinstance(answer, PoolError):
                return VerifierUnavailable(f"{answer}.")
            raise answer
        verdict, method = answer
        return Verdict(verdict), method
