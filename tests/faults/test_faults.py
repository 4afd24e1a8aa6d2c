"""The kit finds what it is there to find, and rocstar handles what it injects."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rocstar.cli.main import run
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.faults import own
from rocstar.faults.kit import (
    ATTEMPTS,
    FAULTS,
    InjectedFault,
    TrainerAnswer,
    examined,
    faults_named,
    refuse_unsound,
    trainer_of,
)
from rocstar.faults.own import own_trainer
from rocstar.sandbox.client import dispatch
from rocstar.tools.python import PythonTool
from rocstar.types import Status, ToolCall, ToolResult

NAIVE = trainer_of(f"{sys.executable} {Path(__file__).parent / 'naive_trainer.py'}")
ADDRESSED = [fault for fault in FAULTS if fault.has_address]
SLOW = ("tools-gone", "mcp-gone", "agent-overstays", "run-disk-full-rollouts", "run-disk-full-checkpoint", "run-killed")
"""Those that take tens of seconds of waiting, or whole runs."""


def named(fault: InjectedFault) -> str:
    return fault.name


def test_there_are_thirty_faults_of_different_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 30


@pytest.mark.parametrize("fault", ADDRESSED, ids=named)
async def test_a_trainer_that_makes_rewards_of_faults_is_reported(fault: InjectedFault) -> None:
    hangs = fault.name == "reward-hangs"
    found = await examined(NAIVE, fault, seconds=3.0 if hangs else 60.0)
    assert not found.as_promised and (found.run == "hung") == hangs
    assert (found.rewarded > 0) != hangs and (found.shown > 0) == (fault.seam == "tools")


async def test_the_trainer_of_that_test_is_sound_without_faults() -> None:
    await refuse_unsound(NAIVE)
    with pytest.raises(ConfigError, match=r"without any fault the trainer gave 0 rewards.*it last said: nothing"):
        await refuse_unsound(trainer_of("true"))


async def told(fault: InjectedFault, answer: TrainerAnswer) -> bool:
    async def trainer(fault: InjectedFault) -> TrainerAnswer:
        return answer

    return (await examined(trainer, fault)).as_promised


@pytest.mark.parametrize("fault", FAULTS, ids=named)
async def test_each_fault_can_fail_in_each_way(fault: InjectedFault) -> None:
    well = [1.0] * ATTEMPTS
    assert await told(fault, TrainerAnswer(rewards=well, words="its own"))
    assert await told(fault, TrainerAnswer(rewards=[0.0, *well[1:]], words="its own")) == fault.is_the_agents
    assert await told(fault, TrainerAnswer(rewards=[None, *well[1:]], words="its own")) != fault.loses_nothing
    assert not await told(fault, TrainerAnswer(rewards=[float("nan"), *well[1:]], words="its own"))
    assert not await told(fault, TrainerAnswer(rewards=[*well, 1.0], words="its own")), "one attempt was recorded twice"
    assert not await told(fault, TrainerAnswer(rewards=well, shown=1, words="its own"))
    assert not await told(fault, TrainerAnswer(rewards=[None, *well[1:]])), "nobody was told"
    assert not await told(fault, TrainerAnswer(rewards=well, halted=True)), "nobody was told"


@pytest.mark.parametrize("name", ["engine-gone", "reward-raises", "reward-nan", "agent-hides-outage"])
async def test_the_kit_reports_rocstar_if_it_took_an_outage_for_a_reward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "_reward", lambda made: made.outcome.reward if made.outcome else 0.0)
    found = await examined(own_trainer, faults_named([name], at_addresses=False)[0])
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
    found = await examined(own_trainer, faults_named(["tools-dies"], at_addresses=False)[0])
    assert found.rewarded >= 1 and found.shown >= 1 and not found.as_promised


async def test_a_trainer_that_does_not_end_is_reported() -> None:
    found = await examined(trainer_of("sleep 60"), FAULTS[0], seconds=0.1)
    assert (found.run, found.lost, found.as_promised) == ("hung", ATTEMPTS, False)


async def test_rocstar_is_sound_without_faults() -> None:
    await refuse_unsound(own_trainer)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name not in SLOW], ids=named)
async def test_rocstar_makes_no_reward_of_a_fault(fault: InjectedFault) -> None:
    found = await examined(own_trainer, fault)
    assert found.as_promised, found
    gone = fault.times is None or fault.name == "reward-hangs"
    assert found.run == ("halted" if gone else "went on")
    assert found.lost == (ATTEMPTS if gone else 1 if fault.seam == "reward" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
async def test_rocstar_makes_no_reward_of_a_slow_fault(name: str) -> None:
    found = await examined(own_trainer, faults_named([name], at_addresses=False)[0])
    assert found.as_promised, found
    assert found.lost == (ATTEMPTS if name.endswith("-gone") else 0)


def test_the_verb_names_faults_prints_a_table_and_says_by_its_code_whether_all_was_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["faults", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)
    assert run(["faults", "tools-dies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["promised"] == 1
    naive = f"{sys.executable} {Path(__file__).parent / 'naive_trainer.py'}"
    assert run(["faults", "engine-dies", "--trainer", naive]) == 1
    said = capsys.readouterr().out
    assert "engine-dies BROKEN" in said and "0 of 1 faults were handled as promised" in said
    assert run(["faults", "run-killed", "--trainer", naive]) == 2
    assert "there is no fault 'run-killed' here" in capsys.readouterr().err
