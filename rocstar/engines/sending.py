"""Weights of one version on their way from learners to servers, past any file: one pass over the learners' layers for
all engines that are given them at once. Here is who waits for whom; how the bytes go is in `torch_channel.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rocstar.errors import EngineUnavailable

if TYPE_CHECKING:
    from rocstar.engines.torch_channel import Channel

CallWorkers = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Calls a method of every worker process of a server, given its name and arguments; returns what each says."""
SendWeights = Callable[[CallWorkers, Sequence[Mapping[str, Any]]], Awaitable[list[dict[str, Any]]]]
"""Sends weights to the worker processes of a server, given what each said of itself; returns what each says then:
nothing where it has them, else `refused` or `failed` and why. Raises EngineUnavailable."""
LOOKS, LOOK_SECONDS = 1500, 0.01  # at most, and between two: whether all workers have begun to wait for the weights
TOGETHER_SECONDS = 15.0  # that an engine waits for others to be paused: less than a fleet's patience, which is for each


@dataclass(slots=True, eq=False)
class SentEngine:
    """An engine among those that are given the weights."""

    plan: asyncio.Future[dict[str, Any]]
    """What its workers must know; there once its pass has begun."""
    workers: Sequence[Mapping[str, Any]] = ()
    """What each says of itself; empty before the engine asks for the weights."""
    sending: asyncio.Task[BaseException | None] | None = None
    """Its pass, once all that are expected have asked."""


class Sending:
    """An engine that comes later than the others, because it had been lost, gets a pass of its own, as long as the
    learners still have these weights. Those whose pass ended by another's fault get one more."""

    def __init__(self, channel: Channel, send: Callable[[], Awaitable[None]], turn: asyncio.Lock) -> None:
        """send: the learners' part of a pass, to its end; raises EngineUnavailable where they have other weights by
        now. turn: held by the one pass that the channel is used for."""
        self._channel, self._send, self._turn = channel, send, turn
        self._expected: list[SentEngine] = []
        self._passes: set[asyncio.Task[BaseException | None]] = set()

    @contextmanager
    def expecting(self) -> Iterator[SendWeights]:
        """Entered by an engine as soon as it is given the weights: nothing is sent before all that have entered ask for
        them or leave, or one has waited for that too long."""
        engine = SentEngine(asyncio.get_running_loop().create_future())
        self._expected.append(engine)
        try:
            yield partial(self._sent, engine)
        finally:
            if engine in self._expected:
                self._expected.remove(engine)
                self._begin_when_all_wait()

    async def _sent(
        self, engine: SentEngine, call: CallWorkers, workers: Sequence[Mapping[str, Any]], *, is_again: bool = False
    ) -> list[dict[str, Any]]:
        """A SendWeights. Raises what the learners' part does too, but for EngineUnavailable, of which workers tell."""
        engine.workers = workers
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin_when_all_wait)  # after others that are given them right now
        patience = loop.call_later(TOGETHER_SECONDS, self._begin, engine)
        try:
            said = await call("rocstar_receive", await engine.plan)
        except BaseException as error:
            self._stop(engine, str(error) or "it was given up")
            raise
        finally:
            patience.cancel()
        wrong = [worker for worker in said if worker]
        is_own = bool(wrong) and self._stop(engine, next(iter(wrong[0].values())))
        assert engine.sending is not None
        if raised := await asyncio.shield(engine.sending):
            raise raised
        if not wrong or is_own or is_again:
            return said
        engine.plan, engine.sending = loop.create_future(), None
        self._expected.append(engine)
        return await self._sent(engine, call, workers, is_again=True)

    def _stop(self, engine: SentEngine, why: str) -> bool:
        """One that fails, or is waited for no more, ends its pass: the others would wait for workers that are gone.
        Whether it was under way."""
        has_begun = engine.plan.done() and not engine.plan.cancelled()
        if is_under_way := has_begun and engine.sending is not None and not engine.sending.done():
            self._channel.stop(f"an engine that was sent weights failed: {why}")
        return is_under_way

    def _begin_when_all_wait(self) -> None:
        if self._expected and all(engine.workers for engine in self._expected):
            self._begin(self._expected[0])

    def _begin(self, waits: SentEngine) -> None:
        """A pass for this engine, and the others that wait for one; what comes later gets its own."""
        if waits not in self._expected:
            return
        engines = [engine for engine in self._expected if engine.workers]
        self._expected = [engine for engine in self._expected if not engine.workers]
        task = asyncio.get_running_loop().create_task(self._pass(engines))
        for engine in engines:
            engine.sending = task
        self._passes.add(task)
        task.add_done_callback(self._passes.discard)

    async def _pass(self, engines: Sequence[SentEngine]) -> BaseException | None:
        """What was raised, which asyncio would print where nobody waits any more."""
        try:
            async with self._turn:
                waiting = [engine for engine in engines if not engine.plan.done()]  # the others were cancelled
                if waiting:
                    await self._exchange(waiting)
        except BaseException as error:
            for engine in engines:
                if not engine.plan.done():
                    engine.plan.set_exception(error)
            return error
        return None

    async def _exchange(self, engines: Sequence[SentEngine]) -> None:
        """The learners begin once all workers wait for them, who were called by this event loop: it may stand still
        until the learners are done."""
        try:
            plans = self._channel.plans([engine.workers for engine in engines])
            for engine, plan in zip(engines, plans, strict=True):
                engine.plan.set_result(plan)
            for _ in range(LOOKS):
                if not self._channel.missing("awaited"):
                    break
                await asyncio.sleep(LOOK_SECONDS)
            else:
                raise EngineUnavailable("some of the workers that are sent weights did not begin to wait for them")
            await self._send()
        except BaseException as error:
            self._channel.give_up(str(error))
            if not isinstance(error, EngineUnavailable):
                raise
