"""Sends weights of one version from learners to servers without a file: one pass over the learners' layers serves all
engines that load them at once. This file coordinates the waiting; `torch_channel.py` transfers the bytes."""

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
"""Calls a method of every worker process of a server, given its name and arguments; returns each worker's answer."""
SendWeights = Callable[[CallWorkers, Sequence[Mapping[str, Any]]], Awaitable[list[dict[str, Any]]]]
"""Sends weights to a server's worker processes, given each worker's facts; returns each one's result: empty if it has
the weights, else `refused` or `failed` and why. Raises EngineUnavailable."""
LOOKS, LOOK_SECONDS = 1500, 0.01  # checks, and seconds between them, of whether all workers wait for the weights
TOGETHER_SECONDS = 15.0  # an engine waits for others to pause; less than a fleet's patience, which is per engine


@dataclass(slots=True, eq=False)
class SentEngine:
    """One of the engines that load the weights."""

    plan: asyncio.Future[dict[str, Any]]
    """The plan for its workers; set once its pass has begun."""
    workers: Sequence[Mapping[str, Any]] = ()
    """Facts of each worker; empty before the engine requests the weights."""
    sending: asyncio.Task[BaseException | None] | None = None
    """Its pass, once all expected engines have requested the weights."""


class Sending:
    """An engine that comes later than the others, because it had been lost, gets its own pass, as long as the learners
    still have these weights. Engines whose pass failed because of another engine get one more."""

    def __init__(self, channel: Channel, send: Callable[[], Awaitable[None]], turn: asyncio.Lock) -> None:
        """send: runs the learners' part of a pass; raises EngineUnavailable if they already have other weights. turn:
        held by the one pass that uses the channel."""
        self._channel, self._send, self._turn = channel, send, turn
        self._expected: list[SentEngine] = []
        self._passes: set[asyncio.Task[BaseException | None]] = set()

    @contextmanager
    def expecting(self) -> Iterator[SendWeights]:
        """Entered by an engine as soon as it gets the weights: nothing is sent before all engines inside request them
        or leave, or one has waited too long."""
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
        """A SendWeights. Also raises the errors of the learners' part, except EngineUnavailable, which workers
        report."""
        engine.workers = workers
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin_when_all_wait)  # after other engines that get them in this pass of the event loop
        patience = loop.call_later(TOGETHER_SECONDS, self._begin, engine)
        try:
            results = await call("rocstar_receive", await engine.plan)
        except BaseException as error:
            self._stop(engine, str(error) or "it was given up")
            raise
        finally:
            patience.cancel()
        wrong = [worker for worker in results if worker]
        is_own = bool(wrong) and self._stop(engine, next(iter(wrong[0].values())))
        assert engine.sending is not None
        if raised := await asyncio.shield(engine.sending):
            raise raised
        if not wrong or is_own or is_again:
            return results
        engine.plan, engine.sending = loop.create_future(), None
        self._expected.append(engine)
        return await self._sent(engine, call, workers, is_again=True)

    def _stop(self, engine: SentEngine, why: str) -> bool:
        """End the pass of an engine that failed or was given up: the others would wait for workers that are gone.
        Returns whether the pass was under way."""
        has_begun = engine.plan.done() and not engine.plan.cancelled()
        if is_under_way := has_begun and engine.sending is not None and not engine.sending.done():
            self._channel.stop(f"an engine that was sent weights failed: {why}")
        return is_under_way

    def _begin_when_all_wait(self) -> None:
        if self._expected and all(engine.workers for engine in self._expected):
            self._begin(self._expected[0])

    def _begin(self, waits: SentEngine) -> None:
        """Start a pass for this engine and the others that wait for one; later engines get their own."""
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
        """Returns the error instead of raising it: asyncio would print it if no task awaits this one any more."""
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
        """Start the learners only once all workers wait: this event loop calls the workers, and the learners may block
        it until they are done."""
        try:
            plans = self._channel.plans([engine.workers for engine in engines])
            for engine, plan in zip(engines, plans, strict=True):
                engine.plan.set_result(plan)
            for _ in range(LOOKS):
                if not self._channel.missing("awaited"):
                    break
                await asyncio.sleep(LOOK_SECONDS)
            else:
                raise EngineUnavailable("some workers did not start to wait for the weights")
            await self._send()
        except BaseException as error:
            self._channel.give_up(str(error))
            if not isinstance(error, EngineUnavailable):
                raise
