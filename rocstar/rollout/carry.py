"""Attempts that wait for the next step instead of being waited for (`rollout.carry_over`).

    drawn in step 1    a a a a a b b b     with a limit of five tokens
    drawn in step 2      c c c   a a a     what step 1 set aside goes on, without a limit, and c begins

An attempt is set aside when it has sampled as many tokens as the limit says and has not ended. Its whole group moves to
the next step, which completes it under its own weights and learns from it; each step draws as many problems as ever.
Tokens decide, not time and not the reward: a step is the same however fast its engines are, and what moves is data, so
a resumed run repeats it. The limit follows from the attempts of the step before; a step without a limit waits for all.
Where more attempts than allowed exceed it, it grows until no more do, and until some group is whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from rocstar.rollout.together import all_or_none
from rocstar.types import Group, Stop

GROWTH = 1.25  # of a limit that too many attempts exceed
EXCEED = 0.8  # of the attempts allowed would have exceeded the next limit: so few that it seldom has to grow


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group with attempts that did not end yet, or that did not begin."""

    seed: int
    """Of the step that drew it; what its attempts sample follows from it."""
    group: Group
    """Attempts so far; none before they begin."""

    @property
    def aside(self) -> int:
        """Attempts set aside."""
        return sum(trajectory.stop is Stop.SET_ASIDE for trajectory in self.group.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a step leaves to the next one."""

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
    """Those to learn from."""
    left: Carried = Carried()


Advance = Callable[[OpenGroup, int | None], Awaitable[OpenGroup]]
"""(group, limit) -> the group when its attempts have ended or are set aside."""


async def rolled(
    advance: Advance, before: Carried, drawn: Sequence[OpenGroup], *, share: float, last: bool
) -> RolledStep:
    """A step that draws these groups after a step that has left `before`. last: it waits for all."""
    limit = None if last else before.limit
    count = len(before.groups)
    found = await all_or_none(
        [*(advance(group, None) for group in before.groups), *(advance(group, limit) for group in drawn)]
    )
    carried, drawn = found[:count], found[count:]
    allowed = int(share * sum(len(group.group.trajectories) for group in drawn))
    while limit and too_many([group.aside for group in drawn], allowed):
        limit = grown(limit)
        drawn = await all_or_none([advance(group, limit) for group in drawn])
    whole = [group.group for group in (*carried, *drawn) if not group.aside]
    if last:
        return RolledStep(groups=whole)
    lengths = (
        grown(limit or 0) if trajectory.stop is Stop.SET_ASIDE else trajectory.num_sampled_tokens
        for group in drawn
        for trajectory in group.group.trajectories
    )
    left = tuple(group for group in drawn if group.aside)
    return RolledStep(groups=whole, left=Carried(limit=next_limit(lengths, allowed), groups=left))


def too_many(aside_P: Sequence[int], allowed: int) -> bool:
    """Whether the limit must grow. aside_P: attempts set aside of each group that the step has drawn."""
    return sum(aside_P) > allowed or all(aside_P)


def grown(limit: int) -> int:
    """The limit when too many attempts exceed this one."""
    return int(limit * GROWTH) + 1


def next_limit(lengths: Iterable[int], allowed: int) -> int:
    """The limit of the next step, from the tokens that each attempt drawn in this one has sampled; those set aside
    count as grown."""
    return max(1, sorted(lengths)[-1 - int(EXCEED * allowed)])
