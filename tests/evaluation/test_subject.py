"""A model to look at, on the engines that its run names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rocstar.config.recipe import recipe_of
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.kinds import KINDS
from rocstar.evaluation.subject import LocalModel, find_subject
from rocstar.record.folder import RunFolder
from rocstar.sandbox.client import SandboxClient
from rocstar.types import Problem, problem_id
from tests.forks import fork_children

PROBLEMS = [Problem(id=problem_id(f"{n}+1?"), question=f"{n}+1?", answer=str(n + 1)) for n in range(3)]
ROLLOUT = {"template": "compact", "max_turns": 1, "max_response_tokens": 12, "engine_rows": 4}


def recipe(**more: Any) -> Recipe:
    return Recipe.model_validate({"rollout": ROLLOUT, **more})


async def rolled(folder: Path, settings: Recipe) -> list[tuple[int, ...]]:
    subject = LocalModel(model=folder, recipe=settings)
    async with subject.opened(64, SandboxClient(daemons=0)) as roller:
        groups = await roller.roll(PROBLEMS, attempts=2, seed=1)
    return [trajectory.token_ids for group in groups for trajectory in group.trajectories]


async def test_engines_in_processes_write_what_the_embedded_one_does(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(monkeypatch.setattr)
    embedded = await rolled(model_folder, recipe())
    apart = recipe(engine=[{"name": "e", "kind": "torch", "count": 1}])
    assert await rolled(model_folder, apart) == embedded


async def test_an_engine_holds_room_for_no_more_attempts_than_there_are(model_folder: Path) -> None:
    subject = LocalModel(model=model_folder, recipe=recipe())
    async with (
        subject.opened(64, SandboxClient(daemons=0), attempts=2) as few,
        subject.opened(64, SandboxClient(daemons=0)) as usual,
    ):
        assert few.engine.load().capacity_tokens * 2 == usual.engine.load().capacity_tokens


def test_arguments_of_rows_for_a_tool_concern_no_evaluation_without_tools(model_folder: Path) -> None:
    stage = {"name": "a", "kind": "rl", "steps": 1, "rollout": {"max_turns": 3}}
    row = replace(PROBLEMS[0], metadata={"extra_info": {"tools_kwargs": {"python": {"create_kwargs": {"a": 1}}}}})
    one_turn = LocalModel(model=model_folder, recipe=recipe_of({"rollout": ROLLOUT}, [stage]))
    assert one_turn.fitted([row])
    with_tools = replace(one_turn, recipe=recipe(rollout=ROLLOUT | {"max_turns": 3}))
    alias = replace(row, metadata={"extra_info": {"tools_kwargs": {"jupyter_code": {"top": 1}}}})
    for given, name in ((row, "python"), (alias, "jupyter_code")):
        with pytest.raises(DataError, match=f"tools_kwargs for {name}"):
            with_tools.fitted([given])
    assert with_tools.fitted([row], KINDS["ifeval"]), "of one turn, whatever max_turns says"


def test_the_version_of_a_runs_weights_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.checkpoint(3).mkdir(parents=True)
    (run.checkpoint(3) / "state.json").write_text('{"policy_version": 7}')
    assert LocalModel(model=tmp_path, recipe=recipe(), run=run, step=3).version == 7
    assert LocalModel(model=tmp_path, recipe=recipe(), run=run, step=4).version == 0, "it does not say"


def test_rows_to_ask_have_references_of_their_own_whatever_a_run_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"source": "files", "train_files": ["a.jsonl"], "columns": {"answer": ""}}
    stage = {"name": "a", "kind": "rl", "steps": 1}
    made = recipe_of({"rollout": ROLLOUT, "data": data, "evaluate": {"verifier": "own.py:f"}}, [stage])
    monkeypatch.setattr("rocstar.evaluation.subject.model_named", lambda *_: (tmp_path, RunFolder(tmp_path), 1))
    monkeypatch.setattr("rocstar.evaluation.subject.resolved_from_json", lambda path: made)
    boxed = {"evaluate.verifier=boxed_text": "--verifier boxed_text"}
    assert find_subject("run", tmp_path, [], boxed, "is").recipe.data.columns.answer == "is"
    with pytest.raises(ConfigError, match="compares with a reference"):
        find_subject("run", tmp_path, [], boxed, "")
