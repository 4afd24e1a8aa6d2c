"""Small hand-made attempts and runs for the tests of the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rocstar.config.recipe import recipe_of
from rocstar.config.sections import Recipe
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import AttemptRecord
from rocstar.types import (
    Choice,
    Completion,
    Finish,
    FormatFacts,
    Group,
    Outcome,
    Penalty,
    Problem,
    Reason,
    Resampled,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    problem_id,
)

PROBLEM = Problem(id=problem_id("1+1?"), question="1+1?", answer="2", source="tests")


SHORT = {"template": "compact", "max_response_tokens": 64}


def recipe(name: str = "tiny") -> Recipe:
    stages = [{"name": "cold", "kind": "sft", "steps": 2}, {"name": "stage1", "kind": "rl", "steps": 3}]
    return recipe_of({"run": {"name": name}, "evaluate": {"problems": 5}, "rollout": SHORT}, stages)


def run(base: Path, name: str = "tiny") -> RunFolder:
    return RunFolder.create(recipe(name), base, ["rocstar", "train", "x.toml"], recipe_text="# tiny\n")


def trajectory(index: int, *, verdict: Verdict | None = Verdict.RIGHT, failed: bool = False) -> Trajectory:
    call = ToolCall(id="0", tool="python", arguments={"code": "print(2)"}, raw='{"name": "python"}')
    result = ToolResult(
        call_id="0",
        status=Status.CODE_ERROR if failed else Status.OK,
        stdout="2\n",
        stderr="NameError \ud800" if failed else "",
        run_seconds=0.25,
        isolation="L2",
    )
    first = Completion(token_ids=(11, 12), logprobs=(-0.5, -0.25), finish=Finish.STOP)
    last = Completion(token_ids=(13,), logprobs=(-1.0,), finish=Finish.STOP)
    facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
    outcome = verdict and Outcome(
        verdict=verdict, reward=float(verdict is Verdict.RIGHT), extracted="2", method="integer", format_facts=facts
    )
    return Trajectory(
        problem_id=PROBLEM.id,
        index=index,
        prompt_ids=(1, 2),
        turns=(
            Turn(
                completion=first,
                calls=(call,),
                results=(result,),
                reply_ids=(7, 8, 9),
                engine_seconds=0.75,
                tool_seconds=0.25,
            ),
            Turn(completion=last),
        ),
        stop=Stop.ANSWERED if verdict else Stop.ENVIRONMENT_FAILED,
        outcome=outcome,
        fault=None if verdict else "the sandbox is gone",
        seconds=1.5,
        tool_seconds=0.5,
    )


def resampled() -> Resampled:
    group = Group(
        problem=PROBLEM, trajectories=(trajectory(0, failed=True), trajectory(1, verdict=Verdict.WRONG), trajectory(2))
    )
    choices = (
        choice(0, False, Reason.DROPPED_QUALITY, errors=1.0),
        choice(1, True, Reason.KEPT_NEGATIVE),
        choice(2, True, Reason.KEPT_QUALITY),
    )
    return Resampled(group=group, choices=choices)


def choice(index: int, kept: bool, reason: Reason, errors: float = 0.0) -> Choice:
    return Choice(index=index, kept=kept, reason=reason, penalty=Penalty(errors=errors, format=0.5), weight=0.75)


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(f"<{token}>" for token in token_ids)


def attempts_of(groups: Sequence[Resampled], policy_version: int = 0) -> list[AttemptRecord]:
    return [
        AttemptRecord(
            problem=resampled.group.problem,
            trajectory=resampled.group.trajectories[choice.index],
            choice=choice,
            policy_version=policy_version,
        )
        for resampled in groups
        for choice in resampled.choices
    ]
