"""The tracker: everything recorded is on disk after close, and a failing disk is told, never raised."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal, read_journal
from rocstar.record.rollouts import read_rollouts
from rocstar.record.tracker import WAITING_STEPS, RunTracker
from tests.record.examples import attempts_of, decode, resampled, run


def test_metrics_carry_their_stage_and_events_their_time(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with RunTracker(folder) as tracker:
        tracker.start_stage("cold", "sft", 2)
        tracker.log(1, {"loss": 0.5})
        tracker.log(2, {"loss": float("nan")})
        assert read_journal(folder.metrics) == [
            {"step": 1, "stage": "cold", "loss": 0.5},
            {"step": 2, "stage": "cold", "loss": None},
        ]
    (event,) = read_journal(folder.events)
    assert {key: event[key] for key in ("event", "name", "steps")} == {"event": "stage", "name": "cold", "steps": 2}
    assert event["time"] > 0


def test_it_writes_more_steps_than_its_queue_holds_for_which_the_trainer_waits(tmp_path: Path) -> None:
    folder, goes_on = run(tmp_path), threading.Event()

    def slow(token_ids: Sequence[int]) -> str:
        goes_on.wait(60)
        return decode(token_ids)

    def record() -> None:
        for step in range(1, WAITING_STEPS + 4):
            tracker.record_attempts(step, attempts_of([resampled()]))

    with RunTracker(folder, decode=slow) as tracker:
        trainer = threading.Thread(target=record)
        trainer.start()
        trainer.join(0.3)
        waits = trainer.is_alive()
        goes_on.set()
        trainer.join(60)
        tracker.flush()
        assert waits, "else memory holds the attempts of any number of steps"
        assert len(list(folder.rollouts.iterdir())) == WAITING_STEPS + 3
    assert [row["text"][0] for row in read_rollouts(folder, 1)] == ["<11> <12>"] * 3
    assert tracker.failure is None


def gone(folder: RunFolder) -> RunFolder:
    """A folder that cannot be written to, for root as well: its parts are missing."""
    return RunFolder(folder.path / "missing")


def test_a_failing_disk_is_told_once_and_never_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gone(run(tmp_path))
    tracker = RunTracker(folder)
    tracker.log(1, {"loss": 1.0})
    folder.path.mkdir()
    tracker.event("note")
    tracker.record_attempts(1, attempts_of([resampled()]))
    tracker.close()
    assert tracker.failure is not None and "No such file" in tracker.failure
    assert capsys.readouterr().err == f"warning: {tracker.failure}\n"
    assert not [*folder.path.iterdir()], "a record with a gap would be taken for a complete one"


@pytest.mark.parametrize(("number", "remedy"), [(28, "free some space"), (30, "mend that")])
def test_a_disk_is_called_full_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def append(journal: Journal, row: Mapping[str, Any]) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Journal, "append", append)
    with RunTracker(run(tmp_path)) as tracker:
        tracker.log(1, {})
        assert tracker.failure and tracker.failure.endswith(f"; {remedy} and resume")


def test_a_bug_in_writing_never_leaves_the_trainer_waiting(tmp_path: Path) -> None:
    def broken(token_ids: object) -> str:
        raise KeyError(3)

    tracker = RunTracker(run(tmp_path), decode=broken)
    for step in range(WAITING_STEPS * 3):
        tracker.record_attempts(step, attempts_of([resampled()]))
    tracker.close()
    assert tracker.failure == "the rollouts of step 0 could not be written: KeyError(3)"
