"""What may change where a run goes on, and what is kept of it: without training anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli.main import _branch, _resume
from rocstar.config.recipe import recipe_of, resolved_from_json
from rocstar.errors import ConfigError, DataError
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder, fill_branch, read_json
from rocstar.record.show import show_run
from rocstar.run.continued import continued, is_reopened, made_again, note_surroundings, record, settings_hash
from rocstar.run.material import read_material, same_inputs
from rocstar.support.screen import changed_setting

RL: dict[str, Any] = {"kind": "rl", "steps": 4}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Over after 2 steps of a cold start and 4 of 4 steps of a stage that has another, of no steps, after it."""
    recipe = recipe_of({}, [{"name": "cold", "kind": "sft", "steps": 2}, {"name": "one", **RL},
                            {"name": "two", **RL, "steps": 0}])  # fmt: skip
    folder = RunFolder.create(recipe, tmp_path, ["rocstar"])
    stages = ["cold", "cold", "one", "one", "one", "one"]
    rows = (f'{{"step": {step}, "stage": "{stage}"}}\n' for step, stage in enumerate(stages, 1))
    folder.metrics.write_text("".join(rows))
    saved(folder, 4, stage_step=2, stage_complete=False)
    saved(folder, 6, stage_step=4, stage_complete=True)
    write_json(folder.problems, {"one": "1", "two": "2", "held out": "3"})
    write_json(folder.summary, {})
    return folder


def saved(folder: RunFolder, step: int, **state: Any) -> None:
    folder.checkpoint(step).mkdir()
    write_json(folder.checkpoint(step) / "state.json", {"stage": 1, "step": step, "policy_version": 0, **state})


def refused(run: RunFolder, *settings: str, step: int = 6) -> str:
    with pytest.raises(ConfigError) as told:
        continued(run, step, settings, flag="--resume")
    return str(told.value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("run.seed=5", "takes no 'run.seed=5'"),
        ("model.hidden_size=64", "takes no 'model.hidden_size=64'"),
        ("rollout.template=model", "takes no 'rollout.template=model'; leave that out (only stage.NAME.KEY of"),
        ("learning.loss=gspo", "; give it to a stage, as stage.two.learning.loss=gspo, or leave that out"),
        ("learning.learning_rate=1e-5", "stage.NAME.KEY of stages that go on"),
        ("sft.batch_rows=8", "takes no 'sft.batch_rows=8'; leave that out"),  # its only stage is over
        ("stage.cold.steps=9", "stage cold was over at step 6"),
        ("stage.one.steps=4", "has made its 4 steps at step 6"),
        ("stage.one.learning.learning_rate=1e-5", "give it more steps with stage.one.steps=NUMBER"),
        ("stage.oen.steps=9", "did you mean one?"),
        ("stage.more.steps=9", "the recipe has no stage 'more'"),
        ("stage.more.kind=rll", "kind"),
        ("stage.more.kind=rl", "steps"),
    ],
)
def test_what_is_over_or_holds_for_the_whole_run_cannot_change(run: RunFolder, setting: str, sentence: str) -> None:
    assert sentence in refused(run, setting)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_checkpoint_whose_state_is_broken_or_lost_is_named_with_what_to_do(run: RunFolder, text: str | None) -> None:
    state = run.checkpoint(6) / "state.json"
    state.unlink() if text is None else state.write_text(text)
    with pytest.raises(
        DataError, match=r"state\.json is not there or is no JSON object; put it back from a copy, or move"
    ):
        continued(run, 6, ["stage.one.steps=9"], flag="--resume")


@pytest.mark.parametrize(
    "setting",
    ["data.pool=9", "learning.reset_optimizer=true", "learning.kl_coefficient=0.1", "data.drop_solved_attempts=4"],
)
def test_what_a_stage_has_begun_with_cannot_change_within_it(run: RunFolder, setting: str) -> None:
    told = refused(run, f"stage.one.{setting}", step=4)
    assert told.startswith(f"stage.one.{setting.partition('=')[0]} cannot change at step 4")
    assert continued(run, 4, ["stage.two.steps=1", f"stage.two.{setting}"], flag="--resume").goes_on
    saved(run, 2, stage_step=0, stage_complete=True)  # of a stage that was skipped
    assert continued(run, 2, [f"stage.one.{setting}"], flag="--resume").anew == {"one"}


def test_the_first_checkpoint_is_what_makes_a_stage_begun(run: RunFolder) -> None:
    made = continued(run, None, ["stage.cold.steps=9", "stage.one.data.pool=9"], flag="--resume")
    assert made.unmade is None and made.anew == {"cold", "one"}


