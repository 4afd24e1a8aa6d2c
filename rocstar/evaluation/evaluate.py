"""One evaluation of one policy: attempts, figures with intervals, transcripts, and the files they are kept in.

The result is one JSON-able object; `samples.parquet` beside it has every attempt, so a number can be looked into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rocstar.errors import RunHalted
from rocstar.evaluation.attempts import Solver, attempted
from rocstar.evaluation.intervals import figure
from rocstar.evaluation.metrics import (
    EvalSummary,
    Results,
    accuracy_by_budget,
    is_right,
    maj_at_k,
    summarise,
    votes_PR,
)
from rocstar.evaluation.recall import Recall
from rocstar.protocols import TextCodec
from rocstar.record.atomic import write_json
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.types import Group, Problem, Sampling, Stop, Trajectory, seed_for

Said = Callable[[str, int, int, float], None]
"""(which attempts, problems done, of so many, share of their attempts that is right); `Screen.attempted` is one."""
Figures = Callable[[Sequence[Group]], Mapping[str, Any]]
"""Further figures of a benchmark's own; `Scorer.figures` is one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation that was carried out: every attempt, and what they come to."""

    groups: Mapping[str, Sequence[Group]]
    """By name of their file: `samples`, and `greedy` where it was asked for."""
    result: Mapping[str, Any]
    """What `result.json` holds; docs/evaluation.md says what each key means."""
    codec: TextCodec

    def write(self, folder: Path, step: int) -> None:
        """Keep it in `folder`; result.json comes last, because it is what makes the evaluation a finished one. Raises
        OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, some in self.groups.items():
            write_attempts(folder / f"{name}.parquet", step, _records(some), self.codec.decode)
        write_json(folder / "result.json", self.result)


async def evaluate_policy(
    solver: Solver,
    problems: Sequence[Problem],
    protocol: Protocol,
    *,
    fault_budget: float,
    setup: Mapping[str, Any],
    said: Said = lambda name, done, total, right: None,
    recall: Recall | None = None,
    figures: Figures = lambda groups: {},
) -> Evaluation:
    """Attempts of `solver`, and their figures.

    fault_budget: share of the sampled and of the greedy attempts that may end by faults of ours. setup: what defines
    this evaluation (`setup.py`), kept in the result. said: hears of each problem that is attempted. recall: attempts
    that are made already. Raises RunHalted past the budget: such faults take away the attempts that use what failed, so
    figures of the others would be of another question."""

    async def roll(name: str, identity: str, attempts: int, sampling: Sampling) -> list[Group]:
        groups = await attempted(
            solver,
            problems,
            replace(sampling, seed=seed_for(protocol.seed, identity)),
            attempts=attempts,
            recall=recall or Recall(),
            done=_tally(name, len(problems), said),
        )
        _check_faults(groups, fault_budget)
        return groups

    drawn = Sampling(max_new_tokens=1, temperature=protocol.temperature, top_p=protocol.top_p, top_k=protocol.top_k)
    groups = {"samples": await roll("sampled", "evaluate", protocol.attempts, drawn)}
    if protocol.greedy:
        groups["greedy"] = await roll("greedy", "greedy", 1, Sampling(max_new_tokens=1, temperature=0.0))
    return kept_evaluation(groups, protocol.attempts, solver.codec, setup, figures)


def kept_evaluation(
    groups: Mapping[str, Sequence[Group]],
    attempts: int,
    codec: TextCodec,
    setup: Mapping[str, Any],
    figures: Figures = lambda groups: {},
) -> Evaluation:
    """Figures of attempts that are made and judged: `attempts` at each problem in `samples`, one in `greedy`."""
    found = _figures(groups["samples"], groups.get("greedy", []), attempts)
    curve = accuracy_by_budget(groups["samples"], setup.get("max_response_tokens"))
    shown = groups.get("greedy") or groups["samples"]
    transcripts = [transcript(group, group.trajectories[0], codec) for group in shown[:TRANSCRIPTS]]
    result = {**found, **curve, **figures(groups["samples"]), "setup": setup, "transcripts": transcripts}
    return Evaluation(groups=groups, result=result, codec=codec)


def _tally(name: str, total: int, said: Said) -> Callable[[Group], None]:
    done = right = attempts = 0

    def count(group: Group) -> None:
        nonlocal done, right, attempts
        done += 1
        attempts += len(group.trajectories)
        right += sum(map(is_right, group.trajectories))
        said(name, done, total, right / attempts)

    return count


def _check_faults(groups: Sequence[Group], budget: float) -> None:
    attempts = list(chain.from_iterable(group.trajectories for group in groups))
    faults = [attempt.fault for attempt in attempts if attempt.stop is Stop.ENVIRONMENT_FAILED]
    if len(faults) > budget * len(attempts):
        raise RunHalted(
            f"{len(faults)} of the {len(attempts)} attempts of this evaluation ended by failures outside the "
            f"model, which is more than run.fault_budget {budget:.0%} allows, so it has no result; "
            f"mend what failed and evaluate again; the first says: {faults[0]}"
        )


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


def _figures(sampled: Sequence[Group], greedy: Sequence[Group], attempts: int) -> dict[str, Any]:
    summary, majority = _summary(sampled, attempts), maj_at_k(votes_PR(_results(sampled)))
    notes = _notes(summary)
    return {
        "accuracy": figure(summary.avg_at_k, *notes),
        "greedy": _greedy_figure(greedy),
        f"avg@{attempts}": figure(summary.avg_at_k, *notes),
        f"pass@{attempts}": figure(summary.pass_at_k, *notes),
        f"maj@{attempts}": majority and figure(majority, *notes),
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
        "longest_prompt_tokens": _longest_prompt(sampled),
        "accuracy_by_source": {name: figure(value) for name, value in summary.accuracy_by_source.items()},
    }


def _longest_prompt(groups: Sequence[Group]) -> int | None:
    """None where the prompt's tokens are the business of an endpoint."""
    first = [group.trajectories[0] for group in groups]
    if any(attempt.told_tokens is not None for attempt in first):
        return None
    return max((len(attempt.prompt_ids) for attempt in first), default=0)


def _greedy_figure(groups: Sequence[Group]) -> dict[str, Any] | None:
    if not groups:
        return None
    summary = _summary(groups, 1)
    return figure(summary.avg_at_k, *_notes(summary))


def _notes(summary: EvalSummary) -> tuple[int, float]:
    """`missing` and `undecided` of its figures."""
    judged = summary.attempts - summary.environment_failed
    return summary.environment_failed, summary.undecided / max(1, judged)


def _summary(groups: Sequence[Group], attempts: int) -> EvalSummary:
    return summarise(_results(groups), attempts)


def _results(groups: Sequence[Group]) -> Results:
    return [(group.problem, group.trajectories) for group in groups]


def _records(groups: Sequence[Group]) -> list[AttemptRecord]:
    return [
        AttemptRecord(problem=group.problem, trajectory=attempt, policy_version=_version(attempt))
        for group in groups
        for attempt in group.trajectories
    ]


def _version(attempt: Trajectory) -> int:
    spans = [span for turn in attempt.turns for span in turn.completion.version_spans]
    return spans[-1].version if spans else 0
