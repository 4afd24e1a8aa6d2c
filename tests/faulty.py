"""An engine that puts faults in front of any other, by a schedule: for tests of whatever has to live with engines that
fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rocstar.errors import EngineUnavailable
from rocstar.protocols import Engine, ForwardingEngine
from rocstar.types import Completion, Sampling, Weights

NO_TOKEN = 2**31 - 1  # an id that no tokenizer has


class FaultKind(StrEnum):
    """What goes wrong."""

    DEATH = "death"  # EngineUnavailable, for requests in flight too, and for new weights
    LOST = "lost"  # this request gets no answer; all else goes on
    WRONG_VERSION = "wrong_version"  # stamped with a later policy version than the weights have
    NAN = "nan"  # logprobs that are no numbers
    GARBAGE = "garbage"  # token ids that no tokenizer has


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of a schedule."""

    kind: FaultKind
    """What goes wrong."""
    first: int = 0
    """Number of the request that it strikes first, counted from 0 as they come."""
    count: int | None = 1
    """How many requests it strikes; None: all from then on. After them a dead engine is well again."""

    def strikes(self, number: int) -> bool:
        return self.first <= number and (self.count is None or number < self.first + self.count)


class FaultyEngine(ForwardingEngine):
    """Another engine with faults in front of it: which, and when, is data. Raises EngineUnavailable while it is
    dead."""

    def __init__(self, inner: Engine, faults: Sequence[Fault]) -> None:
        super().__init__(inner)
        self._faults = faults
        self._asked = 0
        self._died = asyncio.Event()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        number, self._asked = self._asked, self._asked + 1
        if self._is(FaultKind.DEATH):
            self._died.set()  # whoever is in flight hears of it
            self._died = asyncio.Event()
        self._refuse_when_dead()
        struck = [fault for fault in self._faults if fault.strikes(number)]
        asked = super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        completion: Completion = await self._unless_it_dies(asked)
        if any(fault.kind is FaultKind.LOST for fault in struck):
            await self._unless_it_dies(asyncio.Event().wait())
        for fault in struck:
            completion = spoilt(completion, fault.kind)
        return completion

    async def load_weights(self, weights: Weights) -> None:
        self._refuse_when_dead()
        await super().load_weights(weights)

    def _is(self, kind: FaultKind) -> bool:
        """Whether the newest request met this fault."""
        return any(fault.kind is kind and fault.strikes(self._asked - 1) for fault in self._faults)

    def _refuse_when_dead(self) -> None:
        if self._is(FaultKind.DEATH):
            raise EngineUnavailable("the engine is dead")

    async def _unless_it_dies(self, work: Coroutine[Any, Any, Any]) -> Any:
        tasks = [asyncio.create_task(work), asyncio.create_task(self._died.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[1] in done:
            raise EngineUnavailable("the engine died")
        return tasks[0].result()


def spoilt(completion: Completion, kind: FaultKind) -> Completion:
    """What an engine with this fault returns in its place; the same for faults that are not in the answer."""
    if kind is FaultKind.WRONG_VERSION:
        later = tuple(span._replace(version=span.version + 1) for span in completion.version_spans)
        return replace(completion, version_spans=later)
    if kind is FaultKind.NAN:
        return replace(completion, logprobs=(float("nan"),) * len(completion.logprobs))
    if kind is FaultKind.GARBAGE:
        return replace(completion, token_ids=(NO_TOKEN,) * len(completion.token_ids))
    return completion
