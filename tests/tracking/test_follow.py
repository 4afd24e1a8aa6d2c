"""Trackers see each step once, whatever becomes of the run, and the run never sees what becomes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rocstar.cli.main import run as command
from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.record.tracker import RunTracker
from rocstar.record.trackers import SINKS, follow, refuse_absent, run_goes_on, state_file, tracked
from tests.record.examples import run


def sent(log: Mock) -> list[tuple[int, dict[str, float]]]:
    """What a tracker was sent."""
    return [one.args for one in log.call_args_list]


def steps(folder: RunFolder, first: int, last: int) -> None:
    with RunTracker(folder) as tracker:
        tracker.start_stage("cold", "sft", last)
        for step in range(first, last + 1):
            tracker.log(step, {"loss": 1.0 / step, "broken": float("nan")})


def acting(*acts: Callable[[], Any]) -> Callable[[float], bool]:
    """Does one thing at each wait; the run ends with the last."""
    left = list(acts)

    def wait(seconds: float) -> bool:
        left.pop(0)()
        return bool(left)

    return wait


def test_steps_are_sent_once_though_the_run_is_rewound_and_both_start_again(tmp_path: Path) -> None:
    folder, log = run(tmp_path), Mock()

    def rewound() -> None:
        folder.rewind(2)
        steps(folder, 3, 5)

    assert follow(folder, "kept", log, acting(lambda: steps(folder, 1, 4), rewound)) == 5
    assert follow(folder, "kept", log, acting(lambda: steps(folder, 6, 6))) == 6
    assert [step for step, _ in sent(log)] == [1, 2, 3, 4, 5, 6]
    assert sent(log)[1][1] == {"loss": 0.5}
    assert json.loads(state_file(folder, "kept").read_text()) == {"step": 6}


def test_what_was_sent_before_a_tracker_failed_is_not_sent_again(tmp_path: Path) -> None:
    folder, log = run(tmp_path), Mock()
    steps(folder, 1, 4)

    def failing(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise ConnectionError("no such server")
        log(step, metrics)

    with pytest.raises(ConnectionError):
        follow(folder, "kept", failing, acting(lambda: None))
    follow(folder, "kept", log, acting(lambda: None))
    assert [step for step, _ in sent(log)] == [1, 2, 3, 4]


def test_a_line_that_is_being_written_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    folder, log = run(tmp_path), Mock()
    line = b'{"step": 1, "stage": "cold", "loss": 2.0}\n'
    folder.metrics.write_bytes(line[:20])
    with folder.metrics.open("ab") as file:

        def rest() -> None:
            assert not log.called
            file.write(line[20:])
            file.flush()

        follow(folder, "kept", log, acting(lambda: None, rest))
    assert sent(log) == [(1, {"loss": 2.0})]


def test_a_tracker_that_fails_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "wandb.py").write_text("raise RuntimeError('no such server')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hiding), os.environ.get("PYTHONPATH", "")]))
    folder, said = run(tmp_path / "runs"), []
    with tracked(folder, ["wandb"], said.append):
        steps(folder, 1, 2)
    (sentence,) = said
    assert "wandb failed, which does not affect the run" in sentence
    log = (folder.path / "logs" / "track-wandb-1.txt").read_text()
    assert "no such server" in log and "Traceback" in log

    monkeypatch.syspath_prepend(hiding)
    assert command(["runs", "track", str(folder.path), "--to", "wandb"]) == 3
    assert capsys.readouterr().err == "rocstar: wandb failed: no such server; --traceback shows where\n"


def test_a_closed_pipe_ends_the_waiting() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        goes_on = run_goes_on(pipe)
        assert goes_on(0.0)
        os.close(writing)
        assert not goes_on(60.0)


def test_a_tracker_without_its_library_is_refused_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rocstar.record.trackers.find_spec", lambda name: None)
    recipe = ["recipes/quickstart.toml", f"run.folder={tmp_path}", 'run.trackers=["mlflow"]']
    assert command(["train", *recipe]) == 2
    assert "tracker mlflow needs its library, which is not installed: pip install mlflow" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="there is no tracker 'tb'; there are tensorboard, wandb, trackio, mlflow"):
        refuse_absent(["tb"])


@pytest.mark.parametrize("name", SINKS)
def test_a_real_tracker_is_sent_a_run_in_two_parts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = run(tmp_path / "runs")
    for last in (3, 5):
        steps(folder, last - 2, last)
        assert command(["runs", "track", str(folder.path), "--to", name]) == 0
        assert f"{name} has all steps of tiny up to {last}" in capsys.readouterr().out