def test_a_change_is_kept_with_its_step_and_the_run_is_no_longer_finished(run: RunFolder) -> None:
    settings = ["stage.one.steps=12", "stage.one.learning.learning_rate=1e-5", "stage.two.steps=3"]
    record(run, continued(run, 6, settings, flag="--resume"))
    rate = resolved_from_json(run.resolved).learning.learning_rate
    assert run.changes == [
        {"step": 6, "setting": "stage.one.learning.learning_rate", "was": rate, "now": 1e-5},
        {"step": 6, "setting": "stage.one.steps", "was": 4, "now": 12},
        {"step": 6, "setting": "stage.two.steps", "was": 0, "now": 3},
    ]
    assert [stage.steps for stage in resolved_from_json(run.resolved).stage] == [2, 12, 3]
    assert is_reopened(run, "one", 6) and not is_reopened(run, "one", 7) and not is_reopened(run, "cold", 6)
    assert not run.summary.exists() and set(run.identity) > {"name", "started", "changes"}
    assert "two" not in run.problems.read_text()  # its problems may be others now
    shown = show_run(run)["changes"]
    assert changed_setting(shown[1]) == "after step 6: stage.one.steps = 12 (before it 4)"


def test_asked_twice_at_one_step_is_one_change(run: RunFolder) -> None:
    run.pool("one").parent.mkdir()
    for name in ("one.json", "two.json", "two.jsonl"):
        write_json(run.pool("one").with_name(name), {})
    for steps in (12, 8):
        record(run, continued(run, 6, [f"stage.one.steps={steps}"], flag="--resume"))
    assert run.changes == [{"step": 6, "setting": "stage.one.steps", "was": 4, "now": 8}]
    assert not continued(run, 6, ["stage.one.steps=8"], flag="--resume").goes_on
    assert continued(run, 6, ["run.fault_budget=0.5"], flag="--resume").recipe.run.fault_budget == 0.5
    assert [file.name for file in run.path.glob("pools/*")] == ["one.json"]  # two's was chosen by weights of step 6


def test_a_stage_is_added_from_the_runs_own_sections(run: RunFolder) -> None:
    settings = ["stage.more.rollout.max_turns=3", "stage.more.kind=rl", "stage.more.steps=5"]
    made = continued(run, 6, settings, flag="--resume")
    more = made.recipe.stage[-1]
    assert (more.name, more.kind, more.steps) == ("more", "rl", 5)
    assert more.kind == "rl" and more.rollout.max_turns == 3 and more.learning == made.recipe.stage[1].learning  # type: ignore[union-attr]
    assert changed_setting(made.changes[0]) == "after step 6: stage.more was added (rl, 5 steps)"
    again = continued(run, 6, ["stage.again.kind=sft", "stage.again.steps=2"], flag="--resume")
    assert again.unmade == {"again"}


def test_files_may_lie_elsewhere_if_they_hold_what_they_held(tmp_path: Path) -> None:
    def at(place: str, answer: int = 5) -> dict[str, list[str]]:
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "asked.jsonl").write_text(f'{{"question": "2+3?", "answer": {answer}}}\n')
        (tmp_path / place / "held.jsonl").write_text('{"question": "2+2?", "answer": 4}\n')
        return {"train_files": [f"{tmp_path}/{place}/asked.jsonl"], "test_files": [f"{tmp_path}/{place}/held.jsonl"]}

    stages: list[dict[str, Any]] = [{"name": "cold", "kind": "sft", "steps": 2}, {"name": "one", **RL},
                                    {"name": "two", **RL}]  # fmt: skip
    recipe = recipe_of({"data": {"source": "files", **at("old")}}, stages)
    run = RunFolder.create(recipe, tmp_path, ["rocstar"])
    run.metrics.write_text('{"step": 0, "stage": "cold"}\n{"step": 1, "stage": "one"}\n')
    saved(run, 1, stage_step=1, stage_complete=False)
    write_json(run.problems, same_inputs(read_material(recipe, rows=frozenset()), run))
    write_json(run.summary, {})
    (tmp_path / "old").rename(tmp_path / "new")
    assert "asked.jsonl of run" in (told := refused(run, step=1)) and "say with data.train_files where" in told
    for place, answer in (("other", 6), ("new", 5)):
        moved = [f"data.{key}={json.dumps(files)}" for key, files in at(place, answer).items()]
        made = continued(run, 1, moved, flag="--resume")
        if place == "other":
            for goes_on, of, names in ((_resume, run.name, "one, two"), (_branch, f"{run.name}@1", "one")):
                with pytest.raises(ConfigError, match=rf"have changed since it began \({names}\)"):
                    goes_on(of, moved, tmp_path, dry_run=True, as_json=False)
    own = continued(run, 1, [*moved, "stage.two.data.train_files=more.jsonl"], flag="--resume").recipe.rl_stages[1]
    assert own.data.train_files == ["more.jsonl"], "a stage that has not begun may get other files besides"
    assert same_inputs(read_material(made.recipe, rows=frozenset()), run, made.anew) == read_json(run.problems)
    record(run, made)
    kept = resolved_from_json(run.resolved)
    assert made.goes_on and run.changes == [] and kept.data.train_files == at("new")["train_files"]
    assert kept.rl_stages[0].data.train_files == kept.data.train_files


