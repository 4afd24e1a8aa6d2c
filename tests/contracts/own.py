"""Code of the user's own in a contract suite: that of examples/own_model, and what ROCSTAR_OWN names.

ROCSTAR_OWN="learning.loss=mine.py:loss" pytest tests/contracts/test_loss.py
"""

from __future__ import annotations

import os
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model" / "own_learning.py"


def own(setting: str, example: str) -> list[str]:
    """References to run a suite over: to the example's object of that name, and to the user's own for this setting."""
    given = (part.partition("=") for part in os.environ.get("ROCSTAR_OWN", "").split())
    return [f"{EXAMPLE}:{example}", *(reference for name, _, reference in given if name == setting)]
