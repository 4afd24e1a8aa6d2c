"""Code of the user's own in a contract suite: that of examples/own_model, and what ROCSTAR_OWN names.

ROCSTAR_OWN="learning.loss=mine.py:loss" pytest tests/contracts/test_loss.py
"""

from __future__ import annotations

import os
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model" / "own_learning.py"
SETTINGS = ("learning.advantage", "learning.loss", "resample.method")


def own(setting: str, example: str) -> list[str]:
    """References to run a suite over: to the example's object of that name, and to the user's own for this setting.

    Raises ValueError for a part of ROCSTAR_OWN that no suite would try."""
    mine = [f"{EXAMPLE}:{example}"]
    for part in os.environ.get("ROCSTAR_OWN", "").split():
        name, _, reference = part.partition("=")
        if name not in SETTINGS or not reference:
            raise ValueError(f"ROCSTAR_OWN has {part!r}; write SETTING=file.py:name, of {', '.join(SETTINGS)}")
        mine += [reference] * (name == setting)
    return mine
