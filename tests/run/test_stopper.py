"""What Ctrl-C does at which moment of a run."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rocstar.record.folder import RunFolder
from rocstar.rollout.together import all_or_none
from rocstar.run import stopper as module
from rocstar.run.stopper import Stopper


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal must not end the tests on a busy machine."""
    monkeypatch.setattr(module, "END_SECONDS", 60.0)


def interrupt_after(*seconds: float) -> None:
    for each in seconds:
        threading.Timer(each, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_the_first_asks_for_a_save_while_weights_change_and_the_second_stops() -> None:
    notes: list[str] = []
    stopper, before = Stopper(notes.append), signal.getsignal(signal.SIGINT)
    descriptor = signal.set_wakeup_fd(-1)  # of an event loop of another test, it may be
    with stopper.installed(), stopper.holding(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        assert stopper.asked and "finishing this update" in notes[0]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert signal.getsignal(signal.SIGINT) == before, "what was installed before is there again"
    assert signal.set_wakeup_fd(descriptor) == -1


def test_the_first_stops_at_once_where_nothing_must_be_finished() -> None:
    stopper = Stopper(print)
    with stopper.installed(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_a_closed_terminal_asks_once_however_often_it_is_told_and_nohup_protects_from_it() -> None:
    """A logout sends SIGTERM too, before or after."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, asks in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, handler)
            stopper = Stopper(print)
            with stopper.installed(), stopper.holding():
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGHUP)
                    time.sleep(0.1)
                assert stopper.asked == asks
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.1)
            assert stopper.asked and signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_is_no_second_though_a_long_computation_keeps_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of a real model takes longer than the patience; at 058688ea the run was then ended while it saved."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(module, "END_SECONDS", 0.0)
    notes, ended = list[str](), list[str]()
    monkeypatch.setattr(module, "end_at_once", lambda: ended.append("process"))
    stopper = Stopper(notes.append)
    stopper.break_off = lambda: ended.append("ranks")
    with stopper.installed(), pytest.raises(KeyboardInterrupt):
        try:
            interrupt_after(0.05)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 600_000)  # a call of C that lets other threads run
            time.sleep(5)
        finally:
            time.sleep(0.3)  # what saving takes
    assert not ended and notes == ["waiting for the computation under way; press Ctrl-C again to stop at once"]


def test_attempts_under_way_are_cancelled_and_seen_out() -> None:
    stopper, ended = Stopper(print), []

    async def attempt() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("attempt")

    async def run() -> None:
        stopper.stops(asyncio.current_task())
        interrupt_after(0.1)
        try:
            await all_or_none(attempt() for _ in range(2))
        finally:
            ended.append("run")

    with pytest.raises(KeyboardInterrupt), stopper.installed():
        asyncio.run(run())
    assert ended == ["attempt", "attempt", "run"]


def test_where_the_run_itself_computes_it_is_interrupted_there_unless_the_weights_are_half_changed() -> None:
    stopper, reached = Stopper(print), []

    async def run() -> None:
        stopper.stops(asyncio.current_task())
        with stopper.finishing(lambda: True):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the update")
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("more")

    with pytest.raises(KeyboardInterrupt), stopper.installed():
        asyncio.run(run())
    assert reached == ["the end of the update"]


def test_a_stop_between_two_steps_saves_those_that_are_not_saved_yet(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from rocstar.run.checkpoints import Progress
    from rocstar.run.steps import steps_of

    stopper, saved, stage = Stopper(print), list[bool](), SimpleNamespace(name="s")
    run: Any = SimpleNamespace(
        stopper=stopper,
        folder=RunFolder(tmp_path),
        progress=Progress(stage_step=1),
        checkpoints=SimpleNamespace(is_saved=lambda: False),
        is_half_changed=lambda: False,
        save=lambda learner, *, complete: saved.append(complete),
    )
    with stopper.installed(), pytest.raises(KeyboardInterrupt), steps_of(run, cast(Any, stage), cast(Any, None)):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert saved == [False], "the stage is not over"


def test_the_second_gets_through_to_a_run_that_waits_for_a_stopped_rank() -> None:
    pytest.importorskip("torch")
    from rocstar.cluster import start_ranks
    from rocstar.config.places import ClusterSection
    from rocstar.config.sections import LearningSection, ModelSection
    from rocstar.dialogue.templates import template_named
    from rocstar.learning.learner import GrpoLearner
    from rocstar.learning.policy import Policy
    from tests.learning.examples import codec, model, rows

    ranks = start_ranks(ClusterSection(learners=2), ModelSection(), {})
    child: Any = ranks.children[0]
    in_vain = threading.Timer(60, child.kill)  # the wait ends, but not by a KeyboardInterrupt
    try:
        learner = GrpoLearner(Policy(model(), codec(), template_named("compact"), ranks=ranks), LearningSection())
        stopper = Stopper(lambda sentence: None)
        stopper.break_off = ranks.abandon
        in_vain.start()
        with stopper.installed(), stopper.holding(), pytest.raises(KeyboardInterrupt):
            child.send_signal(signal.SIGSTOP)
            interrupt_after(0.5, 1.5)
            learner.score(rows())
        assert in_vain.is_alive()
    finally:
        in_vain.cancel()
        ranks.close()
