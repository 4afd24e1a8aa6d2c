"""Weights of one version on their way from learners to servers, past any file: one pass over the learners' layers for
all engines that are given them at once. Here is who waits for whom; how the bytes go is in `torch_channel.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rocstar.errors import EngineUnavailable

if TYPE_CHECKING:
    from rocstar.engines.torch_channel import Channel

CallWorkers = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Calls a method of every worker process of a server, given its name and arguments; returns what each says."""
SendWeights = Callable[[CallWorkers, Sequence[Mapping[str, Any]]], Awaitable[list[dict[str, Any]]]]
"""Sends weights to the worker processes of a server, given what each said of itself; returns what each says then:
nothing where it has them, else `refused` or `failed` and why. Raises EngineUnavailable."""
Answer = asyncio.Future[list[dict[str, Any]]]


class Sending:
    """An engine that comes later than the others, because it had been lost, gets a pass of its own, as long as the
    learners still have these weights."""

    def __init__(self, channel: Channel, send: Callable[[], Awaitable[None]], turn: asyncio.Lock) -> None:
        """send: the learners' part of a pass, to its end; raises EngineUnavailable where they have other weights by
        now. turn: held by the one pass that the channel is used for."""
        self._channel, self._send, self._turn = channel, send, turn
        self._expected = 0
        self._waiting: list[tuple[CallWorkers, Sequence[Mapping[str, Any]], Answer]] = []
        self._passes: set[asyncio.Task[None]] = set()

    @contextmanager
    def expecting(self) -> Iterator[SendWeights]:
        """Entered by an engine as soon as it is given the weights: nothing is sent before all that have entered ask for
        them or leave."""
        self._expected += 1
        asked = False

        async def send(call: CallWorkers, workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            nonlocal asked
            asked = True
            loop = asyncio.get_running_loop()
            answer: Answer = loop.create_future()
            self._waiting.append((call, workers, answer))
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
            calls, workers, answers = zip(*self._waiting, strict=True)
            self._waiting, self._expected = [], 0
            task = asyncio.get_running_loop().create_task(self._pass(calls, workers, answers))
            self._passes.add(task)
            task.add_done_callback(self._passes.discard)

    async def _pass(
        self, calls: Sequence[CallWorkers], workers: Sequence[Sequence[Mapping[str, Any]]], answers: Sequence[Answer]
    ) -> None:
        found: Sequence[list[dict[str, Any]] | BaseException] = ()
        try:
            async with self._turn:
                found = await self._sent(calls, self._channel.plans(workers))
        except BaseException as error:
            found = [error] * len(answers)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            for answer, said in zip(answers, found, strict=True):
                if answer.done():  # nobody waits for it any more
                    continue
                if isinstance(said, BaseException):
                    answer.set_exception(said)
                else:
                    answer.set_result(said)

    async def _sent(
        self, calls: Sequence[CallWorkers], plans: Sequence[dict[str, Any]]
    ) -> list[list[dict[str, Any]] | BaseException]:
        """What the workers of each engine say once all is sent. Raises what the learners' part does, but for
        EngineUnavailable, of which the workers are told."""
        asked = [asyncio.ensure_future(call("rocstar_receive", plan)) for call, plan in zip(calls, plans, strict=True)]
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

    def _stop_for(self, answer: Answer) -> None:
        """One that ends with a fault ends the pass: the others would wait for a worker that is gone."""
        if answer.cancelled():
            return
        if error := answer.exception():
            self._channel.stop(f"an engine that was sent weights failed: {error}")
        elif wrong := [worker for worker in answer.result() if worker]:
            self._channel.stop(f"an engine that was sent weights failed: {next(iter(wrong[0].values()))}")
