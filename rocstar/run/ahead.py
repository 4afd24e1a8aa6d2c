"""The attempts of a stage's steps, those of later steps begun while earlier ones are still to be learnt from.

    ahead = 1      take 0            learn 0          take 1        learn 1
    under way      0 1               1                1 2           2

Step s begins when step s - ahead - 1 has been learnt from and its weights are published, never before. So what writes
its tokens is at most `ahead` steps older than the weights that learn from them. What would be older waits; nothing is
dropped for its age, and all attempts of a step are learnt from in that step, so slow ones are not left out.
Attempts under way go on under new weights as these are published (docs/fleet.md).

Not here: what an attempt is (rollout/), which problems a step takes (pools.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from rocstar.types import Group


class StepsAhead:
    """`roll` makes the attempts of a step, by its number in the stage; steps from `end` on do not exist."""

    def __init__(self, roll: Callable[[int], Coroutine[Any, Any, list[Group]]], end: int, ahead: int) -> None:
        self._roll = roll
        self._end = end
        self._ahead = ahead
        self._begun: dict[int, asyncio.Task[list[Group]]] = {}
        self._idle_since = 0.0

    async def take(self, step: int) -> list[Group]:
        """The attempts at each problem of `step`. Call it when the step before it has been learnt from and its weights
        are published."""
        for later in range(step, min(step + self._ahead + 1, self._end)):
            if later not in self._begun:
                self._begin(later)
        groups = await self._begun[step]
        del self._begun[step]
        return groups

    @property
    def under_way(self) -> bool:
        """Whether attempts of steps that were not taken yet are being made."""
        return any(not task.done() for task in self._begun.values())

    def worked_since(self, moment: float) -> float:
        """Seconds since `moment` (of time.monotonic) in which attempts were made, none having begun meanwhile."""
        until = time.monotonic() if self.under_way else self._idle_since
        return max(0.0, until - moment)

    async def close(self) -> None:
        """End what is under way. It was not recorded, so nothing is lost that was."""
        tasks = list(self._begun.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, step: int) -> None:
        self._begun[step] = task = asyncio.create_task(self._roll(step))
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[list[Group]]) -> None:
        self._idle_since = time.monotonic()


@asynccontextmanager
async def steps_ahead(
    roll: Callable[[int], Coroutine[Any, Any, list[Group]]], *, end: int, ahead: int
) -> AsyncIterator[StepsAhead]:
    """As StepsAhead; attempts that are under way end with the context."""
    steps = StepsAhead(roll, end, ahead)
    try:
        yield steps
    finally:
        await steps.close()
