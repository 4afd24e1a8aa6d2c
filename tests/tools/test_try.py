"""`rocstar tool try`: a tool alone on the command line, as the model meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocstar.cli import main as cli
from rocstar.support.exits import FAILED, OK, USAGE
from tests.commands import json_of

TOOL = '''
def grams_in(unit: str) -> int:
    """Says how many grams one of a unit of weight is.

    Args:
        unit: The unit's name in the singular.
    """
    return {"blem": 7}[unit]
'''


@pytest.fixture(autouse=True)
def workplace(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(modules)
    Path("weights.py").write_text(TOOL)
    Path("calls.jsonl").write_text('{"unit": "blem"}\n\n{"unit": "dralk"}\n')


def test_a_tool_alone_shows_what_the_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tool", "try", "weights.py:grams_in"]) == OK
    told = capsys.readouterr().out
    assert told.startswith('spec for the model: {"type": "function"') and "The unit's name in the singular." in told


def test_calls_have_the_results_that_the_model_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tool", "try", "weights.py:grams_in", '{"unit": "blem"}']) == OK
    assert '> {"unit": "blem"}\n7\n[ok, ' in capsys.readouterr().out
    calls = json_of(capsys, "tool", "try", "weights.py:grams_in", "calls.jsonl", code=FAILED)["calls"]
    assert [(one["status"], one["reply"].strip()) for one in calls] == [
        ("ok", "7"),
        ("code_error", "KeyError: 'dralk'"),
    ]


def test_a_bad_call_is_answered_as_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tool", "try", "weights.py:grams_in", '{"unit": "blem"', '{"unit": 5}']) == FAILED
    told = capsys.readouterr().out
    assert "Failed to decode" in told and "'unit': Input should be a valid string" in told
    assert told.count("[bad_call, ") == 2


def test_calls_of_a_notebook_are_those_of_one_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [json.dumps({"code": code}) for code in ("x = 6", "x * 7", "1 / 0")]
    settings = ["sandbox.preload=[]", "sandbox.slots=1", "rollout.feedback_errors=short"]
    calls = json_of(capsys, "tool", "try", "notebook", *programs, *settings, code=FAILED)["calls"]
    assert [one["status"] for one in calls] == ["ok", "ok", "code_error"]
    assert calls[1]["reply"].strip() == "42" and calls[2]["reply"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pyton"], "did you mean 'python'?"),
        (["weights.py:grams"], "has no 'grams'"),
        (["weights.py:grams_in", "blem"], "'blem' is neither the arguments of a call"),
        (["python", "learning.clip_low=0.1"], "learning.clip_low is not read here"),
        (["python", "code=1"], "takes arguments as JSON"),
    ],
)
def test_what_cannot_be_tried_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert cli.run(["tool", "try", *arguments]) == USAGE
    assert told in capsys.readouterr().err
