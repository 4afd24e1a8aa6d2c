"""The promises of a Task, kept by every implementation: the built-in ones and those of examples/."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.sections import DataSection, StageDataSection, TaskSection
from rocstar.errors import ConfigError
from rocstar.protocols import DemonstratingTask, Task
from rocstar.run.tasks import BUILT_IN, make_task, require_demonstrations, training_problems

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = """Question,Numbers,Equation,Answer
tom has number0 pens . he gave number1 pens away . how many pens has he ?,18 4,- number0 number1,14
ann has number0 kites and number1 tops . how many kites has she ?,3 5,number0,3
bob has number0 rows of number1 chairs . he saw number2 cats . how many chairs has he ?,2 6 9,* number0 number1,12
"""
TESTED = """Question,Numbers,Equation,Answer
tom has number0 pens . he gave number1 pens away . how many pens has he ?,18 4,- number0 number1,14
zoe has number0 cups . she broke number1 cups . how many cups has she ?,8 3,- number0 number1,5
"""
Section = Mapping[str, Any]


def arithmetic(folder: Path) -> Section:
    return {"source": "arithmetic", "pool": 60}


def files(folder: Path) -> Section:
    def written(name: str, numbers: range) -> list[str]:
        rows = [json.dumps({"question": f"q{n // 2}", "answer": str(n // 2)}) + "\n" for n in numbers]
        (folder / name).write_text("".join(rows))
        return [str(folder / name)]

    return {
        "source": "files",
        "train_files": written("a.jsonl", range(40)),
        "test_files": written("b.jsonl", range(12)),
    }


def word_problems(folder: Path) -> Section:
    for name, text in (("train.csv", WORDS), ("test.csv", TESTED)):
        (folder / name).write_text(text)
    return {
        "source": "word_problems:WordProblemTask",
        "train_files": [str(folder / "train.csv")],
        "test_files": [str(folder / "test.csv")],
        "options": {"pool": 30, "redraws": 8},
    }


TASKS: Mapping[str, Callable[[Path], Section]] = {
    "arithmetic": arithmetic,
    "files": files,
    "word_problems": word_problems,
}


def test_every_built_in_source_is_here() -> None:
    assert set(BUILT_IN) <= set(TASKS)


@pytest.fixture(params=sorted(TASKS))
def section(request: pytest.FixtureRequest, tmp_path: Path) -> Section:
    return TASKS[request.param](tmp_path)


def made(data: TaskSection, heldout: int = 20) -> Task:
    return make_task(data, tool_name="python", seed=3, heldout=heldout, folders=[EXAMPLES / "word_problems"])


def test_no_problem_to_train_on_is_held_out_in_any_stage(section: Section) -> None:
    task = made(DataSection(**section))
    heldout = task.heldout()
    held = {problem.id for problem in heldout}
    of_stage = {key: value for key, value in section.items() if key != "test_files"}
    for stage_task in (task, made(StageDataSection(**of_stage))):
        ids = [problem.id for problem in training_problems(stage_task, heldout)]
        assert ids and held
        assert not held & set(ids)


def test_problems_have_ids_of_their_own_which_follow_from_settings_and_seed(section: Section) -> None:
    first, second = (made(DataSection(**section)) for _ in range(2))
    for problems in (first.problems(), first.heldout()):
        assert len({problem.id for problem in problems}) == len({problem.question for problem in problems})
        assert len({problem.id for problem in problems}) == len(problems)
        assert all(problem.id and problem.question and problem.answer for problem in problems)
    assert (first.problems(), first.heldout(), first.atoms) == (second.problems(), second.heldout(), second.atoms)
    if isinstance(first, DemonstratingTask) and isinstance(second, DemonstratingTask):
        assert first.demonstrations(9) == second.demonstrations(9)
    assert len(made(DataSection(**section), heldout=1).heldout()) == 1, "no more than was asked for"
    assert made(DataSection(**section), heldout=0).heldout() == []


def test_an_sft_stage_gets_as_many_demonstrations_as_it_asks_for_or_a_sentence(section: Section) -> None:
    task = made(DataSection(**section))
    if not isinstance(task, DemonstratingTask):
        with pytest.raises(ConfigError, match=r"has none; set sft\.rows_file .* or give the Task a method"):
            require_demonstrations(task, "cold")
        return
    demonstrations = require_demonstrations(task, "cold").demonstrations(17)
    assert len(demonstrations) == 17
    assert all(demo.turns and not demo.turns[-1].results for demo in demonstrations)
