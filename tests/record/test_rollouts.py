"""Rollout files: every attempt with what was sampled, what the tools said, and why it was kept or dropped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pyarrow import parquet

from rocstar.dialogue.marked_calls import turn_of
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.segments import written as by_assistant
from rocstar.errors import DataError
from rocstar.record import rollouts
from rocstar.record.rollouts import (
    COLUMNS,
    AttemptRecord,
    Decode,
    Row,
    attempt_rows,
    attempts_table,
    decoded,
    parquet_file,
    problem_of,
    read_rollouts,
    read_table,
    recorded_tallies,
    rows_of_step,
    segments_of,
    trajectory_of,
    without_end,
    write_attempts,
    write_parquet,
)
from rocstar.record.table import select
from rocstar.types import ToolCall, Turn, Verdict
from tests.dialogue.test_marked_calls import NAMES, SYNTAXES
from tests.record.examples import PROBLEM, attempts_of, decode, resampled, run, trajectory


def record(index: int, verdict: Verdict | None) -> AttemptRecord:
    return AttemptRecord(problem=PROBLEM, trajectory=trajectory(index, verdict=verdict), policy_version=5)


def test_a_written_step_reads_back_with_every_column(tmp_path: Path) -> None:
    folder = run(tmp_path)
    kept = resampled()
    attempt = AttemptRecord(
        problem=PROBLEM,
        trajectory=kept.group.trajectories[0],
        choice=kept.choices[0],
        advantage=-0.5,
        policy_version=7,
        entropies=[0.0] * 5 + [0.5] * 3,
    )
    write_attempts(folder.rollout_file(42), 42, [attempt], decode)
    assert folder.rollout_file(42).name == "step=000042.parquet"
    with parquet_file(folder.rollout_file(42)) as file:
        group = file.metadata.row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
    plain = {each.path_in_schema.partition(".")[0] for each in columns if not each.has_dictionary_page}
    assert plain == {"loss_mask", "sampled_logprobs", "entropies", "old_logprobs", "kept"}, "numbers do not repeat"
    (row,) = read_rollouts(folder, 42)
    assert list(row) == list(COLUMNS)
    source = attempt.trajectory
    assert tuple(row["token_ids"]) == source.token_ids == (1, 2, 11, 12, 7, 8, 9, 13)
    assert tuple(row["loss_mask"]) == source.loss_mask
    assert row["sampled_logprobs"] == [0, 0, -0.5, -0.25, 0, 0, 0, -1.0]
    assert row["entropies"] == [0.0] * 5 + [0.5] * 3
    expected = {
        "step": 42,
        "question": "1+1?",
        "gold": "2",
        "source": "tests",
        "index": 0,
        "text": ["<11> <12>", "<13>"],
        "verdict": "right",
        "reward": 1.0,
        "reward_parts": None,
        "extracted": "2",
        "method": "integer",
        "penalty_errors": 1.0,
        "penalty_format": 0.5,
        "penalty_total": 1.5,
        "kept": False,
        "reason": "dropped.quality",
        "weight": 0.75,
        "advantage": -0.5,
        "stop": "answered",
        "fault": None,
        "response_tokens": 6,
        "calls": 1,
        "failed_calls": 1,
        "seconds": 1.5,
        "tool_seconds": 0.5,
        "policy_version": 7,
    }
    assert {key: row[key] for key in expected} == expected
    (call,), (result,) = row["turns"][0]["calls"], row["turns"][0]["results"]
    assert call["arguments"] == {"code": "print(2)"}
    assert (result["status"], result["run_seconds"], result["isolation"]) == ("code_error", 0.25, "L2")
    assert row["turns"][1]["calls"] == []
    assert [(turn["engine_seconds"], turn["tool_seconds"]) for turn in row["turns"]] == [(0.75, 0.25), (None, None)]
    assert [turn.engine_seconds for turn in trajectory_of(row).turns] == [0.75, None]
    older = [{key: value for key, value in turn.items() if "_seconds" not in key} for turn in row["turns"]]
    assert [turn.tool_seconds for turn in trajectory_of({**row, "turns": older}).turns] == [None, None]


def test_a_problem_that_came_as_a_conversation_is_read_back_as_one(tmp_path: Path) -> None:
    said = ({"role": "system", "content": "Be brief ✓"}, {"role": "user", "content": "1+1?"})
    records = [replace(record(0, Verdict.RIGHT), problem=replace(PROBLEM, messages=said)), record(0, Verdict.RIGHT)]
    folder = run(tmp_path)
    write_attempts(folder.rollout_file(1), 1, records, decode)
    talk, plain = read_rollouts(folder, 1)
    assert (problem_of(talk).messages, problem_of(plain).messages) == (said, ())


def test_a_reward_that_is_no_sum_of_halves_reads_back_to_the_bit(tmp_path: Path) -> None:
    folder, made = run(tmp_path), record(0, Verdict.WRONG)
    assert made.trajectory.outcome is not None
    outcome = replace(made.trajectory.outcome, reward=0.1, parts={"format \ud800": 0.7, "length": -3.0})
    write_attempts(
        folder.rollout_file(1), 1, [replace(made, trajectory=replace(made.trajectory, outcome=outcome))], None
    )
    (row,) = read_rollouts(folder.path, 1)
    read_back = trajectory_of(row).outcome
    assert read_back == outcome


def test_attempts_that_reached_no_group_are_there_with_their_reason(tmp_path: Path) -> None:
    folder = run(tmp_path)
    attempts = [
        *attempts_of([resampled()], policy_version=3),
        record(3, None),
        record(4, Verdict.UNDECIDED),
        record(5, Verdict.WRONG),
    ]
    write_attempts(folder.rollout_file(1), 1, attempts, None)
    rows = read_rollouts(folder.path, 1)
    assert [row["reason"] for row in rows] == [
        "dropped.quality",
        "kept.negative",
        "kept.quality",
        "dropped.environment_failed",
        "dropped.undecided",
        None,
    ]
    assert [row["kept"] for row in rows] == [False, True, True, False, False, False]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert (rows[3]["fault"], rows[3]["verdict"], rows[3]["reward"]) == ("the sandbox is gone", None, None)
    assert rows[3]["advantage"] is None and rows[3]["entropies"] is None


def test_arguments_of_any_kind_and_odd_characters_are_kept_as_far_as_json_goes(tmp_path: Path) -> None:
    folder = run(tmp_path)
    source = trajectory(0)
    arguments = MappingProxyType({"a": float("nan"), "b": MappingProxyType({"c": [1, None]}), "d": "\ud800"})
    call = ToolCall(id="0", tool="python", arguments=arguments, raw="")
    turn = Turn(completion=source.turns[0].completion, calls=(call,), results=source.turns[0].results, reply_ids=(1,))
    attempt = AttemptRecord(problem=PROBLEM, trajectory=replace(source, turns=(turn,)), policy_version=0)
    write_attempts(folder.rollout_file(1), 1, [attempt], lambda ids: "\ud800")
    (row,) = read_rollouts(folder, 1)
    assert row["turns"][0]["calls"][0]["arguments"] == {"a": None, "b": {"c": [1, None]}, "d": "\ud800"}
    assert row["text"] == ["?"]


def test_a_step_is_written_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a step at once are twice the memory of its file before compression: 6 GB at the paper's lengths."""
    made = list[int]()

    def table(step: int, attempts: Sequence[AttemptRecord], decode: Decode | None) -> Any:
        made.append(len(attempts))
        return attempts_table(step, attempts, decode)

    monkeypatch.setattr(rollouts, "attempts_table", table)
    monkeypatch.setattr(rollouts, "ROW_GROUP_TOKENS", 20)  # an attempt has 8
    folder = run(tmp_path)
    write_attempts(folder.rollout_file(1), 1, [record(index, Verdict.RIGHT) for index in range(8)], decode)
    with parquet.ParquetFile(folder.rollout_file(1)) as file:
        groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert made == groups == [3, 3, 2]
    assert [row["index"] for row in read_rollouts(folder, 1)] == [*range(8)]


