"""The kit finds what it is there to find, and rocstar handles what it injects."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rocstar.cli.main import run
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.faults import own
from rocstar.faults.kit import (
    ATTEMPTS,
    FAULTS,
    Trainer,
    TrainerAnswer,
    at_addresses,
    examined,
    faults_named,
    refuse_unsound,
    trainer_of,
)
from rocstar.faults.own import own_trainer
from rocstar.sandbox.client import dispatch
from rocstar.support.exits import INTERRUPTED
from rocstar.tools.python import PythonTool
from rocstar.types import Status, ToolCall, ToolResult
from tests.commands import json_of
from tests.faults import naive_trainer
from tests.forks import forked
from tests.sandbox.driver import eventually, runs
from tests.tiny_run import PYTHON

COLD = f"{sys.executable} {Path(__file__).parent / 'naive_trainer.py'}"
ADDRESSED = faults_named([], at_addresses=True)
SLOW = ("tools-gone", "mcp-gone", "run-disk-full-rollouts", "run-disk-full-checkpoint", "run-killed")
"""Those that take tens of seconds of waiting, or whole runs."""


async def unwary(given: Mapping[str, str]) -> TrainerAnswer:
    return TrainerAnswer(rewards=await asyncio.to_thread(naive_trainer.rewards, given))


NAIVE: Trainer = partial(at_addresses, unwary)


def test_there_are_thirty_faults_of_which_seventeen_can_be_injected_into_any_trainer() -> None:
    assert (len(FAULTS), len(ADDRESSED)) == (30, 17)


@pytest.mark.parametrize("fault", ADDRESSED)
async def test_a_trainer_that_makes_rewards_of_faults_is_reported(fault: str) -> None:
    """One that hangs must be a process that can be ended."""
    hangs = fault == "reward-hangs"
    found = await examined(trainer_of(COLD) if hangs else NAIVE, fault, seconds=3.0 if hangs else 60.0)
    assert not found.as_promised and (found.run == "hung") == hangs
    assert (found.rewarded > 0) != hangs and (found.shown > 0) == (fault.startswith("tools"))


@pytest.mark.parametrize("said", ['{"reward": 1.0, "id": "a"}', r'50%\r{"reward": 1.0}\r'])
async def test_other_keys_of_a_line_are_the_trainers_own_and_a_bar_of_progress_may_stand_before_it(said: str) -> None:
    told = await trainer_of(printing(said))("")
    assert list(told.rewards) == [1.0]


async def test_the_trainer_of_that_test_is_sound_without_faults() -> None:
    await refuse_unsound(NAIVE)
    with pytest.raises(ConfigError, match=r"without any fault the trainer gave 0 rewards.*it last said: nothing"):
        await refuse_unsound(trainer_of("true"))


async def told(fault: str, answer: TrainerAnswer) -> bool:
    async def trainer(fault: str) -> TrainerAnswer:
        return answer

    return (await examined(trainer, fault)).as_promised


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_can_fail_in_each_way(fault: str) -> None:
    well = [1.0] * ATTEMPTS

    def struck(*rewards: float | None, words: str = "its own", shown: int = 0, halted: bool = False) -> TrainerAnswer:
        return TrainerAnswer(rewards=rewards, words=words, shown=shown, halted=halted, struck=True)

    assert await told(fault, struck(*well))
    assert not await told(fault, struck(0.0, *well[1:]))
    assert await told(fault, struck(None, *well[1:])) != fault.startswith("run")
    assert not await told(fault, struck(float("nan"), *well[1:]))
    assert not await told(fault, struck(*well, 1.0)), "one attempt was recorded twice"
    assert not await told(fault, struck(*well, shown=1))
    assert not await told(fault, struck(None, *well[1:], words="")), "nobody was told"
    assert not await told(fault, struck(*well, halted=True, words="")), "nobody was told"
    assert await told(fault, struck(*well, words="")) != fault.startswith("reward")
    assert not await told(fault, TrainerAnswer(rewards=well, words="its own")), "it never struck"


def printing(text: str) -> str:
    """The command of a trainer that prints this."""
    return shlex.join(["printf", r"%b\n", text])


async def test_a_trainer_that_asks_nobody_is_refused_and_no_fault_is_as_promised() -> None:
    blind = trainer_of(printing('{"reward": 1.0}\n' * ATTEMPTS))
    with pytest.raises(ConfigError, match="sent 0 requests to the engine and 0 to the tools"):
        await refuse_unsound(blind)
    for name in ("engine-dies", "tools-gone"):
        found = await examined(blind, name)
        assert not found.as_promised and found.words == "the fault never struck; the trainer said: nothing"
    for name in ("reward-raises", "reward-nan"):
        found = await examined(blind, name)
        assert not found.as_promised and "did not report it; does it read FAULTS_REWARD?" in found.words


@pytest.mark.parametrize("wrong", ["true", "nan", '"1"', "[1.0]", "1.0, ", "[" * 50_000], ids=lambda wrong: wrong[:5])
async def test_a_line_without_a_number_is_a_wrong_reward_and_is_named(wrong: str) -> None:
    line = f'{{"reward": {wrong}}}'
    found = await examined(trainer_of(printing(line)), "reward-nan")
    assert found.rewarded == 1 and not found.as_promised
    assert found.words == f"{line[:100]} on stdout holds neither a number nor null"


@pytest.mark.parametrize(("command", "words"), [("'unbal", "quote"), ("", "nothing"), ("no-such-trainer", "not found")])
def test_a_command_that_is_none_is_refused(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["faults", "tools-dies", "--trainer", command]) == 2
    said = capsys.readouterr().err
    assert "without any fault the trainer gave 0 rewards" in said and words in said and "Traceback" not in said


def ended(pid: int) -> bool:
    """Soon: the kernel takes its time after a SIGKILL."""
    return eventually(lambda: not runs(pid))


@pytest.mark.parametrize("ends", [True, False])
async def test_no_child_of_a_trainer_outlives_it_or_holds_it_up(ends: bool, tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path / 'child'}; {'exit 3' if ends else 'wait'}"
    found = await examined(trainer_of(shlex.join(["sh", "-c", script])), "engine-dies", seconds=60.0 if ends else 1.0)
    assert found.run == ("halted" if ends else "hung") and found.lost == ATTEMPTS and not found.as_promised
    assert ended(int((tmp_path / "child").read_text()))


def test_a_signal_that_ends_the_verb_ends_the_trainer_too(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path / 'made'}; mv {tmp_path / 'made'} {tmp_path / 'pid'}; sleep 600"
    verb = subprocess.Popen(
        [sys.executable, "-m", "rocstar", "faults", "engine-dies", "--trainer", script],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background of a script
    )
    while not (tmp_path / "pid").is_file():
        assert verb.poll() is None
        time.sleep(0.05)
    verb.terminate()
    assert verb.wait(60) == INTERRUPTED and ended(int((tmp_path / "pid").read_text()))


async def test_what_a_trainer_says_without_a_fault_too_tells_nobody_of_one() -> None:
    async def noisy(given: Mapping[str, str]) -> TrainerAnswer:
        lost = given["FAULTS_REWARD"]
        words = "it is deprecated\n" if lost != "raises" else "the judge raised\nit is deprecated\n"
        return TrainerAnswer(rewards=[None if lost else 1.0] * ATTEMPTS, words=words)

    silent, telling = "reward-nan", "reward-raises"
    assert (await examined(partial(at_addresses, noisy), silent)).as_promised
    found = await examined(partial(at_addresses, noisy), silent, usual="it is deprecated\n")
    assert found.words.startswith("the trainer did not report it") and not found.as_promised
    found = await examined(partial(at_addresses, noisy), telling, usual="it is deprecated\n")
    assert (found.words, found.as_promised) == ("the judge raised", True)


@pytest.mark.parametrize(
    "name", ["engine-gone", "reward-raises", "reward-nan", "agent-hides-outage", "agent-leaves-tool"]
)
async def test_the_kit_reports_rocstar_if_it_took_an_outage_for_a_reward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "_reward", lambda made: made.outcome.reward if made.outcome else 0.0)
    found = await examined(own_trainer, name)
    assert found.rewarded >= 1 and not found.as_promised


async def test_the_kit_reports_rocstar_if_it_showed_an_outage_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(self: PythonTool, call: ToolCall, *, seed: int = 0) -> ToolResult:
        try:
            return await run_tool(self, call, seed=seed)
        except SandboxUnavailable as error:
            return ToolResult(call_id=call.id, status=Status.CODE_ERROR, stderr=str(error))

    run_tool = PythonTool.run
    monkeypatch.setattr(PythonTool, "run", told)
    monkeypatch.setattr(dispatch, "MAX_ATTEMPTS", 1)
    found = await examined(own_trainer, "tools-dies")
    assert found.rewarded >= 1 and found.shown >= 1 and not found.as_promised


@pytest.mark.parametrize(
    ("misdeed", "codes", "struck", "lost"),
    [
        ("disk-full-rollouts", (1, 0), True, 0),
        ("disk-full-rollouts", (0, 0), False, 0),
        ("disk-full-checkpoint", (1, 1), True, ATTEMPTS),
        ("killed", (-signal.SIGKILL, 0), True, 0),
        ("killed", (0, 0), False, 0),
        ("killed", (1, 0), False, 0),
        ("killed", (-signal.SIGKILL, 1), True, ATTEMPTS),
    ],
)
async def test_a_run_that_its_fault_did_not_end_and_one_that_is_not_resumed_are_reported(
    misdeed: str, codes: tuple[int, int], struck: bool, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(codes)

    async def ended(folder: Path, *arguments: str) -> tuple[int, str]:
        rollouts = folder / "runs" / "first" / "rollouts"
        rollouts.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"reward": [1.0] * ATTEMPTS}), rollouts / "0.parquet")
        return left.pop(0), "what it said"

    monkeypatch.setattr(own, "_command", ended)
    found = await examined(own_trainer, f"run-{misdeed}")
    assert (found.as_promised, found.lost) == (struck and not lost, lost)
    assert ("never struck" in found.words) != struck


async def test_rocstar_is_sound_without_faults() -> None:
    await refuse_unsound(own_trainer)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in SLOW])
async def test_rocstar_makes_no_reward_of_a_fault(fault: str) -> None:
    found = await examined(own_trainer, fault)
    assert found.as_promised, found
    gone = fault in ("engine-gone", "agent-hides-outage", "agent-leaves-engine", "agent-leaves-tool", "reward-hangs")
    assert found.run == ("halted" if gone else "went on")
    assert found.lost == (ATTEMPTS if gone else 1 if fault.startswith("reward") else 0)


async def forked_command(folder: Path, *arguments: str) -> tuple[int, str]:
    """As `own._command`, in a process that has loaded torch already."""
    said = folder / "said"
    said.write_text("")
    process = forked(PYTHON, *arguments, folder=folder, files=[os.devnull, str(said), str(said)])
    await asyncio.to_thread(process.join)
    assert process.exitcode is not None
    return process.exitcode, said.read_text().strip().rpartition("\n")[2]


async def test_a_command_of_a_run_is_told_by_its_code_and_its_last_words(tmp_path: Path) -> None:
    """In the folder of the run, as a person starts it."""
    program = "import os, sys; sys.exit(print('first', os.getcwd(), sep='\\n', file=sys.stderr) or 3)"
    assert await own._command(tmp_path, "-c", program) == (3, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
async def test_rocstar_makes_no_reward_of_a_slow_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_command", forked_command)
    found = await examined(own_trainer, name)
    assert found.as_promised, found
    assert found.lost == (ATTEMPTS if name.endswith("-gone") else 0)


def test_the_verb_prints_a_table_and_says_by_its_code_whether_all_was_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert json_of(capsys, "faults", "tools-dies")["promised"] == 1
    assert run(["faults", "engine-dies", "--trainer", COLD]) == 1
    said = capsys.readouterr().out
    assert "engine-dies BROKEN" in said and "0 of 1 faults were handled as promised" in said


def test_the_verb_lists_what_can_be_injected_and_refuses_the_rest_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def listed(*arguments: str) -> list[str]:
        assert run(["faults", "--list", *arguments]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert listed() == list(FAULTS)
    assert listed("--trainer", "true") == ADDRESSED
    assert listed("engine-dies") == ["engine-dies"]
    assert listed("engine-dies", "--json")[1] == '"engine-dies":'
    assert run(["faults", "run-killed", "--trainer", "true"]) == 2
    assert "run-killed exists only for a run of rocstar itself" in capsys.readouterr().err
    assert run(["faults", "engine-sleeps"]) == 2
    assert "there is no fault 'engine-sleeps'" in capsys.readouterr().err
