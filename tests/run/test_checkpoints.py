"""Checkpoints are whole or absent; the newest whole one is found, and old ones go."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from rocstar.config.sections import LearningSection, RunSection
from rocstar.errors import DataError
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy
from rocstar.parts.modelfolder import find_model
from rocstar.record.folder import RunFolder
from rocstar.run import checkpoints
from rocstar.run.checkpoints import Checkpoints, Progress, latest, prune, save
from tests.learning.examples import policy
from tests.record.examples import run
from tests.scripted import Clock


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return run(tmp_path)


def saved(folder: RunFolder, step: int, *, complete: bool = False) -> Policy:
    mine = policy()
    learner = GrpoLearner(mine, LearningSection())
    progress = Progress(stage=1, stage_step=step, step=step, policy_version=2 * step, stage_complete=complete)
    save(folder, progress, mine, learner)
    return mine


def test_the_newest_checkpoint_says_where_the_run_stands(folder: RunFolder) -> None:
    assert latest(folder) is None
    saved(folder, 1)
    mine = saved(folder, 12, complete=True)
    found = latest(folder)
    assert found is not None
    progress, path = found
    assert progress == Progress(stage=1, stage_step=12, step=12, policy_version=24, stage_complete=True)
    weights = load_model(path / "model").state_dict()
    assert all(bool((weights[name] == value).all()) for name, value in mine.model.state_dict().items())
    assert (path / "learner").is_dir()


FILES = ("model/model.safetensors", "model/tokenizer.json", "learner/__0_0.distcp")
CUT = b"all but the last byte"
BROKEN: list[tuple[str, bytes | None]] = [*((name, None) for name in FILES), *((name, CUT) for name in FILES)]
"""A file of a checkpoint, and what it holds afterwards; None: it is lost."""


def test_a_checkpoint_whose_files_are_lost_cut_or_spoilt_is_named_and_never_passed_over(folder: RunFolder) -> None:
    saved(folder, 1)
    saved(folder, 2)
    for name, content in BROKEN:
        file = folder.checkpoint(2) / name
        whole = file.read_bytes()
        if content is None:
            file.unlink()
        else:
            file.write_bytes(whole[:-1] if content is CUT else content)
        with pytest.raises(DataError, match=rf"{name} .*; put it back from a copy, or move the folder"):
            latest(folder)
        file.write_bytes(whole)
    shutil.rmtree(folder.checkpoint(2))
    assert (found := latest(folder)) and found[0].step == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_file_of_the_model_that_another_took_the_place_of_is_named(folder: RunFolder, name: str) -> None:
    """By a run that goes on and by whoever asks the checkpoint, also where the other has as many bytes."""
    saved(folder, 1)
    file = folder.checkpoint(1) / "model" / name
    find_model(str(file.parent))
    file.write_bytes(file.read_bytes().swapcase())
    told = rf"model/{name} is another file than was written; put it back"
    with pytest.raises(DataError, match=told):
        latest(folder)
    with pytest.raises(DataError, match=told):
        find_model(str(file.parent))


def test_a_save_that_fails_leaves_the_last_checkpoint_and_no_rest(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, 3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GrpoLearner, "save", full)
    with pytest.raises(OSError, match="No space"):
        saved(folder, 4)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step=000003"]


def test_pruning_keeps_the_newest_and_the_last_of_each_stage(folder: RunFolder) -> None:
    for step in range(1, 7):
        saved(folder, step, complete=step == 2)
    prune(folder, 2)
    assert folder.checkpoint_steps() == [2, 5, 6]


def test_a_checkpoint_is_due_after_its_seconds_unless_writing_took_a_larger_share_of_them(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, complete, nobody = Clock(), list[bool](), cast(Any, None)

    def slowly(of: RunFolder, progress: Progress, *_: object) -> None:
        clock.now += 20
        complete.append(progress.stage_complete)

    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(checkpoints, "save", slowly)
    made, due = Checkpoints(folder, RunSection(checkpoint_seconds=100, checkpoint_cost=0.1), Progress(), None), []
    for seconds in (99, 1):
        clock.now += seconds
        due.append(made.is_due())
    made.write(nobody, nobody, complete=True)
    for seconds in (199, 1):
        clock.now += seconds
        due.append(made.is_due())
    assert due == [False, True, False, True] and complete == [True]


def test_a_torn_checkpoint_is_passed_over_and_does_not_stop_the_pruning(folder: RunFolder) -> None:
    saved(folder, 3)
    folder.checkpoint(4).mkdir()
    folder.checkpoint(1).mkdir()
    found = latest(folder)
    assert found is not None and found[0].step == 3
    prune(folder, 2)
    assert folder.checkpoint_steps() == [3, 4]
