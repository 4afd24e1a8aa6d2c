"""`rocstar simulate`: replay of a recorded run, whose attempts were made by an engine of known costs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("pyarrow")

from rocstar.cli.main import run as command
from rocstar.forecast.engine_model import torch_engine, with_costs
from rocstar.forecast.simulate import simulate
from rocstar.forecast.workload import PlannedAttempt, shrunk, synthetic_workload
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.types import Completion, Finish, Problem, Stop, Trajectory, Turn
from tests.record.examples import run

COSTS = (2e-3, 1e-7, 3e-5, 2e-5, 1e-3)
CAP = 64


def work(seed: int) -> list[PlannedAttempt]:
    """With equal waits in an attempt, since their sum is what a run records."""
    drawn = shrunk(synthetic_workload("even", problems=4, attempts=8, limit=1600, seed=seed), 1600 / CAP)
    return [replace(one, turns=tuple(even(one)), limit=max(CAP, one.limit)) for one in drawn]


def even(attempt: PlannedAttempt) -> list[Any]:
    tools = attempt.turns[:-1]
    return [*(turn._replace(tool_seconds=0.05) for turn in tools), attempt.turns[-1]._replace(tool_seconds=0.0)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two steps on one engine, to be read only."""
    folder = run(tmp_path_factory.mktemp("recorded"))
    rows = json.loads(folder.resolved.read_text())["rollout"]["engine_rows"]
    for step in range(2):
        attempts = work(step)
        engine = with_costs(torch_engine(capacity_tokens=1_000_000, most_running=rows), COSTS)
        ends = simulate(attempts, {"engine0": engine}, KvScheduler()).ends
        made = [record(*each) for each in zip(range(len(ends)), attempts, ends, strict=True)]
        write_attempts(folder.rollout_file(step), step, made, None)
    return folder


def record(index: int, plan: PlannedAttempt, seconds: float) -> AttemptRecord:
    problem = Problem(id=plan.group, question=plan.group, answer="", source="tests")
    turns = tuple(
        Turn(
            completion=Completion(
                token_ids=(1,) * turn.sampled_tokens, logprobs=(0.0,) * turn.sampled_tokens, finish=Finish.STOP
            ),
            reply_ids=(2,) * turn.reply_tokens,
        )
        for turn in plan.turns
    )
    trajectory = Trajectory(
        problem_id=problem.id,
        index=index,
        prompt_ids=(3,) * plan.prompt_tokens,
        turns=turns,
        stop=Stop.ANSWERED,
        seconds=seconds,
        tool_seconds=sum(turn.tool_seconds for turn in plan.turns),
    )
    return AttemptRecord(problem=problem, trajectory=trajectory, policy_version=0)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert command(["simulate", *arguments, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_costs_are_fitted_to_a_run_and_say_what_other_engines_would_take(
    recorded: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("--policies", "least-requests", "--steps", "2", "--engines", "2", "--capacity", "2048")
    found, told = simulated(capsys, str(recorded.path), *names, "--most-running", "8")
    engine = with_costs(torch_engine(capacity_tokens=2048, most_running=8), COSTS)
    truly = simulate(work(1), {"engine00": engine, "engine01": engine}, KvScheduler())
    (row,) = found["policies"]
    assert "costs fitted to the run: step_seconds 0.00" in told
    assert row["makespan_seconds"] == pytest.approx(truly.makespan, rel=0.1)
    assert row["produced_tokens"] == sum(turn.sampled_tokens for one in work(1) for turn in one.turns)


def test_costs_that_are_given_are_not_fitted(recorded: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--step-seconds", "1", "--cached-token-seconds", "0", "--sequence-seconds", "0")
    found, told = simulated(
        capsys, str(recorded.path), "--policies", "static", *costs, "--prefill-token-seconds", "0", "--capacity", "9999"
    )
    assert told == ""
    assert found["engine"]["step_seconds"] == 1 and found["engines"] == 1
    assert found["policies"][0]["makespan_seconds"] >= max(sum(t.sampled_tokens for t in one.turns) for one in work(1))


def test_costs_are_not_fitted_to_steps_that_overlapped_and_a_step_that_was_not_recorded_is_named(
    recorded: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["simulate", str(recorded.path), "--step", "7"]) == 2
    assert "has rollouts of 2 steps, from 0 to 1; choose --step" in capsys.readouterr().err
    folder = RunFolder(tmp_path / "overlapped")
    shutil.copytree(recorded.path, folder.path)
    settings = json.loads(folder.resolved.read_text())
    for key in ("max_staleness_steps", "carry_over"):
        folder.resolved.write_text(json.dumps({**settings, "rollout": {**settings["rollout"], key: 1}}))
        assert command(["simulate", str(folder.path)]) == 2
        assert "do not begin together; give --step-seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "--problems", "3"), "--problems draws a workload, and the one of tiny is recorded"),
        (("--step", "3"), "--step 3 is a step of a run; name the run"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_torch_engine_is_simulated_with_its_own_sizes() -> None:
    pytest.importorskip("torch")
    from rocstar.engines.pages import PAGE
    from rocstar.engines.torch_decoder import PREFILL_TOKENS
    from rocstar.engines.torch_engine import PATIENCE_SECONDS

    model = torch_engine(capacity_tokens=1, most_running=1)
    assert (model.page_tokens, model.chunk_tokens, model.patience_seconds) == (PAGE, PREFILL_TOKENS, PATIENCE_SECONDS)
