"""Attempts in other tools' forms: nothing lost."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.errors import DataError
from rocstar.record.formats import ENDINGS, FORMS, as_written, export, feedback_of, structured
from rocstar.record.rollouts import segments_of

SETTINGS = {"rollout": {"feedback_max_chars": 100, "feedback_truncate": "left", "feedback_errors": "short"}}
FEEDBACK = feedback_of(SETTINGS)
CALL = '\n{"name": "python", "arguments": {"code": "print(a)"}}\n'


def result(status: str = "ok", stdout: str = "", stderr: str = "") -> dict[str, Any]:
    facts = {"run_seconds": 0.1, "queue_seconds": 0.0, "truncated_bytes": 0, "isolation": "L4"}
    return {"call_id": "call_0", "status": status, "stdout": stdout, "stderr": stderr, "value": None, **facts}


def row(question: str = "1+1?", told: str = "<answer>2</answer>", **more: Any) -> dict[str, Any]:
    call = {"id": "call_0", "tool": "python", "arguments": {"code": "print(a)"}, "raw": CALL, "parse_error": None}
    turns = [
        {"calls": [call], "results": [result("code_error", stderr="Traceback\nNameError: name 'a'")]},
        {"calls": [], "results": []},
    ]
    made = {
        **dict.fromkeys(("extracted", "method", "reason", "weight", "penalty_errors", "penalty_format", "advantage")),
        **dict.fromkeys(("fault", "seconds", "tool_seconds")),
        **{"step": 3, "problem_id": "p", "index": 1, "source": "tests", "gold": "2", "verdict": "right", "reward": 1.0},
        **{"kept": True, "stop": "answered", "response_tokens": 9, "calls": 1, "failed_calls": 1, "policy_version": 2},
        "reward_parts": {"form": 0.5},
        "question": question,
        "text": [f"I try.<tool_call>{CALL}</tool_call><|im_end|>", f"{told}<|im_end|>"],
        "turns": turns,
    } | more
    for turn, written in zip(made["turns"], made["text"], strict=True):
        turn["segments"] = segments_of(written, turn["calls"])
    return made


def test_calls_and_replies_become_messages_that_name_each_other() -> None:
    asked, calling, reply, answer = structured(row(), FEEDBACK)
    assert asked == {"role": "user", "content": "1+1?"}
    assert calling["content"] == "I try."
    assert json.loads(calling["tool_calls"][0]["function"]["arguments"]) == {"code": "print(a)"}
    assert reply == {"role": "tool", "tool_call_id": "call_0", "content": "NameError: name 'a'"}
    assert answer == {"role": "assistant", "content": "<answer>2</answer>"}


def test_harmony_s_channels_are_thoughts_and_answers() -> None:
    thought = "<|channel|>analysis<|message|>{}<|end|>"
    call = '<|start|>assistant to=functions.python<|channel|>commentary json<|message|>{"code": "print(a)"}<|call|>'
    said = f"{thought.format('It is 2.')}<|start|>assistant<|channel|>final<|message|>2<|return|>"
    one = row(text=[thought.format("I try.") + call, said])
    one["turns"][0]["calls"][0]["raw"] = call
    one["turns"][0]["segments"] = segments_of(one["text"][0], one["turns"][0]["calls"])
    _, calling, _, answer = structured(one, FEEDBACK)
    assert calling["content"] == "I try." and calling["tool_calls"]
    assert answer == {"role": "assistant", "content": "2", "thinking": "It is 2."}


def test_a_call_that_did_not_parse_stays_in_the_text() -> None:
    broken = row()
    broken["turns"][0]["calls"][0] |= {"parse_error": "no JSON", "arguments": {}}
    calling = structured(broken, FEEDBACK)[1]
    assert calling == {"role": "assistant", "content": f"I try.<tool_call>{CALL}</tool_call>"}
    assert as_written(broken, FEEDBACK)[1] == calling


def test_settings_that_do_not_say_what_the_model_read_are_refused() -> None:
    with pytest.raises(DataError, match="lack feedback_max_chars"):
        feedback_of({"rollout": {}})


def test_every_form_has_all_attempts(tmp_path: Path) -> None:
    for form in FORMS:
        path = tmp_path / f"{form}.{ENDINGS[form]}"
        assert export((row(index=index) for index in range(3)), FEEDBACK, form, path) == 3
    lines = [json.loads(line) for line in (tmp_path / "trl.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert lines[0]["prompt"] + lines[0]["completion"] == structured(row(), FEEDBACK)
    with (tmp_path / "csv.csv").open(newline="") as file:
        assert [(one["gold"], one["reward_parts"]) for one in csv.DictReader(file)] == [("2", '{"form": 0.5}')] * 3
    assert lines[0]["reward_parts"] == {"form": 0.5}
    assert not list(tmp_path.glob(".*"))


def test_a_problem_of_messages_keeps_its_system_text_and_its_earlier_turns(tmp_path: Path) -> None:
    """Else a model would be taught the attempt after another prompt."""
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    attempt = row(prompt_messages=own)
    assert structured(attempt, FEEDBACK)[:3] == [*own, structured(row(), FEEDBACK)[1]]
    found = {}
    for form in ("messages", "trl"):
        export([attempt], FEEDBACK, form, tmp_path / form)
        found[form] = json.loads((tmp_path / form).read_text())
    assert found["trl"]["prompt"] == found["messages"]["messages"][:2] == own
    assert found["trl"]["completion"][0]["role"] == "assistant"


def test_a_source_that_breaks_off_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    export([row()], FEEDBACK, "messages", path)
    before = path.read_bytes()

    def breaks() -> Any:
        yield row()
        raise DataError("cut")

    with pytest.raises(DataError):
        export(breaks(), FEEDBACK, "messages", path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["kept.jsonl"]


def test_an_attempt_that_wrote_nothing_has_every_form(tmp_path: Path) -> None:
    nothing = row(text=[], turns=[], verdict=None, fault="EngineUnavailable: gone")
    for form in FORMS:
        assert export([nothing], FEEDBACK, form, tmp_path / f"{form}.{ENDINGS[form]}") == 1


def test_a_spreadsheet_takes_no_text_for_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    export([row(question="=HYPERLINK(1)", extracted="-5"), row(extracted="-cmd", gold="@x")], FEEDBACK, "csv", path)
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["question"], first["extracted"]) == ("'=HYPERLINK(1)", "-5")
    assert (second["extracted"], second["gold"]) == ("'-cmd", "'@x")
