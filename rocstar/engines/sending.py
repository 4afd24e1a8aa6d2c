"""Weights of one version on their way from learners to servers, past any file: one pass over the learners' layers for
all engines that are given them at once. Here is who waits for whom; how the bytes go is in `torch_channel.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rocstar.errors import EngineUnavailable
from rocstar.protocols import CallWorkers, SendWeights


class Sends(Protocol):
    """The learners' end (`torch_channel.Channel`)."""

    def plans(self, engines: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]: ...

    def stop(self, why: str) -> None: ...

    def give_up(self, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Receiving:
    """An engine that waits for its weights."""

    call: CallWorkers
    workers: Sequence[Mapping[str, Any]]
    answer: asyncio.Future[list[dict[str, Any]]]


class Sending:
    """A `WeightSender`. An engine that comes later, because it had been lost, gets a pass of its own, as long as the
    learners still have these weights."""

    def __init__(self, channel: Sends, send: Callable[[], Awaitable[None]], turn: asyncio.Lock) -> None:
        """send: the learners' part of a pass, to its end; raises EngineUnavailable where they have other weights by
        now. turn: held by the one pass that the channel is used for."""
        self._channel, self._send, self._turn = channel, send, turn
        self._expected = 0
        self._waiting: list[Receiving] = []
        self._passes: set[asyncio.Task[None]] = set()

    @contextmanager
    def expecting(self) -> Iterator[SendWeights]:
        """See `WeightSender`."""
        self._expected += 1
        asked = False

        async def send(call: CallWorkers, workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            nonlocal asked
            asked = True
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[list[dict[str, Any]]] = loop.create_future()
            self._waiting.append(Receiving(call, workers, answer))
            loop.call_soon(self._begin_when_all_wait)  # after others that are given them at this very moment
            return await answer

        try:
            yield send
        finally:
            if not asked:
                self._expected -= 1
                self._begin_when_all_wait()

    def _begin_when_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._expected:
            waiting, self._waiting, self._expected = self._waiting, [], 0
            task = asyncio.get_running_loop().create_task(self._pass(waiting))
            self._passes.add(task)
            task.add_done_callback(self._passes.discard)

    async def _pass(self, waiting: Sequence[Receiving]) -> None:
        try:
            async with self._turn:
                answers = await self._sent(waiting)
        except BaseException as error:
            answers = [error] * len(waiting)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            for receiving, found in zip(waiting, answers, strict=True):
                if receiving.answer.done():
                    continue
                if isinstance(found, BaseException):
                    receiving.answer.set_exception(found)
                else:
                    receiving.answer.set_result(found)

    async def _sent(self, waiting: Sequence[Receiving]) -> list[list[dict[str, Any]] | BaseException]:
        """What the workers of each engine say once all is sent. Raises what the learners' part does, but for
        EngineUnavailable, of which the workers are told."""
        plans = self._channel.plans([receiving.workers for receiving in waiting])
        asked = [
            asyncio.ensure_future(receiving.call("rocstar_receive", plan))
            for receiving, plan in zip(waiting, plans, strict=True)
        ]
        for answer in asked:
            answer.add_done_callback(self._stop_for)
        try:
            await self._send()
        except BaseException as error:
            self._channel.give_up(str(error))
            if not isinstance(error, EngineUnavailable):
                for answer in asked:
                    answer.cancel()
                raise
        return list(await asyncio.gather(*asked, return_exceptions=True))

    def _stop_for(self, answer: asyncio.Future[list[dict[str, Any]]]) -> None:
        """One that ends with a fault ends the pass: the others would wait for a worker that is gone."""
        if answer.cancelled():
            return
        if error := answer.exception():
            self._channel.stop(f"an engine that was sent weights failed: {error}")
        elif wrong := [worker for worker in answer.result() if worker]:
            self._channel.stop(f"an engine that was sent weights failed: {next(iter(wrong[0].values()))}")
