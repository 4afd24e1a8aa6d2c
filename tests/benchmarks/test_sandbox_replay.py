"""The comparison that the replay of published programs rests on: what it calls equal, and what it must not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """A benchmark by its file: benchmarks are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


compare = load("sandbox_replay")
JUPYTER_ERROR = """--------------------------------------------------------------------------- \
PolificationFailed                        Traceback (most recent call last) Cell In[1], line 2
----> 2 div(\x1b[38;5;241m-8, 12)
-> 4979     raise ComputationFailed('div', 2, exc)
 ComputationFailed: div(-8, 12) failed without generators"""


@pytest.mark.parametrize(
    ("recorded", "text", "how"),
    [
        ("51", "51", "output"),
        ("[1,\n 2]", "[1, 2]", "output"),
        ("<empty_execution>", "", "output"),
        ("{1, 2, 10}", "{10, 1, 2}", "set order"),
        ("[{x, y}, {2}]", "[{y, x}, {2}]", "set order"),
        ("51", "52", ""),
        ("51", "", ""),
        ("{1, 2}", "{1, 3}", ""),
        ("[1, 2]", "[2, 1]", ""),
        ("<empty_execution>", "None", ""),
        ("total: 3 is {1, 2}", "total: 3 is {2, 1}", ""),
    ],
)
def test_outputs_agree_but_for_white_space_and_the_order_of_sets(recorded: str, text: str, how: str) -> None:
    assert compare.agreement(recorded, compare.Shown(text=text)) == how


@pytest.mark.parametrize(
    ("recorded", "error"),
    [
        (JUPYTER_ERROR, "ComputationFailed"),
        ("Cell In[1], line 2\n    h = (-8))\n           ^\nSyntaxError: unmatched ')'", "SyntaxError"),
        ("NameError: name 'x' is not defined\n", "NameError"),
        ("timeout_decorator.timeout_decorator.TimeoutError: 'Timed Out'", "time limit"),
        ("-" * 75 + " Timeout waiting for reply                Traceback (most recent call last) ", "time limit"),
        ("the ValueError: none", ""),
        ("51", ""),
    ],
)
def test_recorded_errors_are_known_by_class(recorded: str, error: str) -> None:
    assert compare.error_of(recorded) == error


@pytest.mark.parametrize(
    ("recorded", "shown", "how"),
    [
        ("NameError: name 'x' is not defined", {"error": "NameError"}, "error"),
        ("NameError: name 'x' is not defined", {"error": "TypeError"}, ""),
        ("NameError: name 'x' is not defined", {"text": "NameError: name 'x' is not defined"}, ""),
        ("51", {"text": "51", "error": "NameError"}, ""),
        ("timeout_decorator.TimeoutError: 'Timed Out'", {"error": "CellTimeout"}, "error"),
        ("a warning 51", {"text": "51", "warnings": "a warning\n"}, "warnings"),
        ("51", {"text": "51", "warnings": "a warning\n"}, "output"),
    ],
)
def test_an_error_agrees_with_one_of_its_class_only(recorded: str, shown: dict[str, str], how: str) -> None:
    assert compare.agreement(recorded, compare.Shown(**{"text": "", **shown})) == how
