"""What the steps of engines cost, learned from what engines report: so much for a step, whatever is in it, and more for
each token sampled, each cached token read and each token fed.

The scheduler weighs two losses by these prices: a step that runs with part of the cache empty, and feeding again what
was evicted. Least squares over all engines, no price below zero (coordinate descent on the normal equations). Ours.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP, SAMPLED, READ, FED = range(4)  # the prices, in seconds for one
SWEEPS = 40  # of coordinate descent, from the last prices on
FORGET = 0.9999  # of what was seen before, kept at each look of any engine


class Prices:
    """Of an average engine; one for all."""

    def __init__(self) -> None:
        self.each = [0.0] * 4
        """Seconds, by STEP .. FED."""
        self._products = [[0.0] * 4 for _ in range(4)]
        self._sums = [0.0] * 4

    def see(self, amounts: Sequence[float], seconds: float, slowness: float) -> float:
        """Enter what an engine so many times slower than the average did in so many seconds; what an average engine
        takes for it, as far as known."""
        weight, seconds = 1.0 / amounts[STEP], seconds / slowness
        for amount, row, place in zip(amounts, self._products, range(4), strict=True):
            scaled = weight * amount
            self._sums[place] = FORGET * self._sums[place] + scaled * seconds
            for other, value in enumerate(amounts):
                row[other] = FORGET * row[other] + scaled * value
        if not any(self.each):
            self.learn()
        return sum(price * amount for price, amount in zip(self.each, amounts, strict=True))

    def learn(self) -> None:
        for _ in range(SWEEPS):
            for place, row in enumerate(self._products):
                if row[place]:
                    others = sum(price * product for price, product in zip(self.each, row, strict=True))
                    error = self._sums[place] - others
                    self.each[place] = max(0.0, self.each[place] + error / row[place])
