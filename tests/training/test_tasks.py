"""Where a run's problems come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocstar.config import DataSection
from rocstar.errors import ConfigError, DataError
from rocstar.training.tasks import make_task
from rocstar.types import Status, ToolCall, ToolResult


def rows(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": str(n)}) + "\n" for n in numbers))
    return str(path)


def file_section(folder: Path, **changes: object) -> DataSection:
    train, test = rows(folder / "a.jsonl", range(8)), rows(folder / "b.jsonl", range(6, 12))
    files = {"source": "files", "train_files": [train], "test_files": [test]}
    return DataSection.model_validate({**files, **changes})


async def nothing(call: ToolCall) -> ToolResult:
    return ToolResult(call_id=call.id, status=Status.OK, stdout="1\n")


def test_held_out_questions_are_not_trained_on(tmp_path: Path) -> None:
    task = make_task(file_section(tmp_path), tool_name="python", seed=1, heldout=100)
    assert sorted(p.question for p in task.heldout()) == sorted(f"q{n}" for n in range(6, 12))
    assert [p.question for p in task.problems()] == [f"q{n}" for n in range(6)]


def test_the_same_seed_holds_out_the_same_problems(tmp_path: Path) -> None:
    section = file_section(tmp_path)
    held = [make_task(section, tool_name="python", seed=seed, heldout=3).heldout() for seed in (1, 1)]
    assert held[0] == held[1] and len(held[0]) == 3


def test_files_without_training_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_files is empty"):
        make_task(file_section(tmp_path, train_files=[]), tool_name="python", seed=1, heldout=3).problems()


async def test_files_have_no_demonstrations_of_their_own(tmp_path: Path) -> None:
    task = make_task(file_section(tmp_path), tool_name="python", seed=1, heldout=3)
    with pytest.raises(ConfigError, match=r"sft\.rows_file"):
        await task.demonstrations(3, nothing)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    task = make_task(file_section(tmp_path, train_files=["gone.jsonl"]), tool_name="python", seed=1, heldout=3)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        task.problems()


async def test_arithmetic_problems_repeat_themselves_and_share_no_question() -> None:
    first, second = (make_task(DataSection(pool=60), tool_name="python", seed=4, heldout=40) for _ in range(2))
    assert first.problems() == second.problems() and first.heldout() == second.heldout()
    held = {p.id for p in first.heldout()}
    assert len(held) == 40 and not held & {p.id for p in first.problems()}
    demos = await first.demonstrations(50, nothing)
    assert demos == await second.demonstrations(50, nothing)
    assert not held & {demo.problem.id for demo in demos}
