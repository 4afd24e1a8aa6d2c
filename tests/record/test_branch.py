"""What RUN@STEP means."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.errors import ConfigError
from rocstar.parts.modelfolder import model_name, model_named
from rocstar.record.folder import find_checkpoint
from tests.record.examples import run


def test_a_run_is_found_with_and_without_a_step_also_where_a_folder_has_an_at(tmp_path: Path) -> None:
    base = tmp_path / "a@b"
    folder = run(base)
    for step in (3, 12):
        folder.checkpoint(step).mkdir(parents=True)
    assert find_checkpoint("tiny", base)[1] == 12
    assert find_checkpoint("tiny@3", base)[1] == 3
    assert find_checkpoint(str(folder.path), base)[1] == 12
    assert find_checkpoint(f"{folder.path}@3", base)[1] == 3
    (base / "tiny@3").symlink_to(folder.path)
    assert find_checkpoint("tiny@3", base)[0].name == "tiny@3", "a run whose name says it is that run"
    assert find_checkpoint("tiny@3@3", base)[1] == 3
    (base / "tiny@3").unlink()


@pytest.mark.parametrize("step", ["4", "²", "-3", "3.0", "last", "9" * 30])
def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(tmp_path: Path, step: str) -> None:
    folder = run(tmp_path)
    folder.checkpoint(3).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run tiny has no checkpoint of step .*; it has 3"):
        find_checkpoint(f"tiny@{step}", tmp_path)


def test_a_request_to_end_a_stage_is_read_whatever_wrote_it(tmp_path: Path) -> None:
    folder = run(tmp_path)
    folder.end_request.write_bytes(b"\xff\xfe")
    assert not folder.asks_to_end("stage1")
    folder.end_request.write_text("stage1\n")
    assert folder.asks_to_end("stage1") and not folder.asks_to_end("stage2")


def test_a_hub_id_is_a_model_unless_its_first_part_is_a_folder_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str, **_: object) -> None:
        raise OSError(f"no network for {name}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    Path("runs").mkdir()
    with pytest.raises(ConfigError, match=r"model Qwen/Qwen3-0.6B is no folder .* no network for Qwen/Qwen3-0.6B"):
        model_named("Qwen/Qwen3-0.6B", Path("runs"))
    with pytest.raises(ConfigError, match=r"there is no run runs/first in runs, nor any other; begin one"):
        model_named("runs/first", Path("runs"))


def test_a_name_that_a_model_and_a_run_both_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("first/config.json", "last/config.json", "runs/first/run.json"):
        Path(file).parent.mkdir(parents=True)
        Path(file).write_text("{}")
    for name in ("first", "last"):
        with pytest.raises(ConfigError, match=f"{name} is a model here and a run in runs; write ./{name}, or"):
            model_named(name, Path("runs"))
        assert model_named(f"./{name}", Path("runs")) == (Path(name), None, 0)


def test_a_model_in_the_hub_s_cache_has_the_hub_s_name(tmp_path: Path) -> None:
    assert model_name(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "a1b2") == "Qwen3-0.6B"
    assert model_name(tmp_path / "mine") == "mine"
