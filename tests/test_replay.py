"""`rocstar replay`: a run's own steps come out to the bit; a bundle does what the run does; what was changed by hand is
found."""

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
from rocstar.record.rollouts import attempts_table, read_table, write_parquet
from rocstar.run.replay import _other_columns
from rocstar.support import exits
from tests.files import jsonl
from tests.record.examples import attempts_of, resampled
from tests.tiny_run import COLD_STEPS, PLAIN_STEPS, Command, plain_run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
LAST = PLAIN_STEPS


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished run, to be changed."""
    shutil.copytree(plain_run(tmp_path_factory.getbasetemp())[0], tmp_path / "place")
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
    assert [(one["step"], one["differs"]) for one in steps] == [(n, {}) for n in range(COLD_STEPS + 1, LAST + 1)]
    assert all(one["metrics"] > 20 for one in steps)
    kept = run.checkpoint_steps()
    assert [one["step"] for one in steps if one["weights"]] == [step for step in kept if step > COLD_STEPS] != []

    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    *_, judged, learnt = (row["step"] for row in rows if row.get("learn/updates"))
    table = read_table(run.rollout_file(judged))
    for name, other in (("advantage", lambda value: value and value * 2), ("reward", lambda value: 1.0)):
        values = [other(value) for value in table[name].to_pylist()]
        place_of = table.column_names.index(name)
        field = table.schema.field(place_of)
        table = table.set_column(place_of, field, pyarrow.array(values, field.type))
    write_parquet(run.rollout_file(judged), table)
    rows[learnt - 1]["learn/loss"] += 1e-12
    jsonl(run.metrics, *rows)
    found = {one["step"]: one["differs"] for one in replayed(place, "tiny", code=1)["steps"]}
    assert {"advantages", "rewards"} <= found[judged].keys()
    assert "learn/loss" in found[learnt] and "recorded" in found[learnt]["learn/loss"]
    assert not found[COLD_STEPS + 1]
    shutil.rmtree(run.checkpoint(COLD_STEPS + 2))  # at the end of stage1
    assert "2 steps came before the first checkpoint" in Command.start(place, "replay", "tiny").wait().out


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
    assert "only RL steps are replayed" in told("tiny", "--step", "1")
    assert f"its steps go to {LAST}" in told("tiny", "--step", "999")
    assert "say which with --step N" in told("tiny", "--bundle", "new")
    assert "already exists" in told(*last, "--bundle", ".")
    assert "--bundle only writes a folder" in told(*last, "--bundle", "new", "--json")
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