def test_a_step_is_read_a_batch_at_a_time_and_without_what_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tmp_path)
    write_attempts(folder.rollout_file(1), 1, [record(index, Verdict.RIGHT) for index in range(20)], None)
    monkeypatch.setattr(rollouts, "BATCH_ROWS", 4)
    read = list[Row]()
    monkeypatch.setattr(rollouts, "decoded", lambda row: read.append(decoded(row)) or read[-1])
    rows = rows_of_step(folder, 1, ("index", "turns"))
    assert next(rows).keys() == {"index", "turns"} and len(read) == 1
    assert [row["index"] for row in rows] == [*range(1, 20)]


def test_tallies_of_young_weights_end_at_the_first_attempt_of_an_older_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tmp_path)
    for step in (1, 2, 3):
        made = [replace(record(index, Verdict.RIGHT), policy_version=step) for index in range(6)]
        write_attempts(folder.rollout_file(step), step, made, None)
    read = list[Row]()
    monkeypatch.setattr(rollouts, "decoded", lambda row: read.append(decoded(row)) or read[-1])
    assert recorded_tallies(folder, 3) == {PROBLEM.id: (6, 6)}
    assert [row["policy_version"] for row in read] == [3] * 6 + [2]


def test_the_page_explains_every_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
    assert [column for column in COLUMNS if f"`{column}`" not in page] == []


def test_a_path_given_as_text_is_read_too(tmp_path: Path) -> None:
    folder = run(tmp_path)
    write_attempts(folder.rollout_file(1), 1, attempts_of([resampled()]), None)
    assert read_rollouts(str(folder.path), 1) == read_rollouts(folder, 1)
    with pytest.raises(DataError, match="step 2 has no rollouts"):
        read_rollouts(str(folder.path), 2)
    with pytest.raises(DataError, match=r"step=000009\.parquet does not exist"):
        read_rollouts(folder, 9)


