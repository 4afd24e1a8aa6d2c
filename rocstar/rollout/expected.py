"""Estimates how many tokens a trajectory still has ahead, from trajectories that have ended and those under way.

A life table: of the trajectories that reached a length, the share that ended there. Trajectories under way count for
the lengths that they have reached, because those that ended first are the short ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

LENGTHS = 64  # rows of the table, evenly over 0 .. limit
PRIOR_ENDS = 4.0  # ends assumed before any is observed, evenly over all lengths
MEMORY = 16_384.0  # ends remembered; then the older half counts half, since the policy changes slowly


class LifeTable:
    """Length estimates for a scheduler. Lengths are response tokens, replies included."""

    def __init__(self) -> None:
        self.limit = 0
        self._rows = 1.0
        """Rows of the table per token."""
        self._ended = [0.0] * LENGTHS
        self._cut = 0.0
        """How many the limit ended."""
        self._hazard = [0.0] * (LENGTHS + 1)
        """[i]: ends expected of one trajectory before length i / rows."""
        self._rests: list[tuple[float, float]] = []
        """[LENGTHS] tokens still to come and reads for them, without the prompt's."""

    def begin(self, limit: int) -> None:
        """A trajectory begins that may have at most `limit` tokens. A limit larger than any before empties the table:
        the lengths in it were cut by the old limit."""
        if limit > self.limit:
            self.limit, self._rows = limit, LENGTHS / limit
            self._ended, self._cut = [PRIOR_ENDS / LENGTHS] * LENGTHS, 0.0
            self._renew([0.0] * LENGTHS)

    def end(self, response: int) -> None:
        if response < self.limit:
            self._ended[self._row(response)] += 1.0
        else:
            self._cut += 1.0

    def learn(self, live: Iterable[float]) -> None:
        """`live`: length of each trajectory under way."""
        here = [0.0] * LENGTHS
        for response in live:
            here[self._row(response)] += 1.0
        if sum(self._ended) + self._cut > MEMORY:
            self._ended, self._cut = [count / 2 for count in self._ended], self._cut / 2
        self._renew(here)

    def reads(self, session_id: str, response: float, prompt: int) -> float:
        """Its remaining work: cached tokens to be read."""
        tokens, reads = self._rests[self._row(response)]
        return reads + prompt * tokens

    def length(self, session_id: str, response: float, share: float) -> float:
        """The length that a `share` of such trajectories do not pass."""
        return max(response + 1.0, self._length_at(self._ends_before(response) - math.log(1.0 - share)))

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
        width, rests = 1.0 / self._rows, [(0.0, 0.0)]
        for row in range(LENGTHS - 1, -1, -1):  # counted backwards from the limit
            stays = math.exp(-hazard[row + 1])
            tokens, (tokens_after, reads_after) = width * (1 + stays) / 2, rests[-1]
            reads = tokens * width * (row + 0.5) + stays * reads_after
            rests.append((tokens + stays * tokens_after, reads))
        self._rests = rests[:0:-1]

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
