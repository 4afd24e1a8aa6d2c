"""Code of the user's own in a contract suite: that of examples/own_model, and what ROCSTAR_OWN names.

ROCSTAR_OWN="learning.loss=mine.py:loss" pytest tests/contracts/test_loss.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rocstar.errors import ConfigError

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


def refusal(modules: Path, setting: str, code: str, use: Callable[[str], object]) -> str:
    """What is said where this setting names `own` of a module with this code, and `use` is called with its name."""
    (modules / "plug.py").write_text(code)
    with pytest.raises(ConfigError) as refused:
        use("plug:own")
    message = str(refused.value)
    assert message.startswith(f"{setting} = 'plug:own'")
    return message
