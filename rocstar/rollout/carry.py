"""Attempts that are carried over to the next step instead of delaying this one (`rollout.carry_over`).

    drawn in step 1    a a a a a b b b     with a limit of five tokens
    drawn in step 2      c c c   a a a     what step 1 set aside goes on, without a limit, and c begins

An attempt is set aside when it has sampled as many tokens as the limit says and has not ended. Its whole group moves to
the next step, which completes it under its own weights and learns from it; each step draws as many problems as ever.
Tokens decide, not time or reward: a step is the same however fast its engines are, and carried attempts are data, so a
resumed run repeats it. The limit follows from the attempts of the step before; a step without a limit waits for all. If
more attempts than allowed exceed the limit, it grows until no more do and some group is complete."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocstar.rollout.together import all_or_none
from rocstar.types import Group, Stop, Trajectory

GROWTH = 1.25  # of a limit that too many attempts exceed
EXCEED = 0.8  # of the allowed attempts would have exceeded the next limit, so that it seldom has to grow


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group with attempts that did not end yet, or that did not begin."""

    seed: int
    """Seed of the step that drew it; its attempts' samples follow from it."""
    group: Group
    """Attempts so far; none before they begin."""

    @property
    def aside(self) -> int:
        """Attempts set aside."""
        return sum(trajectory.stop is Stop.SET_ASIDE for trajectory in self.group.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a step passes on to the next one."""

    limit: int | None = None
    """Tokens after which that step sets attempts aside; None: it waits for all."""
    groups: tuple[OpenGroup, ...] = ()

    @property
    def attempts(self) -> int:
        """Those set aside."""
        return sum(group.aside for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledStep:
    """The attempts of a step."""

    groups: list[Group]
    """Groups to learn from."""
    left: Carried = Carried()
    refilled: int = 0
    """How many of the groups, the last ones, replace groups without a signal (`rollout.refill`)."""


class StepLimit:
    """Decides where a step sets attempts aside: at the first of `first`, grown(first), ... that no more than `allowed`
    of its attempts exceed, and not all of its groups. Each attempt stops at every one of these until that is known, so
    what it samples does not depend on when others do."""

    def __init__(self, first: int | None, groups: int, attempts: int, allowed: int) -> None:
        """attempts: in each of the groups."""
        self._first, self._groups, self._allowed = first, groups, allowed
        self.tokens = first or 0
        self._running = groups * attempts
        self._waiting: list[tuple[str, asyncio.Future[bool]]] = []

    async def attempt(self, problem: str, go_on: GoOn) -> Trajectory:
        """An attempt at a problem of the step, until it ends or is set aside."""
        before, most = None, self._first
        while (found := await go_on(before, most)).stop is Stop.SET_ASIDE:
            assert most is not None
            if most == self.tokens and await self._stands(problem):
                return found
            before, most = found, grown(most)
        self._running -= 1
        self._decide()
        return found

    async def _stands(self, problem: str) -> bool:
        """Whether the limit stays."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((problem, answer))
        self._running -= 1
        self._decide()
        return await answer

    def _decide(self) -> None:
        waiting = self._waiting
        grows = too_many(Counter(problem for problem, _ in waiting), self._groups, self._allowed)
        if self._running and not grows:
            return
        if grows:
            self.tokens, self._running = grown(self.tokens), self._running + len(waiting)
        self._waiting = []
        for _, answer in waiting:
            if not answer.done():  # its attempt was cancelled
                answer.set_result(not grows)


GoOn = Callable[[Trajectory | None, int | None], Awaitable[Trajectory]]
"""(the attempt so far, most tokens in all) -> the attempt, ended or set aside."""
Advance = Callable[[OpenGroup, StepLimit | None], Coroutine[Any, Any, OpenGroup]]
"""(group, limit) -> the group when its attempts have ended or are set aside."""


async def rolled(
    advance: Advance, before: Carried, drawn: Sequence[OpenGroup], *, attempts: int, share: float, last: bool
) -> RolledStep:
    """Roll out a step that draws these groups, of so many attempts, after a step that passed on `before`. last: wait
    for all."""
    allowed = int(share * attempts * len(drawn))
    limit = StepLimit(None if last else before.limit, len(drawn), attempts, allowed)
    found = await all_or_none(
        [*(advance(group, None) for group in before.groups), *(advance(group, limit) for group in drawn)]
    )
    whole = [group.group for group in found if not group.aside]
    if last:
        return RolledStep(groups=whole)
    lengths = [
        grown(limit.tokens) if trajectory.stop is Stop.SET_ASIDE else trajectory.num_sampled_tokens
        for group in found[len(before.groups) :]
        for trajectory in group.group.trajectories
        if trajectory.stop is not Stop.ENVIRONMENT_FAILED  # its length is not that of an ended attempt
    ]
    exceed = allowed * len(lengths) // (attempts * len(drawn))
    following = next_limit(lengths, exceed) if lengths else before.limit
    return RolledStep(
        groups=whole, left=Carried(limit=following, groups=tuple(group for group in found if group.aside))
    )


def too_many(aside: Mapping[str, int], groups: int, allowed: int) -> bool:
    """Whether a limit must grow. aside: attempts that exceed it, by problem; groups: of the step."""
    return sum(aside.values()) > allowed or len(aside) == groups


def grown(limit: int) -> int:
    """The limit when too many attempts exceed this one."""
    return int(limit * GROWTH) + 1


def next_limit(lengths: Iterable[int], allowed: int) -> int:
    """The limit of the next step, from the tokens sampled by each attempt drawn in this one; those set aside count with
    the grown limit."""
    return max(1, sorted(lengths)[-1 - int(EXCEED * allowed)])
