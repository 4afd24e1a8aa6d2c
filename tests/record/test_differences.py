"""Two runs against each other, and what runs take on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.cli import main as cli
from rocstar.config.recipe import recipe_of
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.record.differences import metrics_side_by_side, settings_that_differ
from rocstar.record.folder import RunFolder, delete, leftovers, size_of
from rocstar.record.tracker import RunTracker
from rocstar.support import exits
from tests.record.examples import SHORT

STAGES = [{"name": "stage1", "kind": "rl", "steps": 30}, {"name": "stage2", "kind": "rl", "steps": 3}]


def made(base: Path, name: str, *, steps: int = 0, slope: float = 0.0, **rollout: int) -> RunFolder:
    recipe: Recipe = recipe_of({"run": {"name": name}, "rollout": {**SHORT, **rollout}}, STAGES)
    folder = RunFolder.create(recipe, base, ["rocstar"])
    with RunTracker(folder) as tracker:
        tracker.start_stage("stage1", "rl", 30)
        for step in range(1, steps + 1):
            tracker.log(step, {"reward/mean": slope * step, "step/seconds": 2.0, "reward/parts/unit": slope})
    return folder


def test_settings_that_differ_are_named_once(tmp_path: Path) -> None:
    a, b = made(tmp_path, "a", max_turns=3), made(tmp_path, "b", max_turns=5)
    named = {row["setting"]: (row["a"], row["b"]) for row in settings_that_differ(a, b)}
    assert named == {"run.name": ("a", "b"), "rollout.max_turns": (3, 5)}


def test_settings_that_are_not_in_force_are_not_named(tmp_path: Path) -> None:
    a = RunFolder.create(recipe_of({"run": {"name": "a"}, "model": {"hidden_size": 48}}, STAGES), tmp_path, ["rocstar"])
    from_a = {"model": {"path": str(tmp_path)}, "data": {"source": "mine:Sums", "pool": 7}}
    b = RunFolder.create(recipe_of({"run": {"name": "b"}, **from_a}, STAGES), tmp_path, ["rocstar"])
    assert {row["setting"] for row in settings_that_differ(a, b)} == {"run.name", "model.path", "data.source"}


def test_a_stage_that_only_one_run_has_is_one_line_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "a", max_turns=3)
    other = recipe_of({"run": {"name": "b"}, "rollout": {**SHORT, "max_turns": 3}}, STAGES[:1])
    RunFolder.create(other, tmp_path, ["rocstar"])
    for pair, letter in ((("a", "b"), "A"), (("b", "a"), "B")):
        assert cli.run(["runs", "compare", *pair, "--runs", str(tmp_path)]) == exits.OK
        lines = capsys.readouterr().out.splitlines()
        assert f"  stage.stage2: only {letter} has it" in lines and len(lines) == 3
    assert cli.run(["runs", "compare", "a", "b", "--runs", str(tmp_path), "--json"]) == exits.OK
    assert '"stage.stage2.rollout.max_turns"' in capsys.readouterr().out


def test_metrics_are_compared_after_as_many_steps(tmp_path: Path) -> None:
    a, b = made(tmp_path, "a", steps=20, slope=1.0), made(tmp_path, "b", steps=12, slope=2.0)
    with pytest.raises(ConfigError, match=r"a has no metric no/such; it has loss, reward/mean, reward/parts/unit"):
        metrics_side_by_side(a, b, ["reward/mean", "no/such"])
    (row,) = metrics_side_by_side(a, b, ["reward/mean"])
    assert row == {"stage": "stage1", "steps": 12, "metric": "reward/mean", "a": 7.5, "b": 15.0}
    assert {**row, "metric": "reward/parts/unit", "a": 1.0, "b": 2.0} in metrics_side_by_side(a, b)


def test_only_old_checkpoints_and_half_written_files_go(tmp_path: Path) -> None:
    folder = made(tmp_path, "a", steps=2)
    for step in (1, 2, 3):
        folder.checkpoint(step).mkdir()
        (folder.checkpoint(step) / "state.json").write_bytes(b"x" * 10_000)
    (folder.path / ".metrics.jsonl.12.new").write_text("half")
    (folder.path / "weights").mkdir()
    going = leftovers(folder, 1)
    assert [path.name for path in going] == [".metrics.jsonl.12.new", "step=000001", "step=000002", "weights"]
    before = size_of(folder.checkpoints)
    delete(going)
    assert size_of(folder.checkpoints) * 3 == before
    assert folder.checkpoint_steps() == [3]
    assert leftovers(folder, 0) == [folder.checkpoint(3)]


def test_a_link_to_a_checkpoint_is_never_followed(tmp_path: Path) -> None:
    folder = made(tmp_path / "disk", "a", steps=2)
    (folder.path / "elsewhere").mkdir()
    (folder.path / "elsewhere" / "state.json").write_text("{}")
    folder.checkpoint(1).symlink_to(folder.path / "elsewhere")
    folder.checkpoint(2).mkdir()
    delete(leftovers(folder, 1))
    assert folder.checkpoint_steps() == [2]
    assert (folder.path / "elsewhere" / "state.json").exists()
