"""`rocstar replay`: a run's own steps come out to the bit, another method's as another; a bundle does what the run
does; what was changed by hand is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli import main as cli
from rocstar.record import rollouts
from rocstar.record.folder import RunFolder
from rocstar.record.replays import replays_of
from rocstar.record.rollouts import attempts_table, read_table, write_parquet
from rocstar.run.replay import _other_columns
from rocstar.support import exits
from tests.record.examples import attempts_of, resampled
from tests.tiny_run import RL_STEPS, SFT_STEPS, Command, finished_run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
LAST = SFT_STEPS + RL_STEPS


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished run, to be changed."""
    shutil.copytree(finished_run(tmp_path_factory.getbasetemp())[0], tmp_path / "place")
    return tmp_path / "place"


def replayed(folder: Path, *given: str, code: int = 0) -> dict[str, Any]:
    ended = Command.start(folder, "replay", *given, "--json").wait()
    assert ended.code == code, ended.told
    found: dict[str, Any] = json.loads(ended.out)
    return found


def change(place: Path, setting: str) -> None:
    """Note in the run that a setting is another one after its last step but one."""
    file = place / "runs" / "tiny" / "run.json"
    changes = [{"step": LAST - 1, "setting": setting, "was": 1, "now": 2}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "changes": changes}))


def test_every_step_of_every_stage_comes_out_to_the_bit_and_what_was_changed_by_hand_is_found(place: Path) -> None:
    import pyarrow

    run = RunFolder(place / "runs" / "tiny")
    change(place, "stage.stage3.steps")  # no step depends on how many there are
    steps = replayed(place, "tiny")["steps"]
    assert [(one["step"], one["differs"]) for one in steps] == [(n, {}) for n in range(SFT_STEPS + 1, LAST + 1)]
    assert all(one["metrics"] > 20 for one in steps)
    kept = run.checkpoint_steps()
    assert [one["step"] for one in steps if one["weights"]] == [step for step in kept if step > SFT_STEPS] != []
    record = replays_of(run, None)["all"]
    assert record["steps"] == steps and record["made"] and "rocstar" in record["versions"]

    table = read_table(run.rollout_file(LAST - 1))
    for name, other in (("advantage", lambda value: value and value * 2), ("reward", lambda value: 1.0)):
        values = [other(value) for value in table[name].to_pylist()]
        place_of = table.column_names.index(name)
        field = table.schema.field(place_of)
        table = table.set_column(place_of, field, pyarrow.array(values, field.type))
    write_parquet(run.rollout_file(LAST - 1), table)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rows[-1]["learn/loss"] += 1e-12
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {one["step"]: one["differs"] for one in replayed(place, "tiny", code=1)["steps"]}
    assert {"advantages", "rewards"} <= found[LAST - 1].keys()
    assert "learn/loss" in found[LAST] and "recorded" in found[LAST]["learn/loss"]
    assert not found[SFT_STEPS + 1]


def test_other_methods_learn_from_the_same_weights_and_the_run_keeps_what_was_tried_of_a_step(place: Path) -> None:
    run, own = RunFolder(place / "runs" / "tiny"), "as the run did"
    once = ("tiny", "--step", str(LAST), "learning.clip_low=0.2", "learning.updates_per_step=1")
    found = replayed(place, *once, "learning.loss=grpo,gspo")
    mine, grpo, gspo = found["tried"]
    assert mine["settings"] == own
    assert mine["cosine"] == pytest.approx(1) and mine["gradient_norm"] > 0
    # The only update has ratios of 1, where GSPO's gradient is GRPO's: learner and reference code agree in one number.
    assert gspo["gradient_norm"] == pytest.approx(grpo["gradient_norm"], rel=1e-4)
    assert grpo["cosine"] == pytest.approx(gspo["cosine"], abs=1e-4) and 0 < grpo["cosine"] <= 1 + 1e-9
    assert all(not one["differs"] for one in found["steps"]), "the step itself follows, as it was"
    shares = [one["share"] for one in found["tokens"]]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1 + 1e-9

    replayed(place, *once, "learning.loss=gspo,cispo")
    kept = json.loads(run.replay(LAST).read_text())["tried"]
    for loss, one in zip(("grpo", "gspo", "cispo"), kept[1:], strict=True):
        given = {"learning.clip_low=0.2", "learning.updates_per_step=1", f"learning.loss={loss}"}
        assert set(one["settings"].split(", ")) == given
    assert [{**one, "heaviest": None} for one in kept[:3]] == [{**one, "heaviest": None} for one in found["tried"]]
    rows = read_table(run.rollout_file(LAST)).to_pylist()
    for attempt in (attempt for one in kept for attempt in one["heaviest"]):
        row = rows[attempt["row"]]
        assert (row["problem_id"], row["index"]) == (attempt["problem_id"], attempt["index"])
        assert attempt["share"] == pytest.approx(sum(attempt["carried"]), rel=0.01) and attempt["share"] > 0
        assert len(attempt["carried"]) == len(row["token_ids"])
        assert all(mask or not share for mask, share in zip(row["loss_mask"], attempt["carried"], strict=True))
    first = found["tokens"][0]
    heaviest = max((share, attempt["row"]) for attempt in kept[0]["heaviest"] for share in attempt["carried"])
    assert heaviest == (pytest.approx(first["share"], rel=0.01), first["row"])
    row = rows[first["row"]]
    assert (row["problem_id"], row["index"]) == (first["problem_id"], first["index"])
    assert row["kept"] and row["loss_mask"][first["place"]] and row["advantage"] == pytest.approx(first["advantage"])


