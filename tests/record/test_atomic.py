"""Files and folders that are there as a whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.record import atomic
from rocstar.record.atomic import sweep, whole_folder, write_atomic


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_have_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    write_atomic(tmp_path / "a.json", b"{}")
    with whole_folder(tmp_path / "step") as fresh:
        (fresh / "model").mkdir()
        (fresh / "model" / "weights").write_bytes(b"x")
        (fresh / "model" / "weights").chmod(0o600)  # as safetensors writes them
    assert mode(tmp_path / "a.json") == mode(tmp_path / "step" / "model" / "weights") == 0o644 & ~umask
    assert mode(tmp_path / "step") == mode(tmp_path / "step" / "model") == 0o755 & ~umask


def test_everything_in_a_folder_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    target = tmp_path / "step"
    with whole_folder(target) as fresh:
        (fresh / "model").mkdir()
        (fresh / "model" / "weights").write_bytes(b"x")
        assert synced == [] and not target.exists()
    inside = [str(fresh / part) for part in ("model/weights", "model", "")]
    assert [name.rstrip("/") for name in synced] == [*(name.rstrip("/") for name in inside), str(tmp_path)]


def test_a_run_folder_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "moved" / "step"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_filled_leaves_the_old_one(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "step") as fresh:
        (fresh / "a").write_text("old")
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "step") as fresh:
        (fresh / "a").write_text("new")
        raise OSError("full")
    assert (tmp_path / "step" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    with whole_folder(tmp_path / "step") as fresh:
        (fresh / "b").write_text("new")
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_what_a_kill_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    for kept in ("checkpoints/step=000001/model", "weights"):
        (tmp_path / kept).mkdir(parents=True)
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"whole")
    for left in ("checkpoints/.step=000002.new/model.new", "checkpoints/.step=000001.old", "weights/model.new"):
        (tmp_path / left).mkdir(parents=True)
    (tmp_path / "weights" / "model.safetensors.new").write_bytes(b"half")
    sweep(tmp_path)
    there = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert there == [
        "checkpoints",
        "checkpoints/step=000001",
        "checkpoints/step=000001/model",
        "weights",
        "weights/model.safetensors",
    ]
