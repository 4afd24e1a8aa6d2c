"""The swap test on a model that reads and on one that does not: real environment, scripted words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocstar.analysis.screen import swap_page
from rocstar.analysis.swap import ReplyText, begun_attempts, swap_test, variants_of
from rocstar.cli.main import run
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation
from rocstar.types import Completion, Group, Problem, Sampling, Status, Stop, ToolResult, Verdict
from tests.commands import json_of
from tests.rollout.examples import CODEC, conversation, program, roller
from tests.scripted import ScriptedEngine, ScriptedTool, ScriptedVerifier
from tests.tiny_run import finished_run

UNITS = ("ab", "cd", "ef", "gh")
PROBLEMS = [Problem(id=f"p{number}", question=f"{number}", answer="1") for number in range(8)]


class Talking(ScriptedEngine):
    """Tries `zz`, then the unit that it was told, or `yy` where it was told none or does not read."""

    def __init__(self, *, reads: bool) -> None:
        self.words: dict[str, str] = {}
        super().__init__(CODEC, lambda session: [self.words[session]] * 9)
        self.reads = reads

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **names: Any) -> Completion:
        question, *said = CODEC.decode(token_ids).split("<tool_response>")
        (number,) = re.findall(r"user\n(\d)", question)
        told = [unit for unit in UNITS if said and unit in said[-1].partition("</tool_response>")[0]]
        unit = "zz" if not said else told[0] if told and self.reads else "yy"
        right = said and "right" in said[-1]
        text = "<answer>\\boxed{1}</answer>" if right else program(f"try {number} {unit}")
        self.words[names["session_id"]] = text
        return await super().generate(token_ids, sampling, **names)


def tool() -> ScriptedTool:
    """Needs the unit of the problem, and names it where it was called with another."""
    answers: dict[str, str | ToolResult] = {}
    for number in range(len(PROBLEMS)):
        needed = UNITS[number % len(UNITS)]
        fails = ToolResult(call_id="", status=Status.CODE_ERROR, stderr=f"use {needed}")
        answers |= {f"try {number} {unit}": "right" if unit == needed else fails for unit in (*UNITS, "zz", "yy")}
    return ScriptedTool(answers)


def talking(*, reads: bool, talk: Conversation | None = None) -> Roller:
    right = Verdict.RIGHT, Verdict.WRONG
    verifier = ScriptedVerifier(lambda problem, made: right[made.stop is not Stop.ANSWERED])
    return roller(Talking(reads=reads), talk or conversation(tool()), verifier=verifier)


def kept(file: Path, groups: Sequence[Group]) -> Path:
    records = [
        AttemptRecord(problem=group.problem, trajectory=one, policy_version=0)
        for group in groups
        for one in group.trajectories
    ]
    write_attempts(file, 0, records, None)
    return file


async def swapped_in(folder: Path, *, reads: bool) -> dict[ReplyText, dict[str, Any]]:
    made = talking(reads=reads)
    file = kept(folder / "samples.parquet", await made.roll(PROBLEMS, attempts=2, seed=1))
    variants = variants_of(list(begun_attempts(file, {})), made.conversation, seed=1)
    assert len(variants) == len(PROBLEMS)
    rows = await swap_test(variants, made, Sampling(max_new_tokens=1, seed=1))
    assert {row["after"] for row in rows} == {"failed call"} and all(row["attempts"] == len(PROBLEMS) for row in rows)
    return {ReplyText(row["told"]): row for row in rows}


def values(row: dict[str, Any]) -> dict[str, float]:
    return {name: figure["value"] for name, figure in row.items() if isinstance(figure, dict)}


async def test_a_model_that_reads_takes_the_false_word_and_fails_by_it(tmp_path: Path) -> None:
    found = await swapped_in(tmp_path, reads=True)
    assert values(found[ReplyText.TRUE]) == {
        "calls": 1, "call_works": 1, "same_next": 1, "right": 1, "true_word": 1, "false_word": 0,
    }  # fmt: skip
    for told, false in ((ReplyText.SWAPPED, None), (ReplyText.BLANK, 0), (ReplyText.FALSE, 1)):
        figures = values(found[told])
        assert (figures["call_works"], figures["same_next"], figures["true_word"]) == (0, 0, 0)
        assert false is None or figures["false_word"] == false
    assert values(found[ReplyText.FALSE])["right"] == 1  # the next failure tells the truth again
    low, high = found[ReplyText.FALSE]["false_word"]["interval"]
    assert 0.6 < low < 0.8 and high == 1


async def test_a_model_that_does_not_read_goes_on_alike_whatever_it_is_told(tmp_path: Path) -> None:
    for row in (await swapped_in(tmp_path, reads=False)).values():
        assert values(row) == {
            "calls": 1, "call_works": 0, "same_next": 1, "right": 0, "true_word": 0, "false_word": 0,
        }  # fmt: skip


async def test_replies_in_words_of_ones_own_are_left_out(tmp_path: Path) -> None:
    made = talking(reads=True)
    file = kept(tmp_path / "samples.parquet", await made.roll(PROBLEMS, attempts=1, seed=1))
    shouting = replace(made.conversation, feedback=lambda result: f"{made.conversation.feedback(result)}!")
    assert variants_of(list(begun_attempts(file, {})), shouting, seed=1) == []


async def test_an_attempt_goes_on_from_the_very_tokens_that_were_recorded(tmp_path: Path) -> None:
    made = talking(reads=True)
    groups = await made.roll(PROBLEMS[:3], attempts=1, seed=1)
    begun = list(begun_attempts(kept(tmp_path / "samples.parquet", groups), {}))
    for one, group in zip(variants_of(begun, made.conversation, seed=1), groups, strict=True):
        first = group.trajectories[0].turns[0]
        assert one.attempt.turns[0].completion.token_ids == first.completion.token_ids
        assert one.replies[ReplyText.TRUE] == first.reply_ids
        assert "use " not in CODEC.decode(one.replies[ReplyText.BLANK])


def test_an_evaluation_in_which_no_tool_replied_is_told_as_such() -> None:
    assert swap_page({"evaluation": "r/before@0", "problems": 0, "rows": []}).startswith("r/before@0: no tool replied")


@pytest.mark.slow
def test_a_run_is_tested_by_its_own_weights(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished_run(tmp_path_factory.getbasetemp())
    runs = folder / "runs"
    found = json_of(capsys, "analyze", "last", "--swap", "--runs", str(runs))["swap"]
    assert found and all(test["evaluation"].startswith("tiny/") for test in found)
    for test in found:
        controls = [row for row in test["rows"] if row["told"] == "true"]
        assert controls and all(row["same_next"]["value"] == 1 for row in controls)
    assert run(["analyze", str(next(runs.glob("*/rollouts/*.parquet"))), "--swap"]) == 2
    assert "it is no evaluation; name a run" in capsys.readouterr().err
    assert run(["analyze", "last", "--swap", "--entropy", "--runs", str(runs)]) == 2
