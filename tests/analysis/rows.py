"""Attempts as a run writes them, from what a policy wrote and what tools said: real trajectories, real parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Outcome,
    Problem,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)

PROMPT = (1, 2)
FACTS = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)


def turn(code: str | None, stderr: str = "", *, tokens: int = 3, parse_error: str | None = None) -> Turn:
    """A completion with one call, or with none; the call fails where there is a stderr or a parse error."""
    completion = Completion(token_ids=tuple(range(10, 10 + tokens)), logprobs=(-0.1,) * tokens, finish=Finish.STOP)
    if code is None:
        return Turn(completion=completion)
    status = Status.BAD_CALL if parse_error else Status.CODE_ERROR if stderr else Status.OK
    call = ToolCall(id="call_0", tool="python", arguments={"code": code}, raw=code, parse_error=parse_error)
    result = ToolResult(call_id="call_0", status=status, stderr=stderr)
    return Turn(completion=completion, calls=(call,), results=(result,), reply_ids=(7, 8))


def attempt(
    turns: Sequence[Turn],
    *,
    problem: str = "p",
    index: int = 0,
    right: bool | Verdict | None = True,
    stop: Stop = Stop.ANSWERED,
    entropies: Sequence[float] | None = None,
) -> AttemptRecord:
    verdict = (Verdict.RIGHT if right else Verdict.WRONG) if isinstance(right, bool) else right
    reward = float(verdict is Verdict.RIGHT)
    facts: dict[str, Any] = {"method": "integer", "format_facts": FACTS, "parts": {"half share": reward / 2}}
    outcome = verdict and Outcome(verdict=verdict, reward=reward, extracted="1", **facts)
    trajectory = Trajectory(
        problem_id=problem, index=index, prompt_ids=PROMPT, turns=tuple(turns), stop=stop, outcome=outcome or None
    )
    question = Problem(id=problem, question=f"What is {problem}?", answer="1", source="test")
    return AttemptRecord(problem=question, trajectory=trajectory, policy_version=1, entropies=entropies)


def written(path: Path, records: Sequence[AttemptRecord], step: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_attempts(path, step, records, None)
    return path
