"""How long a trajectory will still be, learned from those that have ended and from those that have not yet.

A life table: of the trajectories that reached a length, the share that ended there. Trajectories under way count for
the lengths that they have reached, because those that have ended are the short ones. Some groups end sooner than
others: a group's factor is its ends so far over the ends that the table expected of it, shrunk towards one (the
posterior mean of a gamma frailty; Vaupel, Manton and Stallard 1979). The rest is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

LENGTHS = 64  # rows of the table, evenly over 0 .. limit
PRIOR_ENDS = 4.0  # ends assumed before any is seen, evenly over all lengths
MEMORY = 16_384.0  # ends remembered; then the older half counts half, since the policy changes slowly
SHRINKAGE = 4.0  # the weight of a factor of one, in ends
LEVELS = range(-10, 11)  # factors 2 ** (level / 2), from 1/32 to 32: finer steps change no decision


@dataclass(slots=True, eq=False)
class Kin:
    """What is known of a trajectory's length: here, what its siblings have shown."""

    open: int = 0
    """Siblings that have not ended."""
    ends: int = 0
    """Those that ended by themselves."""
    expected: float = 0.0
    """Ends that the table expected of siblings that have ended, by themselves or not."""
    expected_live: float = 0.0
    """Ends that the table expected of siblings under way."""
    level: int = 0
    """Level of the group's factor; see LEVELS."""


class Expectation(Protocol):
    """What a scheduler wants to know. Lengths are response tokens, replies included."""

    def begin(self, session_id: str, group: str, limit: int) -> Any:
        """The trajectory's `kin`, which the other questions take."""
        ...

    def end(self, kin: Any, response: int) -> None: ...

    def learn(self, live: Iterable[tuple[Any, float]]) -> None:
        """`live`: kin and length of each trajectory under way."""
        ...

    def reads(self, kin: Any, response: float, prompt: int) -> float:
        """The work that is still to come: cached tokens to be read."""
        ...

    def length(self, kin: Any, response: float, share: float) -> float:
        """The length that a `share` of such trajectories do not pass."""
        ...


class LifeTable:
    def __init__(self) -> None:
        self.limit = 0
        self._rows = 1.0
        """Rows of the table per token."""
        self._ended = [0.0] * LENGTHS
        self._cut = 0.0
        """Ended by the limit."""
        self._groups: dict[str, Kin] = {}
        self._hazard = [0.0] * (LENGTHS + 1)
        """[i]: ends expected of one trajectory before length i / rows."""
        self._rests: dict[int, list[tuple[float, float]]] = {}
        """Level -> [LENGTHS] tokens still to come and reads for them, without the prompt's."""

    def begin(self, session_id: str, group: str, limit: int) -> Kin:
        """A limit larger than any before empties the table: the lengths in it were cut by the old limit."""
        if limit > self.limit:
            self.limit, self._rows = limit, LENGTHS / limit
            self._ended, self._cut = [PRIOR_ENDS / LENGTHS] * LENGTHS, 0.0
            self._renew([0.0] * LENGTHS)
        kin = self._groups.setdefault(group, Kin())
        kin.open += 1
        return kin

    def end(self, kin: Kin, response: int) -> None:
        kin.open -= 1
        row = self._row(response)
        kin.expected += self._hazard[row]
        if response < self.limit:
            self._ended[row] += 1.0
            kin.ends += 1
        else:
            self._cut += 1.0

    def learn(self, live: Iterable[tuple[Kin, float]]) -> None:
        """Groups without open siblings are forgotten."""
        self._groups = {group: kin for group, kin in self._groups.items() if kin.open}
        for kin in self._groups.values():
            kin.expected_live = 0.0
        here, hazard, rows = [0.0] * LENGTHS, self._hazard, self._rows
        for kin, response in live:
            row = min(LENGTHS - 1, int(response * rows))
            here[row] += 1.0
            kin.expected_live += hazard[row]
        for kin in self._groups.values():
            kin.level = _level((kin.ends + SHRINKAGE) / (kin.expected + kin.expected_live + SHRINKAGE))
        if sum(self._ended) + self._cut > MEMORY:
            self._ended, self._cut = [count / 2 for count in self._ended], self._cut / 2
        self._renew(here)

    def reads(self, kin: Kin, response: float, prompt: int) -> float:
        rests = self._rests.get(kin.level) or self._rests_at(kin.level)
        row = int(response * self._rows)
        tokens, reads = rests[row if row < LENGTHS else LENGTHS - 1]
        return reads + prompt * tokens

    def length(self, kin: Kin, response: float, share: float) -> float:
        ends = self._ends_before(response) - math.log(1.0 - share) / 2 ** (kin.level / 2)
        length = self._length_at(ends)
        return length if length > response + 1.0 else response + 1.0

    def _row(self, response: float) -> int:
        return min(LENGTHS - 1, int(response * self._rows))

    def _renew(self, live: Sequence[float]) -> None:
        """Ends over trajectories that reached a row; those that ended in it, or are in it now, count half."""
        hazard, reached = [0.0] * (LENGTHS + 1), self._cut
        for row in range(LENGTHS - 1, -1, -1):
            gone = live[row] + self._ended[row]
            hazard[row + 1] = self._ended[row] / (reached + gone / 2)
            reached += gone
        self._hazard = list(accumulate(hazard))
        self._rests = {}

    def _ends_before(self, response: float) -> float:
        place = min(response * self._rows, LENGTHS - 1e-9)
        row = int(place)
        return self._hazard[row] + (self._hazard[row + 1] - self._hazard[row]) * (place - row)

    def _length_at(self, ends: float) -> float:
        """The inverse of `_ends_before`."""
        row = bisect_right(self._hazard, ends) - 1
        if row >= LENGTHS:
            return float(self.limit)
        step = self._hazard[row + 1] - self._hazard[row]
        return (row + (ends - self._hazard[row]) / step) / self._rows

    def _rests_at(self, level: int) -> list[tuple[float, float]]:
        """Counted backwards from the limit."""
        factor, width, rests = 2 ** (level / 2), 1.0 / self._rows, [(0.0, 0.0)]
        for row in range(LENGTHS - 1, -1, -1):
            stays = math.exp(-factor * (self._hazard[row + 1] - self._hazard[row]))
            tokens, (tokens_after, reads_after) = width * (1 + stays) / 2, rests[-1]
            reads = tokens * width * (row + 0.5) + stays * reads_after
            rests.append((tokens + stays * tokens_after, reads))
        self._rests[level] = rests[:0:-1]
        return self._rests[level]


def _level(factor: float) -> int:
    return max(LEVELS[0], min(LEVELS[-1], round(2 * math.log2(factor))))