VERSION_1 = Path(__file__).parent / "version_1.parquet"
"""Written by rocstar before turns had segments (f500dab): `resampled()` and an attempt that a fault ended."""
TEXTS = {
    (11, 12): 'Let me see.\n<tool_call>\n{"name": "python"}\n</tool_call><|im_end|>',
    (13,): "<answer>2</answer><|im_end|>",
}


def test_a_step_without_attempts_in_a_folder_whose_name_is_not_utf_8_is_a_file_without_rows(tmp_path: Path) -> None:
    folder = run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    write_attempts(folder.rollout_file(1), 1, [], None)
    assert read_rollouts(folder, 1) == [] and read_table(folder.rollout_file(1)).num_rows == 0


def test_a_file_of_the_first_version_gives_the_rows_that_are_written_today(tmp_path: Path) -> None:
    attempts = [*attempts_of([resampled()], policy_version=3), replace(record(3, None), policy_version=3)]
    write_attempts(tmp_path / "today.parquet", 7, attempts, lambda ids: TEXTS[tuple(ids)])
    stored = read_table(VERSION_1).to_pylist()[0]
    assert "segments" not in stored["turns"]
    rows = list(attempt_rows(VERSION_1))
    assert rows == list(attempt_rows(tmp_path / "today.parquet"))
    assert [trajectory_of(row) for row in rows] == [one.trajectory for one in attempts]
    assert list(select([VERSION_1], {})) == list(select([tmp_path / "today.parquet"], {}))
    assert [row["index"] for row in select([VERSION_1], {"error": "Exit Status"})] == [0]


def test_a_file_older_than_the_facts_gives_facts_of_the_same_penalty(tmp_path: Path) -> None:
    write_parquet(tmp_path / "old.parquet", read_table(VERSION_1).drop_columns(["format_facts", "old_logprobs"]))
    rows = list(attempt_rows(tmp_path / "old.parquet"))
    assert rows[0]["format_facts"] == {"answer_tags": 2, "reason_after_answer": False, "boxed": True}
    assert rows[3]["format_facts"] is None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    import pyarrow

    write_parquet(tmp_path / "other.parquet", pyarrow.table({"token_ids": [[1]]}))
    with pytest.raises(DataError, match=r"other.parquet is not a file of attempts: it has no column advantage, "):
        list(attempt_rows(tmp_path / "other.parquet"))
    stored = read_table(VERSION_1)
    for old, new, told in (("code_error", "?", "'[?]' is not a valid Status"), ("[", "[" * 10**5, "maximum recursion")):
        turns = pyarrow.array([text.replace(old, new) for text in stored["turns"].to_pylist()])
        changed = stored.set_column(stored.column_names.index("turns"), "turns", turns)
        write_parquet(tmp_path / "other.parquet", changed)
        with pytest.raises(DataError, match=f"other.parquet is not a file of attempts: {told}"):
            list(attempt_rows(tmp_path / "other.parquet"))
        with pytest.raises(DataError, match=f"other.parquet is not a complete file of attempts: {told}"):
            list(select([tmp_path / "other.parquet"], {}))


@pytest.mark.parametrize(
    ("text", "raws", "parts"),
    [
        ("So:\n<tool_call>{}</tool_call><|im_end|>", ["{}"], ["So:", 0]),
        ("a <call>x</call> b <call>y</call>\n c<|eot_id|>\n", ["x", "y"], ["a", 0, " b", 1, "\n c"]),
        ("print(1)", ["print(1)"], [0]),
        ("<reason>so<tool>f()</reason>", ["f()"], ["<reason>so", 0, "</reason>"]),
        ('So.\n{"name": 1}\n{"name": 2}<|eot_id|>', ['{"name": 1}', '{"name": 2}'], ["So.", 0, 1]),
        ("gone", ["elsewhere", ""], [0, 1, "gone"]),
        ("", [], []),
    ],
)
def test_a_turn_is_cut_into_its_words_and_its_calls(text: str, raws: list[str], parts: list[str | int]) -> None:
    found = segments_of(text, [{"raw": raw} for raw in raws])
    assert [text[start:end] if call is None else call for start, end, call in found] == parts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["<｜end▁of▁sentence｜>", "</s>", "<|observation|>", "<end_of_turn>\n"])
def test_a_call_s_segment_holds_what_opens_it_and_none_holds_the_end_of_a_turn(name: str, end: str) -> None:
    syntax = SYNTAXES[name]
    text = text_of(turn_of(syntax, [by_assistant("So.")], [("python", {"code": "1"}), ("python", {"code": "2"})]))
    assert without_end(text + end) == text
    text += end
    first, second, *_ = segments_of(text, [{"raw": call.raw} for call in syntax.parse(text)])
    said = text.index("<|end|>") if name == "harmony" else 3
    assert first == [0, said, None] and second[0] == said and second[2] == 0
    assert without_end(f"42{end}") == "42" and segments_of(f"42{end}", ()) == [[0, 2, None]]
