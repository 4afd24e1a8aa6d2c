"""One evaluation of one policy: attempts, figures with intervals, transcripts, and the files they are kept in.

The result is one JSON-able object; `samples.parquet` beside it has every attempt, so a number can be looked into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.evaluation.metrics import Estimate, EvalSummary, summarise
from rocstar.protocols import TextCodec
from rocstar.rollout.collect import Roller
from rocstar.runs.atomic import write_json
from rocstar.runs.rollouts import AttemptRecord, write_attempts
from rocstar.types import Group, Problem, Trajectory, seed_for

TRANSCRIPTS = 8  # attempts kept as text in the result; all of them are in samples.parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How an evaluation samples."""

    attempts: int
    """k."""
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    """Also one greedy attempt per problem."""
    seed: int = 0


async def evaluate_policy(
    roller: Roller, problems: Sequence[Problem], protocol: Protocol, *, folder: Path | None = None, step: int = 0
) -> dict[str, Any]:
    """Figures of the engine's current weights. With `folder`, writes samples.parquet and then result.json there.
    Raises OSError."""
    sampled = await roller.roll(
        problems,
        attempts=protocol.attempts,
        seed=seed_for(protocol.seed, "evaluate"),
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        top_k=protocol.top_k,
    )
    greedy = (
        await roller.roll(problems, attempts=1, seed=seed_for(protocol.seed, "greedy"), temperature=0.0)
        if protocol.greedy
        else []
    )
    codec = roller.conversation.codec
    result = _result(sampled, greedy, protocol, codec)
    if folder is not None:
        _write(folder, step, {"samples": sampled, "greedy": greedy}, result, codec)
    return result


def _write(
    folder: Path, step: int, groups: Mapping[str, Sequence[Group]], result: Mapping[str, Any], codec: TextCodec
) -> None:
    """result.json last: it is what makes the evaluation a finished one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in groups.items():
        if some:
            write_attempts(folder / f"{name}.parquet", step, _records(some), codec.decode)
    write_json(folder / "result.json", result)


def figure(estimate: Estimate) -> dict[str, Any]:
    """An estimate in the form that run folders and tables use."""
    return {"value": estimate.value, "interval": [estimate.low, estimate.high], "n": estimate.n}


def transcript(group: Group, attempt: Trajectory, codec: TextCodec) -> dict[str, Any]:
    """One attempt as a person reads it."""
    pieces = [ids for turn in attempt.turns for ids in (turn.completion.token_ids, turn.reply_ids)]
    return {
        "problem_id": group.problem.id,
        "question": group.problem.question,
        "gold": group.problem.answer,
        "text": "".join(map(codec.decode, pieces)).strip(),
        "verdict": str(attempt.outcome.verdict) if attempt.outcome else None,
    }


def _result(sampled: Sequence[Group], greedy: Sequence[Group], protocol: Protocol, codec: TextCodec) -> dict[str, Any]:
    summary = _summary(sampled, protocol.attempts)
    shown = greedy or sampled
    return {
        "accuracy": figure(summary.avg_at_k),
        "greedy": figure(_summary(greedy, 1).avg_at_k) if greedy else None,
        f"avg@{protocol.attempts}": figure(summary.avg_at_k),
        f"pass@{protocol.attempts}": figure(summary.pass_at_k),
        f"maj@{protocol.attempts}": figure(summary.maj_at_k),
        "problems": summary.problems,
        "attempts": summary.attempts,
        "undecided": summary.undecided,
        "environment_failed": summary.environment_failed,
        "mean_response_tokens": summary.mean_response_tokens,
        "calls_per_attempt": summary.calls_per_attempt,
        "failed_call_share": summary.failed_call_share,
        "tool_error_share_in_correct": summary.tool_error_share_in_correct,
        "failed_call_share_in_correct": summary.failed_call_share_in_correct,
        "no_tool_share": summary.no_tool_share,
        "truncation_share": summary.truncation_share,
        "no_room_share": summary.no_room_share,
        "out_of_turns_share": summary.out_of_turns_share,
        "accuracy_by_source": {name: figure(value) for name, value in summary.accuracy_by_source.items()},
        "protocol": {name: getattr(protocol, name) for name in Protocol.__slots__},
        "transcripts": [transcript(g, g.trajectories[0], codec) for g in shown[:TRANSCRIPTS]],
    }


def _summary(groups: Sequence[Group], attempts: int) -> EvalSummary:
    return summarise([(group.problem, group.trajectories) for group in groups], attempts)


def _records(groups: Sequence[Group]) -> list[AttemptRecord]:
    return [
        AttemptRecord(problem=group.problem, trajectory=attempt, policy_version=_version(attempt))
        for group in groups
        for attempt in group.trajectories
    ]


def _version(attempt: Trajectory) -> int:
    return attempt.turns[-1].completion.policy_versions[1] if attempt.turns else 0
