"""The attempts of a stage's steps; those of later steps begin before earlier ones have been learnt from.

    ahead = 1      take 0            learn 0          take 1        learn 1
    under way      0 1               1                1 2           2

Step s begins when step s - ahead - 1 has been learnt from and its weights are published, never before. So the weights
that write its tokens are at most `ahead` steps older than those that learn from them. No attempt is dropped for its
age, and a step learns from all of its attempts, including slow ones. Attempts under way continue under new weights once
these are published (docs/fleet.md).

`RolloutProgress` shows the progress of the attempts that a step waits for.

Not here: what an attempt is (rollout/), which problems a step takes (pools.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rocstar.rollout.collect import RolledStep
from rocstar.support.pace import time_left
from rocstar.support.watch import Watch
from rocstar.types import Trajectory

Waiting = Callable[[int], AbstractContextManager[None]]


class StepsAhead:
    """`roll` makes the attempts of a step, by its number in the stage; steps from `end` on do not exist. `waiting` is
    entered while the run waits for a step's attempts. Attempts under way end with the context."""

    def __init__(
        self,
        roll: Callable[[int], Coroutine[Any, Any, RolledStep]],
        end: int,
        ahead: int,
        waiting: Waiting = lambda step: nullcontext(),
    ) -> None:
        self._roll = roll
        self._end = end
        self._ahead = ahead
        self._waiting = waiting
        self._begun: dict[int, asyncio.Task[RolledStep]] = {}
        self._idle_since = 0.0

    async def take(self, step: int) -> RolledStep:
        """The attempts at each problem of `step`. Call it when the step before has been learnt from and its weights are
        published."""
        for later in range(step, min(step + self._ahead + 1, self._end)):
            if later not in self._begun:
                self._begun[later] = task = asyncio.create_task(self._roll(later))
                task.add_done_callback(self._note_end)
        with self._waiting(step):
            rolled = await self._begun[step]
        del self._begun[step]
        return rolled

    @property
    def under_way(self) -> bool:
        """Whether attempts of steps not yet taken are running."""
        return any(not task.done() for task in self._begun.values())

    def worked_since(self, moment: float) -> float:
        """Seconds since `moment` (of time.monotonic) with attempts under way, if no step has begun since then."""
        until = time.monotonic() if self.under_way else self._idle_since
        return max(0.0, until - moment)

    async def __aenter__(self) -> StepsAhead:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the attempts under way, none of which is recorded yet."""
        tasks = list(self._begun.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[RolledStep]) -> None:
        self._idle_since = time.monotonic()


class Attempts:
    """The attempts of a step, counted as they end."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = self.calls = 0

    def count(self, trajectory: Trajectory) -> None:
        """Count an attempt that has ended, and its calls."""
        self.done += 1
        self.calls += len(trajectory.results)

    def summary(self, seconds: float, tokens: int, expected: float | None) -> str:
        """Describes their progress after so many seconds, in which engines wrote so many tokens. expected: seconds that
        the step before took; None for the first."""
        left = None if expected is None else (expected - seconds, expected - seconds)
        pace = f"{tokens / max(seconds, 1e-9):.0f} tokens/s"
        return f"{self.done} of {self.total} attempts done, {pace}, {self.calls} calls run{time_left(left)}"


class RolloutProgress:
    """Shows the progress of a step's attempts while the run waits for them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._attempts: dict[int, Attempts] = {}
        self._seconds: float | None = None

    def begun(self, step: int, total: int) -> Attempts:
        """Count the attempts of a step from now on."""
        self._attempts[step] = attempts = Attempts(total)
        return attempts

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Show the progress of a step's attempts within this context."""
        began, before = time.monotonic(), self._watch.asked()

        def far(seconds: float) -> str:
            now, attempts = self._watch.asked(), self._attempts.get(step)
            written = now.produced_tokens - before.produced_tokens if now and before else 0
            return attempts.summary(seconds, max(0, written), self._seconds) if attempts else ""

        with self._watch.telling(far):
            yield
        self._attempts.pop(step, None)
        self._seconds = time.monotonic() - began


def update_summary(seconds: float, done: float, total: float) -> str:
    """Describes learning from `total` tokens that is done with `done`; empty before the first."""
    if not 0 < done <= total or seconds <= 0:
        return ""
    left = seconds * (total - done) / done
    return f"{done:.0f} of {total:.0f} tokens, {done / seconds:.0f} tokens/s{time_left((left, left))}"
