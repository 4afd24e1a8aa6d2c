"""Where a run's problems come from, and what is said of a Task that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from rocstar.config.sections import DataSection, TaskSection
from rocstar.errors import ConfigError
from rocstar.protocols import Task
from rocstar.run.tasks import checked_options, heldout_problems, make_task, training_problems


def made(data: TaskSection, heldout: int = 3, folder: Path | None = None) -> Task:
    return make_task(data, tool_name="python", seed=1, heldout=heldout, folders=[folder] if folder else [])


def test_of_rows_without_a_reference_those_with_other_columns_are_told(tmp_path: Path) -> None:
    """A reward function judges by them."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"question": "q", "level": n}) + "\n" for n in (1, 1, 2, 2)))
    task = made(DataSection(source="files", train_files=[str(tmp_path / "a.jsonl")], columns={"answer": ""}))
    assert [problem.metadata["level"] for problem in task.problems()] == [2]
    assert task.left_out[1].startswith("2 of the 4 rows in data.train_files are left out")


def test_options_of_a_source_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.options\.pool is for a Task of your own; .* has no options"):
        made(DataSection(options={"pool": 3}))


# A Task of the user's own

OWN = """
from rocstar.protocols import Task
from rocstar.types import Problem, problem_id

class Own(Task):
    def __init__(self, data, *, tool_name, seed, heldout):
        self.made = (data.options["word"], tool_name, seed, heldout)
    def problems(self, exclude=frozenset()):
        return [Problem(id=problem_id(q), question=q, answer="1") for q in ("a", "b", "b")]
    def heldout(self):
        return [Problem(id=problem_id("a"), question="a", answer="1")]

class Bare:
    def __init__(self, data, *, tool_name, seed, heldout): pass

def other(data): pass
"""


@pytest.fixture
def own(modules: Path) -> Path:
    (modules / "own_task_module.py").write_text(OWN)
    return modules


def test_a_task_is_made_with_its_section_and_the_settings_of_the_run(own: Path) -> None:
    task: Any = made(DataSection(source="own_task_module:Own", options={"word": "x"}), folder=own)
    assert task.made == ("x", "python", 1, 3)
    assert task.atoms == ()


def test_a_task_that_trains_on_held_out_problems_is_refused(own: Path) -> None:
    task = made(DataSection(source="own_task_module:Own", options={"word": "x"}), folder=own)
    with pytest.raises(ConfigError, match="Own: 1 problems to train on are held-out ones, the first is 'a'"):
        training_problems(task, task.heldout())
    with pytest.raises(ConfigError, match="Own: problems to train on share an id"):
        training_problems(task, [])


def test_a_task_that_holds_one_problem_out_twice_is_refused(own: Path) -> None:
    task: Any = made(DataSection(source="own_task_module:Own", options={"word": "x"}), folder=own)
    task.heldout = lambda: task.problems()
    with pytest.raises(ConfigError, match="Own: held-out problems share an id; give each question one of its own"):
        heldout_problems(task)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", "data.source = 'own_task_module:Bare' has no atoms; make it a subclass of rocstar.protocols.Task"),
        ("other", r"should take \(data, tool_name=..., seed=..., heldout=...\), but it takes \(data\)"),
        ("Owm", "the nearest is 'Own'"),
    ],
)
def test_what_is_no_task_is_refused(own: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(DataSection(source=f"own_task_module:{name}"), folder=own)


WRONG = """
from rocstar.protocols import Task

class Init(Task):
    def __init__(self, data, *, tool_name, seed, heldout): raise ValueError("no")

class Nothing(Task):
    def __init__(self, data, *, tool_name, seed, heldout): pass
    def problems(self, exclude=frozenset()): return None
    def heldout(self): return {}[1]

class Texts(Nothing):
    def problems(self, exclude=frozenset()): return ["a", "b"]
    def heldout(self): return []
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Init", "data.source = 'wrong_task:Init' failed: ValueError: no (wrong_task.py, line 5)"),
        ("Nothing", "data.source: Nothing.heldout failed: KeyError: 1 (wrong_task.py, line 10)"),
        ("Texts", "data.source: Texts.problems returned ['a', 'b']; return a list of Problem of rocstar.types"),
    ],
)
def test_a_task_that_raises_or_gives_something_else_is_told_in_one_sentence(
    modules: Path, name: str, said: str
) -> None:
    (modules / "wrong_task.py").write_text(WRONG)
    with pytest.raises(ConfigError) as refused:
        task = made(DataSection(source=f"wrong_task:{name}"), folder=modules)
        training_problems(task, heldout_problems(task))
    assert str(refused.value) == said


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    share: float = Field(default=0.5, ge=0, le=1)
    redraws: int = 3


class Lax(BaseModel):
    """One that ignores what it does not know."""

    share: float = 0.5


def test_an_option_that_a_model_would_ignore_is_refused() -> None:
    assert checked_options(Lax, DataSection(options={"share": 0.25})) == Lax(share=0.25)
    with pytest.raises(ConfigError, match="unknown key shares; did you mean share"):
        checked_options(Lax, DataSection(options={"shares": 0.25}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"redaws": 4}, "data.options of m:Own: unknown key redaws; did you mean redraws?"),
        ({"share": 2.0}, "data.options of m:Own: share = 2.0 should be less than or equal to 1"),
        ({"redraws": "4"}, "data.options of m:Own: redraws = '4' should be a valid integer"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_options(Options, DataSection(source="m:Own", options=options))
    assert str(refused.value) == said
