"""The trusted lane, with real workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocstar.sandbox.trusted import (
    TargetLate,
    TargetRaised,
    TargetTooBig,
    TrustedDown,
    TrustedError,
    TrustedPool,
)
from tests.sandbox.support import eventually

TARGETS = "tests.sandbox.trusted_targets"
ANSWER = f"{TARGETS}:answer"
PATIENT = 30.0


@pytest.fixture
def pool() -> Iterator[TrustedPool]:
    with TrustedPool(target=ANSWER, prepare=f"{TARGETS}:prepare", workers=2) as pool:
        yield pool


def echo(value: Any) -> dict[str, Any]:
    return {"do": "echo", "value": value}


async def test_a_call_returns_what_the_function_returns(pool: TrustedPool) -> None:
    value = {"a": [1, 2.5, None, "ü\n\ud800"]}
    assert await pool.call(echo(value), deadline_seconds=PATIENT) == value


async def test_a_worker_is_prepared_once_and_stays_warm(pool: TrustedPool) -> None:
    first = await pool.call({"do": "pid"}, deadline_seconds=PATIENT)
    assert await pool.call({"do": "pid"}, deadline_seconds=PATIENT) == first
    assert await pool.call({"do": "prepared"}, deadline_seconds=PATIENT) == ["yes"]


async def test_a_batch_comes_back_in_order_with_one_failure_where_it_belongs(pool: TrustedPool) -> None:
    payloads = [echo(n) if n != 37 else {"do": "fail", "text": "no"} for n in range(100)]
    values = await pool.call_batch(payloads, deadline_seconds=PATIENT)
    assert [value for n, value in enumerate(values) if n != 37] == [n for n in range(100) if n != 37]
    assert isinstance(values[37], TargetRaised)


async def test_an_exception_of_the_function_comes_with_its_traceback(pool: TrustedPool) -> None:
    with pytest.raises(TargetRaised, match="ValueError: it is wrong") as caught:
        await pool.call({"do": "fail", "text": "it is wrong"}, deadline_seconds=PATIENT)
    assert "in fail" in caught.value.trace


@pytest.mark.parametrize(("do", "told"), [("exit", "SystemExit: 4"), ("set", "TypeError.*not JSON serializable")])
async def test_leaving_and_unserialisable_results_are_the_functions_failure(
    pool: TrustedPool, do: str, told: str
) -> None:
    with pytest.raises(TargetRaised, match=told):
        await pool.call({"do": do}, deadline_seconds=PATIENT)


async def test_what_the_function_prints_does_not_disturb_the_answer(pool: TrustedPool) -> None:
    assert await pool.call({"do": "print"}, deadline_seconds=PATIENT) is None
    assert await pool.call(echo("clean"), deadline_seconds=PATIENT) == "clean"


@pytest.mark.parametrize("do", ["loop", "hold_the_interpreter"])
async def test_a_call_past_its_deadline_is_killed_and_the_next_gets_a_new_worker(do: str) -> None:
    with TrustedPool(target=ANSWER, workers=1) as pool:
        old = await pool.call({"do": "pid"}, deadline_seconds=PATIENT)
        with pytest.raises(TargetLate, match=r"within 0\.3 seconds"):
            await pool.call({"do": do}, deadline_seconds=0.3)
        assert await pool.call({"do": "pid"}, deadline_seconds=PATIENT) != old
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)


async def test_the_rest_of_a_batch_survives_a_late_call() -> None:
    with TrustedPool(target=ANSWER, workers=1) as pool:
        payloads = [echo(n) for n in range(9)]
        payloads[4] = {"do": "loop"}
        values = await pool.call_batch(payloads, deadline_seconds=2.0)
    assert isinstance(values.pop(4), TargetLate)
    assert values == [0, 1, 2, 3, 5, 6, 7, 8]


async def test_waiting_for_earlier_calls_does_not_count_against_the_deadline() -> None:
    with TrustedPool(target=ANSWER, workers=1) as pool:
        await pool.call(echo("warm"), deadline_seconds=PATIENT)
        naps = [{"do": "sleep", "seconds": 0.4}] * 6
        assert await pool.call_batch(naps, deadline_seconds=2.0) == [None] * 6


async def test_a_call_whose_worker_died_is_tried_once_more(tmp_path: Path, pool: TrustedPool) -> None:
    payload = {"do": "die_once", "mark": str(tmp_path / "mark")}
    assert await pool.call(payload, deadline_seconds=PATIENT) == "second time"


async def test_a_call_that_kills_two_workers_is_a_fault_of_the_service(tmp_path: Path, pool: TrustedPool) -> None:
    log = tmp_path / "log"
    with pytest.raises(TrustedDown, match="died 2 times"):
        await pool.call({"do": "die", "log": str(log)}, deadline_seconds=PATIENT)
    assert log.read_text() == "ran\n" * 2
    assert await pool.call(echo("alive"), deadline_seconds=PATIENT) == "alive"


async def test_an_idle_worker_that_was_killed_is_replaced_unnoticed() -> None:
    with TrustedPool(target=ANSWER, workers=1) as pool:
        os.kill(await pool.call({"do": "pid"}, deadline_seconds=PATIENT), signal.SIGKILL)
        assert await pool.call(echo("still here"), deadline_seconds=PATIENT) == "still here"


@pytest.mark.parametrize("do", ["idle", "loop", "die"])
async def test_a_worker_that_was_lost_is_replaced_before_anybody_asks(tmp_path: Path, do: str) -> None:
    with TrustedPool(target=ANSWER, workers=1) as pool:
        old = await pool.call({"do": "pid"}, deadline_seconds=PATIENT)
        await asyncio.sleep(1.1)  # one that dies younger than a second is not replaced before there is work
        if do == "idle":
            os.kill(old, signal.SIGKILL)
        else:
            with pytest.raises(TrustedError):
                await pool.call({"do": do, "log": str(tmp_path / "log")}, deadline_seconds=0.3)
        assert await asyncio.to_thread(eventually, lambda: pool.worker_pids() not in ([], [old]), PATIENT)
        (new,) = pool.worker_pids()
        assert await pool.call({"do": "pid"}, deadline_seconds=PATIENT) == new


async def test_a_call_over_the_memory_limit_is_ended() -> None:
    with TrustedPool(target=ANSWER, workers=1, memory_bytes=100 * 2**20) as pool:
        with pytest.raises(TargetTooBig, match="more than 104857600 bytes"):
            await pool.call({"do": "keep", "bytes": 150 * 2**20}, deadline_seconds=PATIENT)
        with pytest.raises(TargetTooBig):
            await pool.call({"do": "keep", "bytes": 2**40}, deadline_seconds=PATIENT)
        assert await pool.call(echo("alive"), deadline_seconds=PATIENT) == "alive"


async def test_garbage_of_earlier_calls_is_not_held_against_a_later_one() -> None:
    with TrustedPool(target=ANSWER, workers=1, memory_bytes=100 * 2**20) as pool:
        kept = [await pool.call({"do": "keep", "bytes": 40 * 2**20}, deadline_seconds=PATIENT) for _ in range(4)]
    assert kept[0] == 40 * 2**20
    assert kept.count(40 * 2**20) >= 2, "a fresh worker took over when the old one was full"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target": "no.such.module:f"}, "No module named 'no'"),
        ({"target": f"{TARGETS}:no_such"}, "no attribute 'no_such'"),
        ({"target": ANSWER, "prepare": f"{TARGETS}:broken_prepare"}, "no licence"),
        ({"target": ANSWER, "start_seconds": 0.001}, "not ready within"),
        ({"target": ANSWER, "memory_bytes": 4096}, "importing alone takes"),
    ],
)
async def test_a_worker_that_cannot_start_tells_why(settings: dict[str, Any], told: str) -> None:
    with TrustedPool(**settings) as pool, pytest.raises(TrustedDown, match=told):
        await pool.call(echo(1), deadline_seconds=PATIENT)


async def test_a_payload_that_is_not_json_is_refused_at_once(pool: TrustedPool) -> None:
    with pytest.raises(TypeError):
        await pool.call(object(), deadline_seconds=PATIENT)


async def test_large_payloads_and_values_pass(pool: TrustedPool) -> None:
    text = "x" * (8 * 2**20)
    assert await pool.call_batch([echo(text)] * 3, deadline_seconds=PATIENT) == [text] * 3


def test_threads_and_loops_share_a_pool(pool: TrustedPool) -> None:
    values: list[int] = []

    def use(number: int) -> None:
        values.append(asyncio.run(pool.call(echo(number), deadline_seconds=PATIENT)))
        values.append(pool.submit([echo(number)], deadline_seconds=PATIENT)[0].result())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values) == sorted([*range(5), *range(5)])


async def test_a_cancelled_call_that_waits_is_never_run(tmp_path: Path) -> None:
    with TrustedPool(target=ANSWER, workers=1) as pool:
        await pool.call(echo("warm"), deadline_seconds=PATIENT)
        slow = asyncio.create_task(pool.call({"do": "sleep", "seconds": 0.5}, deadline_seconds=PATIENT))
        await asyncio.sleep(0.1)
        log = tmp_path / "log"
        waiting = asyncio.create_task(pool.call({"do": "die", "log": str(log)}, deadline_seconds=PATIENT))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await slow
        assert await pool.call(echo("after"), deadline_seconds=PATIENT) == "after"
        assert not log.exists()


async def test_closing_fails_what_is_unfinished_and_ends_the_workers() -> None:
    pool = TrustedPool(target=ANSWER, workers=1)
    await pool.call(echo("warm"), deadline_seconds=PATIENT)
    (pid,) = pool.worker_pids()
    futures = pool.submit([{"do": "loop"}, echo(1)], deadline_seconds=PATIENT)
    pool.close()
    pool.close()
    for future in futures:
        with pytest.raises(TrustedDown, match="closed"):
            future.result(timeout=PATIENT)
    with pytest.raises(TrustedDown, match="closed"):
        await pool.call(echo(1), deadline_seconds=PATIENT)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_function_may_use_the_alarm_itself(pool: TrustedPool) -> None:
    assert await pool.call({"do": "alarm"}, deadline_seconds=PATIENT) == "its own alarm worked"


def test_no_worker_outlives_a_parent_that_is_killed_hard() -> None:
    program = (
        "from rocstar.sandbox.trusted import TrustedPool\n"
        f"pool = TrustedPool(target={ANSWER!r}, workers=2)\n"
        "print(pool.submit([{'do': 'pid'}], deadline_seconds=30)[0].result(), flush=True)\n"
        "pool.submit([{'do': 'hold_the_interpreter'}], deadline_seconds=0.5)\n"
        "import os, signal, time; time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    pid = int(found.stdout)
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
