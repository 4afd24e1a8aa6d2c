"""How far a step under way is, in words, for whoever looks on: nothing here takes part in it."""

from __future__ import annotations

from rocstar.protocols import Environment, Reply
from rocstar.rollout.environment import EnvironmentFactory
from rocstar.support.pace import time_left
from rocstar.types import Completion


class Attempts:
    """The attempts of a step, counted by their environments."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = self.calls = 0

    def counted(self, make: EnvironmentFactory) -> EnvironmentFactory:
        """The same environments, which count here."""
        return lambda *given: _Counted(make(*given), self)

    def told(self, seconds: float, tokens: int, expected: float | None) -> str:
        """After so many seconds, in which engines wrote so many tokens. expected: seconds that the step before took;
        None for the first."""
        left = None if expected is None else (expected - seconds, expected - seconds)
        pace = f"{tokens / max(seconds, 1e-9):.0f} tokens/s"
        return f"{self.done} of {self.total} attempts done, {pace}, {self.calls} calls run{time_left(left)}"


class _Counted:
    """An environment of somebody else's."""

    def __init__(self, inner: Environment, attempts: Attempts) -> None:
        self._inner, self._attempts = inner, attempts
        self._open = True

    def opening(self) -> tuple[int, ...]:
        return self._inner.opening()

    def budget(self) -> int:
        return self._inner.budget()

    async def reply(self, completion: Completion) -> Reply:
        reply = await self._inner.reply(completion)
        self._attempts.calls += len(reply.results)
        return reply

    async def close(self) -> None:
        self._attempts.done += self._open  # it may be closed twice
        self._open = False
        await self._inner.close()


def update_told(seconds: float, done: int, total: int) -> str:
    """Of an update that has learnt from `done` of its tokens; empty before the first."""
    if not 0 < done <= total or seconds <= 0:
        return ""
    left = seconds * (total - done) / done
    return f"{done} of {total} tokens, {done / seconds:.0f} tokens/s{time_left((left, left))}"
