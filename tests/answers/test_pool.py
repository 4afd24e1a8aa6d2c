"""The pool with deadlines, with real workers: what `test_symbolic.py` does not see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rocstar.answers.pool import DeadlinePool, PoolError
from tests.answers.targets import worker_pids

TARGET = "tests.answers.targets:scripted"
PATIENT = 60.0  # seconds for a result that comes


def pool_of(**settings: Any) -> DeadlinePool:
    settings = {"target": TARGET, "workers": 1, "deadline_seconds": 20.0, **settings}
    return DeadlinePool(**settings)


@pytest.fixture(scope="module")
def pool() -> Iterator[DeadlinePool]:
    pool = pool_of()
    yield pool
    pool.close()


def payload(predicted: str) -> dict[str, Any]:
    return {"predicted": predicted, "graders": ["g"]}


def results(pool: DeadlinePool, *predicted: str) -> list[Any]:
    """The value of each, or the exception."""
    futures = pool.submit([payload(text) for text in predicted])
    return [future.exception(PATIENT) or future.result() for future in futures]


def test_waiting_for_earlier_calls_does_not_count_against_the_deadline() -> None:
    pool = pool_of(deadline_seconds=0.04)  # and 0.8 s of wall time; all together take a second
    assert results(pool, *["nap:1"] * 20) == [["right", "g"]] * 20
    assert "got too little CPU time" in str(results(pool, "sleep")[0]), "the machine's fault is no verdict"
    pool.close()


def test_a_call_that_holds_the_interpreter_is_ended_at_its_deadline_and_others_go_on() -> None:
    pool = pool_of(deadline_seconds=0.5)
    first, second, third = results(pool, "fine", "hold", "fine")
    assert (first, third) == (["right", "g"], ["right", "g"])
    assert isinstance(second, TimeoutError)
    pool.close()


def test_the_deadline_holds_where_the_asking_process_blocks_the_alarm() -> None:
    pool = pool_of(deadline_seconds=0.5)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGPROF])
    try:
        assert isinstance(results(pool, "hold")[0], TimeoutError)
    finally:
        pool.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM, signal.SIGPROF])


def test_a_worker_stays_until_it_fails_and_the_next_comes_from_the_same_warm_process(pool: DeadlinePool) -> None:
    results(pool, "fine")
    old = worker_pids(pool)
    results(pool, "fine", "raise")
    assert worker_pids(pool) == old
    assert isinstance(results(pool, "die")[0], PoolError)
    assert results(pool, "fine") == [["right", "g"]]
    assert len(worker_pids(pool)) == 1 and worker_pids(pool) != old


@pytest.mark.parametrize("kill", [os.kill, lambda worker, sent: os.killpg(os.getpgid(worker), sent)])
def test_idle_workers_alone_or_with_their_warm_process_are_replaced_unnoticed(kill: Any) -> None:
    pool = pool_of(workers=2)
    while len(workers := worker_pids(pool)) < 2:  # on a busy machine the first may take both
        results(pool, "nap:1", "nap:2")
    one, other = workers
    kill(one, signal.SIGKILL)
    with suppress(ProcessLookupError):
        kill(other, signal.SIGKILL)
    while not all(worker.poll() for worker in pool._idle):
        time.sleep(0.01)
    assert results(pool, "fine") == [["right", "g"]]
    pool.close()


def test_a_worker_that_is_killed_when_its_call_has_waited_for_longer_than_the_deadline_is_no_late_one(
    tmp_path: Path,
) -> None:
    pool = pool_of(deadline_seconds=0.04)
    assert results(pool, f"die-once:{tmp_path / 'died'}") == [["right", "g"]]
    pool.close()


def test_garbage_of_earlier_calls_is_not_held_against_a_later_one() -> None:
    pool = pool_of(memory_bytes=100 << 20)
    assert results(pool, *["keep:80"] * 5) == [["right", "g"]] * 5
    pool.close()


def test_a_call_that_was_cancelled_in_line_is_never_run(pool: DeadlinePool, tmp_path: Any) -> None:
    mark = tmp_path / "ran"
    nap, waiting = pool.submit([payload("nap:1"), payload(f"die-once:{mark}")])
    assert waiting.cancel()
    nap.result(PATIENT)
    results(pool, "fine")
    assert not mark.exists()


def test_large_payloads_and_text_that_is_no_unicode_pass_and_no_json_is_refused(pool: DeadlinePool) -> None:
    (future,) = pool.submit([{"predicted": "x", "graders": ["\ud800" + "y" * (2 << 20)], "more": None}])
    assert isinstance(future.exception(PATIENT), PoolError), "an answer over a megabyte is no answer"
    (future,) = pool.submit([{"predicted": "z" * (2 << 20), "graders": ["\ud800"]}])
    assert future.result(PATIENT) == ["right", "\ud800"]
    with pytest.raises(TypeError):
        pool.submit([object()])


def test_a_target_that_cannot_be_imported_says_so_for_all_that_wait() -> None:
    pool = pool_of(target="no.such.module:f")
    errors = results(pool, *["fine"] * 200)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "did not start: ModuleNotFoundError: No module named 'no'" in str(errors[0])
    pool.close()


def test_a_worker_that_is_killed_as_it_starts_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "killed"))
    pool = pool_of(prepare="tests.answers.targets:killed_once")
    assert results(pool, "x") == [["right", "g"]] and (tmp_path / "killed").exists()
    pool.close()


def test_the_asking_program_is_not_imported_again_nor_what_beside_it_is_named_as_pythons_own(tmp_path: Any) -> None:
    (tmp_path / "statistics.py").write_text("raise OSError")
    script = tmp_path / "script.py"
    script.write_text(
        "from rocstar.answers.pool import DeadlinePool\n"
        "pool = DeadlinePool(target='statistics:mean', workers=1)\n"
        "print(pool.submit([[1]])[0].result())\n"
    )
    place = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, script], env=place, capture_output=True, text=True, timeout=PATIENT)
    assert json.loads(found.stdout) == 1, found.stderr
