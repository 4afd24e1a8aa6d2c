"""An engine in a process of its own: what is asked of it arrives, and its death, its silence and its lies are told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.types import Finish, Weights
from tests.engines.plain import ask, until

PLAIN = "tests.engines.plain_child"


def plain(rows: int = 4) -> ProcessEngine:
    return ProcessEngine(EngineSettings(folder="none", rows=rows, positions=64, vocab_size=64), module=PLAIN)


@pytest.fixture
async def engine() -> AsyncIterator[ProcessEngine]:
    made = plain()
    await made.restart(None)
    yield made
    await made.close()


def strike(engine: ProcessEngine, number: int) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, number)


async def test_weights_sleep_aborts_and_cancelling_reach_the_child(engine: ProcessEngine) -> None:
    await engine.load_weights(Weights(version=3, folder="w"))
    assert engine.load().policy_version == 3, "as soon as the call returns"
    assert (await ask(engine)).version_spans == ((3, 5),)
    with pytest.raises(EngineUnavailable, match="weights 4 are in no folder"):
        await engine.load_weights(Weights(version=4, tensors={}))
    await engine.sleep()
    turn = asyncio.create_task(ask(engine))
    await asyncio.sleep(0.05)
    assert not turn.done()
    await engine.load_weights(Weights(version=5, folder="w"))
    assert (await turn).version_spans == ((5, 5),)
    turns = [asyncio.create_task(ask(engine, f"s{n}", tokens=100_000)) for n in range(2)]
    await until(lambda: engine.load().running == 2)
    turns[0].cancel()
    await until(lambda: engine.load().running == 1)
    await engine.close_session("s1")
    assert (await turns[1]).finish is Finish.ABORTED
    assert engine.load().running == 0
    strike(engine, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.sleep(), 0.05)
    assert engine.pid is None, "its GPU's memory is the learner's now"
    await engine.sleep()


async def test_its_death_is_told_to_who_waits_and_to_who_asks_until_it_is_begun_anew(engine: ProcessEngine) -> None:
    before = await ask(engine)
    turn = asyncio.create_task(ask(engine, "t", tokens=100_000))
    await until(lambda: engine.load().running == 1)
    strike(engine, signal.SIGKILL)
    for waiting in (turn, ask(engine, "u"), engine.load_weights(Weights(version=3, folder="w"))):
        with pytest.raises(EngineUnavailable, match="the engine process ended with SIGKILL"):
            await waiting
    assert engine.pid is None
    produced = engine.load().produced_tokens
    await engine.restart(lambda: Weights(version=8, folder="w"))
    assert engine.load().policy_version == 8 and engine.load().produced_tokens == produced >= 5
    assert (await ask(engine)).token_ids == before.token_ids
    strike(engine, signal.SIGSTOP)
    stopped = asyncio.create_task(ask(engine))
    await asyncio.sleep(0)
    await engine.restart(None)  # it can be ended although it is stopped
    with pytest.raises(EngineUnavailable):
        await stopped
    assert len((await ask(engine)).token_ids) == 5
    strike(engine, signal.SIGSTOP)
    taking = asyncio.create_task(engine.load_weights(Weights(version=3, folder="w")))
    await asyncio.sleep(0)
    strike(engine, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        await taking


async def test_an_engine_sees_the_gpu_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    made = ProcessEngine(EngineSettings(folder="none", rows=4, positions=64, vocab_size=64, gpus=("6",)), module=PLAIN)
    await made.restart(None)
    assert psutil.Process(made.pid).environ()["CUDA_VISIBLE_DEVICES"] == "6"
    await made.close()


async def test_an_engine_that_cannot_be_made_says_why() -> None:
    made = plain(rows=2000)
    with pytest.raises(ConfigError, match=r"2000 rows do not fit; lower rollout.engine_rows"):
        await made.restart(None)
    assert made.pid is None
    with pytest.raises(EngineUnavailable, match="the engine process was closed"):
        await ask(made)


async def test_a_child_that_sends_what_is_no_message_is_ended() -> None:
    made = ProcessEngine(
        EngineSettings(folder="none", rows=1, positions=1, vocab_size=1), module="tests.engines.garbled_child"
    )
    with pytest.raises(EngineUnavailable, match="sent an invalid message"):
        await made.restart(None)
    await made.close()


PARENT = """
import asyncio, os, sys
from tests.engines.test_process import plain

os.chdir(sys.argv[1])

async def main():
    engine = plain()
    await engine.restart(None)
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_child_ends_with_its_parent_however_that_ends(stopped: bool, tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("raise OSError")  # hides none of Python's own
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if stopped:
            child.suspend()
        parent.kill()
    child.wait(30)
    assert not child.is_running()