def branched(run: RunFolder, branches: Path) -> RunFolder:
    """From step 4, with more steps of its first stage."""
    made = continued(run, 4, ["stage.one.steps=9"], flag="--branch", own="run.name=")
    return RunFolder.create(
        made.recipe,
        branches,
        ["rocstar"],
        fill=lambda folder: fill_branch(folder, run, 4, anew=made.anew, changes=made.changes),
    )


def test_a_branch_from_before_a_change_has_it_from_its_own_first_step_on(run: RunFolder, tmp_path: Path) -> None:
    record(run, continued(run, 6, ["stage.one.steps=12"], flag="--resume"))
    fresh = branched(run, tmp_path / "branches")
    assert fresh.changes == [{"step": 4, "setting": "stage.one.steps", "was": 4, "now": 9}]


def test_what_else_figures_depend_on_is_kept_and_a_change_of_it_is_a_change_of_the_run(
    run: RunFolder, tmp_path: Path
) -> None:
    now = {"versions": run.identity["versions"], "code": {"a.py": "1", "b.py": "2"}, "computes": {"dtype": "float32"}}
    assert note_surroundings(run, now, 0) == [] == run.changes
    later = {**now, "code": {"a.py": "3", "b.py": "2", "c.py": "4"}}
    assert note_surroundings(run, later, 4) == ["code.a.py"] and note_surroundings(run, later, 4) == []
    assert run.changes == [{"step": 4, "setting": "code.a.py", "was": "1", "now": "3"}]
    branch = branched(run, tmp_path / "branches")
    assert note_surroundings(branch, {**now, "code": {"a.py": "5"}}, 4) == ["code.a.py"]
    assert note_surroundings(branch, now, 4) == [] == branch.changes[1:], "it was put back"
    assert note_surroundings(run, {**now, "computes": {"dtype": "bfloat16"}}, 4) == ["computes.dtype"]
    assert [row["setting"] for row in run.changes] == ["computes.dtype"], "the code is as it was"
    assert note_surroundings(run, now, 6) == ["computes.dtype"]


def test_a_run_whose_commit_is_not_known_says_so_and_warns_of_nothing(run: RunFolder) -> None:
    note_surroundings(run, {"git": {"commit": "1", "changed": False}}, 4)
    assert note_surroundings(run, {"git": None}, 4) == [] and run.identity["git"] is None
    assert note_surroundings(run, {"git": {"commit": "2", "changed": False}}, 4) == []


def test_steps_after_the_last_checkpoint_are_named_as_made_again(run: RunFolder) -> None:
    assert made_again(run, 6) == ""
    assert made_again(run, 5) == "; step 6 is made again: the last checkpoint is of step 5"
    assert made_again(run, 4) == "; steps 5 to 6 are made again: the last checkpoint is of step 4"
    assert made_again(run, 0) == "; steps 1 to 6 are made again: there is no checkpoint"


def test_an_edit_of_the_settings_by_hand_is_told_beside_a_change_on_the_command_line(run: RunFolder) -> None:
    assert note_surroundings(run, {"settings": settings_hash(run)}, 0) == []
    record(run, continued(run, 6, ["stage.one.steps=12"], flag="--resume"))
    assert note_surroundings(run, {"settings": settings_hash(run)}, 6) == []
    run.resolved.write_text(run.resolved.read_text() + "\n")
    record(run, continued(run, 6, ["stage.one.steps=13"], flag="--resume"))
    assert note_surroundings(run, {"settings": settings_hash(run)}, 6) == ["settings.config.resolved.json"]
