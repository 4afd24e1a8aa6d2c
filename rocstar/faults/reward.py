"""A reward function, in TRL's signature, that earns 1 for the right answer and does one thing wrong, once in a process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from rocstar.faults.script import RIGHT

LATE_SECONDS = 4.0  # longer than the patience of rocstar's own path


def reward_of(misdeed: str) -> Callable[..., list[float]]:
    """misdeed: raises, late, nan; something else: none."""
    left = [1]

    def reward(completions: list[str], **columns: Any) -> list[float]:
        strikes, left[0] = left[0] and misdeed, 0
        if strikes == "raises":
            raise ConnectionError("the judge cannot be reached")
        if strikes == "late":
            time.sleep(LATE_SECONDS)
            return [0.0] * len(completions)
        if strikes == "nan":
            return [float("nan")] * len(completions)
        return [float(RIGHT in text) for text in completions]

    return reward


reward = reward_of(os.environ.get("FAULTS_REWARD", ""))


def always(completions: list[str], **columns: Any) -> list[float]:
    """For a model that has learnt nothing."""
    return [1.0] * len(completions)
