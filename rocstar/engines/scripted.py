"""Engines for tests and demonstrations of everything around an engine: one that replays given replies, and one that
puts faults in front of any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rocstar.errors import EngineUnavailable
from rocstar.protocols import Engine, ForwardingEngine, TextCodec
from rocstar.types import Completion, EngineLoad, Finish, Sampling, Weights, seed_for, spans_of

NO_TOKEN = 2**31 - 1  # an id that no tokenizer has


class ScriptedEngine:
    """Continues every session with the next of its replies.

    `replies` are texts; a session reads one list, chosen by its seed-independent name: `scripts(session_id)` or the
    same list for all. Each reply is encoded, ends at its first stop token (one is put after a reply that has none) and
    is cut at max_new_tokens. Logprobs are small negative numbers that follow from the seed, so that they are
    recognisable. A session that asks for more than its script holds gets EngineUnavailable."""

    def __init__(self, codec: TextCodec, replies: Sequence[str] | Callable[[str], Sequence[str]]) -> None:
        self._codec = codec
        self._scripts = replies if callable(replies) else lambda session_id: replies
        self._taken: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._produced = 0
        self._version = 0
        self.seen: dict[str, list[tuple[int, ...]]] = {}
        """Token ids each session was asked to continue, call by call."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        await asyncio.sleep(0)
        script, turn = self._scripts(session_id), self._taken.get(session_id, 0)
        if turn >= len(script):
            raise EngineUnavailable(f"the script of session {session_id} ends after {len(script)} replies")
        self._taken[session_id] = turn + 1
        self.seen.setdefault(session_id, []).append(tuple(token_ids))
        stops = sampling.stop_token_ids
        ids = [*self._codec.encode(script[turn]), *stops[:1]]
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids)) + 1
        kept = ids[: min(end, sampling.max_new_tokens)]
        finish = Finish.STOP if kept and kept[-1] in stops else Finish.LENGTH
        base = seed_for(sampling.seed, request_id) % 1000 / 1e6
        self._held[session_id] = len(token_ids) + len(kept)
        self._produced += len(kept)
        return Completion(
            token_ids=tuple(kept),
            logprobs=tuple(-0.001 - base for _ in kept),
            finish=finish,
            version_spans=spans_of([self._version] * len(kept)),
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            capacity_tokens=2**20,
            used_tokens=sum(self._held.values()),
            running=0,
            waiting=0,
            policy_version=self._version,
            produced_tokens=self._produced,
        )

    async def load_weights(self, weights: Weights) -> None:
        self._version = weights.version

    async def abort(self, request_id: str) -> None:
        """Nothing runs long enough to be aborted."""

    async def close_session(self, session_id: str) -> None:
        self._taken.pop(session_id, None)
        self._held.pop(session_id, None)


class FaultKind(StrEnum):
    """What goes wrong."""

    DELAY = "delay"  # the answer comes late
    DEATH = "death"  # EngineUnavailable, for requests in flight too, and for new weights
    HANG = "hang"  # no answer comes any more, neither to requests in flight nor to new weights
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
    """How many requests it strikes; None: all from then on. After them a dead or hung engine is well again."""
    seconds: float = 0.0
    """DELAY: how late, seconds."""

    def strikes(self, number: int) -> bool:
        return self.first <= number and (self.count is None or number < self.first + self.count)


class FaultyEngine(ForwardingEngine):
    """Another engine with faults in front of it: which, and when, is data. Ours, for tests of whatever has to live with
    engines that fail. Raises EngineUnavailable while it is dead."""

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
        await asyncio.sleep(sum(fault.seconds for fault in struck))
        asked = super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        completion: Completion = await self._unless_it_dies(asked)
        if self._is(FaultKind.HANG) or any(fault.kind is FaultKind.LOST for fault in struck):
            await self._unless_it_dies(asyncio.Event().wait())
        for fault in struck:
            completion = spoilt(completion, fault.kind)
        return completion

    async def load_weights(self, weights: Weights) -> None:
        self._refuse_when_dead()
        if self._is(FaultKind.HANG):
            await asyncio.Event().wait()
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
