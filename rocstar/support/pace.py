"""Estimates the remaining time of countable work, once there is enough data. Pure: times are passed in."""

from __future__ import annotations

FEWEST = 3  # items that must have ended before an estimate
CLOSE = 1.25  # two guesses that differ by less are shown as one


class Pace:
    """Items of one kind that end one after the other, or many at once. Source: ours."""

    def __init__(self, done: int, began: float) -> None:
        """done: items that had ended when work on the others began. began: seconds of any clock that only goes
        forward."""
        self._ends = [(done, began)]

    def seen(self, done: int, now: float) -> None:
        """`done` items have ended by now."""
        self._ends.append((done, now))

    def left(self, total: int, now: float) -> tuple[float, float] | None:
        """Seconds until `total` are done: the least and the most of two guesses, from the mean pace so far and from
        that of the newer half of the items. None before FEWEST items. Items that run side by side end the quick ones
        first; then the newer half is slower, and the two lie far apart."""
        (first, began), (done, _) = self._ends[0], self._ends[-1]
        if done - first < FEWEST or now <= began:
            return None
        middle = next((end for end in self._ends if end[0] - first >= (done - first) / 2), self._ends[0])
        guesses = [(now - since) / (done - before) for before, since in ((first, began), middle) if done > before]
        return (total - done) * min(guesses), (total - done) * max(guesses)


def time_left(left: tuple[float, float] | None) -> str:
    """`, about 3 min left`, `, 3 to 8 min left`; empty if unknown."""
    if left is None or left[1] <= 0:
        return ""
    least, most = left
    low = round(least / unit_of(most)[1])
    if most <= CLOSE * least or duration(most).split()[0] == str(low):
        return f", about {duration(most)} left"
    return f", {low} to {duration(most)} left"


def unit_of(seconds: float) -> tuple[str, float]:
    """The largest unit of which there are at least two, and its seconds."""
    return next(((name, size) for name, size in (("h", 3600.0), ("min", 60.0)) if seconds >= 2 * size), ("s", 1.0))


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h`."""
    name, size = unit_of(seconds)
    return f"{max(1, round(seconds / size))} {name}"
