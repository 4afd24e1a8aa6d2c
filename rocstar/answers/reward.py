"""Numbers in what a reward function or an agent returns: the reward, and its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LARGEST = 1e15  # sums and squares of numbers beyond a float's range would end the run
RewardParts = dict[str, float]
"""Further numbers beside a reward, by name."""


def parts_in(given: Mapping[Any, Any], reward: str) -> RewardParts:
    """The finite numbers of a dict, bools too, except its reward; what else it has is left out and fails no attempt."""
    found = {}
    for name, value in given.items():
        with suppress(TypeError, ValueError, RuntimeError):  # RuntimeError: of a tensor with several numbers
            if name != reward and math.isfinite(number := number_of(value)):
                found[str(name)] = number
    return found


def number_of(given: Any) -> float:
    """A reward as a float; numbers of numpy and torch are accepted, text is not. One beyond LARGEST is
    inf. Raises TypeError, ValueError."""
    if isinstance(given, str | bytes):
        raise TypeError("a text is not a number")
    try:
        found = float(given)
    except OverflowError:
        return math.inf
    return math.inf if found > LARGEST else -math.inf if found < -LARGEST else found