def test_a_run_folder_that_cannot_be_written_is_told_and_the_table_printed(place: Path) -> None:
    run = RunFolder(place / "runs" / "tiny")
    run.replays.write_text("in the way")
    ended = Command.start(place, "replay", "tiny", "--step", str(LAST), "learning.loss=gspo").wait()
    assert ended.code == 0 and "learning.loss=gspo" in ended.out
    assert "cannot be written (File exists), so rocstar view will not show this replay" in ended.told
    assert run.replays.read_text() == "in the way"


def test_a_bundle_replays_alone_and_holds_no_more_than_that(place: Path, tmp_path: Path) -> None:
    step = LAST - 1
    told = Command.start(place, "replay", "tiny", "--step", str(step), "--bundle", str(tmp_path / "bundle")).wait()
    assert told.code == 0, told.told
    shutil.rmtree(place / "runs")
    moved = tmp_path / "elsewhere" / "step"
    shutil.move(tmp_path / "bundle", moved)
    settings = json.loads((moved / "config.resolved.json").read_text())
    settings["model"]["path"] = "/nowhere"  # as if the run had begun with a model that is not here
    (moved / "config.resolved.json").unlink()  # it may be a hard link
    (moved / "config.resolved.json").write_text(json.dumps(settings))
    found = replayed(tmp_path, str(moved), "--step", str(step))
    assert all(not one["differs"] for one in found["steps"]) and found["steps"][-1]["step"] == step
    assert {path.name for path in moved.iterdir()} == {
        *("checkpoints", "config.resolved.json", "events.jsonl", "metrics.jsonl", "rollouts", "run.json")
    }
    assert len(list(moved.glob("rollouts/*"))) == len(found["steps"])


def test_what_cannot_be_replayed_is_refused_in_a_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*given: str) -> str:
        assert cli.run(["replay", *given]) == exits.USAGE
        return capsys.readouterr().err

    monkeypatch.chdir(place)
    last = ("tiny", "--step", str(LAST))
    assert "only RL steps are replayed" in told("tiny", "--step", "3")
    assert f"its steps go to {LAST}" in told("tiny", "--step", "999")
    assert "say which with --step N" in told("tiny", "learning.loss=gspo")
    assert "a replay takes no 'learning.optimizer=muon'" in told(*last, "learning.optimizer=muon")
    assert "a replay takes no 'rollout.temperature=2'" in told(*last, "rollout.temperature=2")
    assert "already exists" in told(*last, "--bundle", ".")
    for more in ("learning.loss=gspo", "--json"):
        assert "--bundle only writes a folder" in told(*last, "--bundle", "new", more)
    change(place, "stage.stage3.learning.clip_low")
    assert "stage.stage3.learning.clip_low is another one after" in told("tiny")
    for checkpoint in (place / "runs" / "tiny" / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    assert "keeps no checkpoint of steps" in told(*last)


def test_attempts_of_several_row_groups_are_compared_with_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "ROW_GROUP_TOKENS", 20)  # an attempt has 8
    made = attempts_of([resampled(), resampled()])
    recorded = attempts_table(1, made, None).select(["kept", "advantage"])
    assert _other_columns(1, made, recorded) == set()
    assert _other_columns(1, [*made[:-1], replace(made[-1], advantage=0.5)], recorded) == {"advantage"}
    assert _other_columns(1, made[:-1], recorded) == {"kept", "advantage"}
