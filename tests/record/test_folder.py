"""The run folder: created whole, never reused, found again, rewound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocstar.config.recipe import resolved_from_json
from rocstar.errors import ConfigError
from rocstar.record import atomic
from rocstar.record.atomic import write_atomic, write_json
from rocstar.record.folder import RunFolder, list_runs
from rocstar.record.journal import Journal, read_journal
from rocstar.record.rollouts import write_attempts
from tests.record.examples import attempts_of, recipe, resampled, run


def test_a_new_run_holds_its_identity_and_settings_before_the_first_step(tmp_path: Path) -> None:
    folder = run(tmp_path)
    assert folder.path == tmp_path / "tiny"
    identity = folder.identity
    assert identity["schema_version"] == 1
    assert identity["argv"] == ["rocstar", "train", "x.toml"]
    assert identity["versions"]["rocstar"] and identity["versions"]["pydantic"]
    assert identity["hardware"]["cores"] >= 1 and identity["hardware"]["memory_bytes"] > 0
    assert identity["started"].endswith("+00:00")
    assert (folder.path / "config.toml").read_text() == "# tiny\n"
    assert resolved_from_json(folder.resolved) == recipe()


def test_a_command_names_a_run_so_that_it_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder(Path("runs/smol de")).argument == "'smol de'"
    assert RunFolder(Path("elsewhere/run")).argument == "elsewhere/run"


def test_names_are_never_reused(tmp_path: Path) -> None:
    assert [run(tmp_path).name for _ in range(3)] == ["tiny", "tiny-2", "tiny-3"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "."])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        run(tmp_path, name)


def test_a_recipe_is_read_as_it_was_written_whatever_the_locale(tmp_path: Path) -> None:
    folder = run(tmp_path)
    write_atomic(folder.path / "config.toml", "# §".encode())
    program = (
        "import sys; from rocstar.record.folder import RunFolder; print(ascii(RunFolder(sys.argv[1]).recipe_text()))"
    )
    strict = (sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", program)
    assert subprocess.check_output([*strict, str(folder.path)], text=True) == "'# \\xa7'\n"


def test_a_run_is_found_by_path_name_prefix_and_last(tmp_path: Path) -> None:
    first, second = run(tmp_path, "apple"), run(tmp_path, "banana")
    os.utime(first.path / "run.json", (2**31, 2**31))
    assert RunFolder.find(str(second.path), tmp_path).path == second.path
    assert RunFolder.find("apple", tmp_path).path == first.path
    assert RunFolder.find("ban", tmp_path).path == second.path
    assert RunFolder.find("last", tmp_path).path == first.path
    with Journal(second.metrics) as metrics:
        metrics.append({"step": 1})
    os.utime(second.metrics, (2**31 + 1, 2**31 + 1))
    assert RunFolder.find("last", tmp_path).path == second.path


def test_an_exact_name_beats_longer_ones_and_of_many_runs_the_nearest_few_are_named(tmp_path: Path) -> None:
    for _ in range(9):
        run(tmp_path)
    assert RunFolder.find("tiny", tmp_path).name == "tiny"
    with pytest.raises(ConfigError, match=r"runs there are: tiny-4, (tiny(-\d)?, ){3}tiny(-\d)? and 4 others$"):
        RunFolder.find("tinj-4", tmp_path)
    with pytest.raises(ConfigError, match=r"tin may be any of tiny, (tiny-\d, ){3}tiny-\d and 4 others; write more"):
        RunFolder.find("tin", tmp_path)
    (tmp_path / "tiny" / "run.json").unlink()
    with pytest.raises(ConfigError, match="tiny is not a run folder"):
        RunFolder.find("tiny", tmp_path)


def test_an_unknown_run_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run last in .*, nor any other; begin one"):
        RunFolder.find("last", tmp_path)
    run(tmp_path)
    with pytest.raises(ConfigError, match="runs there are: tiny"):
        RunFolder.find("zebra", tmp_path)
    with pytest.raises(ConfigError, match="not a run folder"):
        RunFolder.open(tmp_path)
    assert [folder.name for folder in list_runs(tmp_path)] == ["tiny"]


def test_rewind_forgets_what_came_after_a_step_and_nothing_else(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with Journal(folder.metrics) as metrics:
        for step in range(1, 5):
            metrics.append({"step": step})
    for step in (1, 3, 4):
        write_attempts(folder.rollout_file(step), step, attempts_of([resampled()]), None)
    for name, step in [("before", 0), ("during", 3), ("after", 4)]:
        folder.evaluation(name, step).mkdir(parents=True)
        write_json(folder.evaluation(name, step) / "result.json", {"accuracy": None})
    write_json(folder.summary, {})
    (folder.rollouts / ".step=000004.parquet.x.new").write_bytes(b"half")
    folder.checkpoint(3).mkdir()

    folder.rewind(3)

    assert [row["step"] for row in read_journal(folder.metrics)] == [1, 2, 3]
    assert sorted(file.name for file in folder.rollouts.iterdir()) == ["step=000001.parquet", "step=000003.parquet"]
    assert [(name, step) for name, step, _ in folder.evaluations()] == [("before", 0), ("during", 3)]
    assert folder.checkpoint_steps() == [3]
    assert not folder.summary.exists()


def no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    write_atomic(file, b"old")
    monkeypatch.setattr(atomic.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left") as failed:
        write_atomic(file, b"new")
    assert failed.value.filename == str(file), "else it would be told by a traceback"
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_json_never_holds_numbers_that_json_cannot_say(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": float("nan"), "b": [float("inf"), 1.5], 3: Path("x")})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "3": "x"}


def test_a_place_where_no_folder_can_be_made_is_told_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for base in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"no run folder can be made in .*choose another with run\.folder="):
            run(base)
    with pytest.raises(ConfigError, match="longer than 240 bytes"):
        run(tmp_path, "x" * 300)


def test_a_run_that_cannot_be_written_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []
