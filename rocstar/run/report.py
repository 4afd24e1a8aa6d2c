"""What one RL step says of itself: numbers for metrics.jsonl, records for the rollout file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from rocstar.config.sections import RlStage
from rocstar.errors import ContractBroken
from rocstar.evaluation.metrics import summarise
from rocstar.learning.advantages import identity
from rocstar.learning.learner import engine_gap, mean_entropy
from rocstar.record.rollouts import AttemptRecord
from rocstar.run.pools import is_solved
from rocstar.types import BatchRow, Group, Problem, Reason, Resampled, Stop, Trajectory, Verdict

DECIDED = (Verdict.RIGHT, Verdict.WRONG)


def faults_of(groups: Sequence[Resampled]) -> tuple[float, str | None]:
    """Share of a step's attempts that say nothing about the model: ended by a fault of ours, or left undecided by the
    verifier, which only a reference or the verifier's own clock may cause; and what the first of them says."""
    attempts = [(r.group.problem, t) for r in groups for t in r.group.trajectories]
    failed = [fault for problem, trajectory in attempts if (fault := _fault_of(problem, trajectory))]
    return len(failed) / max(1, len(attempts)), next(iter(failed), None)


def _fault_of(problem: Problem, trajectory: Trajectory) -> str | None:
    if trajectory.stop is Stop.ENVIRONMENT_FAILED:
        return trajectory.fault or "no reason was given"
    outcome = trajectory.outcome
    if outcome is None or outcome.verdict is not Verdict.UNDECIDED:
        return None
    return (
        f"the verifier could not decide problem {problem.id} ({outcome.method}): reference {problem.answer[:60]!r}, "
        f"answer {(outcome.extracted or '')[:60]!r}"
    )


def step_metrics(groups: Sequence[Resampled], rows: Sequence[BatchRow], version: int | None = None) -> dict[str, float]:
    """Figures of all attempts drawn, then of the ones kept. Every drop has its own counter. version: of the weights
    that learnt from them, which alone say how far engine and learner differ; None where they wrote all of it."""
    attempts = max(len(r.group.trajectories) for r in groups)
    decided_PR = [[o for t in r.group.trajectories if (o := t.outcome) and o.verdict in DECIDED] for r in groups]
    summary = summarise([r.group for r in groups], attempts)
    fresh = rows if version is None else _written_by(version, groups, rows)
    gap_mean, gap_max = engine_gap(fresh)
    reasons = Counter(choice.reason for r in groups for choice in r.choices)
    metrics: dict[str, float | None] = {
        "reward/mean": _over_problems([[o.reward for o in some] for some in decided_PR]),
        "verdict/right": _over_problems([[o.verdict is Verdict.RIGHT for o in some] for some in decided_PR]),
        "verdict/undecided": summary.undecided / summary.attempts,
        "pass/mean": summary.pass_at_k.value,
        "tool/calls": summary.calls_per_attempt,
        "tool/error_rate": summary.failed_call_share,
        "tool/error_share_in_correct": summary.tool_error_share_in_correct,
        "tool/failed_call_share_in_correct": summary.failed_call_share_in_correct,
        "tool/none_share": summary.no_tool_share,
        "step/tokens": sum(t.num_sampled_tokens for r in groups for t in r.group.trajectories),
        "len/tokens": summary.mean_response_tokens,
        "len/truncated": summary.truncation_share,
        "roc/attempts": summary.attempts,
        "roc/kept": len(rows),
        "group/usable": sum(bool(r.kept) for r in groups),
        "group/solved_share": _mean([float(is_solved(r.group)) for r in groups]),
        "policy/entropy": mean_entropy(rows) if rows else None,
        "policy/logprob_gap": gap_mean if fresh else None,
        "policy/logprob_gap_max": gap_max if fresh else None,
        **penalties(groups),
        **{f"drop/{reason.value.removeprefix('dropped.')}": reasons[reason] for reason in Reason if _drops(reason)},
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}


def mean_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step's updates, averaged; nothing when there was nothing to learn from."""
    if not updates:
        return {"learn/updates": 0.0}
    names = updates[0].keys()
    return {"learn/updates": float(len(updates))} | {
        f"learn/{name}": sum(update[name] for update in updates) / len(updates) for name in names
    }


def penalties(groups: Sequence[Resampled]) -> dict[str, float | None]:
    """Mean total penalty of right attempts, drawn, kept and dropped: what RoC's choice changes."""
    right = [
        choice
        for r in groups
        for choice in r.choices
        if (outcome := r.group.trajectories[choice.index].outcome) and outcome.verdict is Verdict.RIGHT
    ]
    return {
        "roc/penalty_right": _mean([choice.penalty.total for choice in right]),
        "roc/penalty_right_kept": _mean([choice.penalty.total for choice in right if choice.kept]),
        "roc/penalty_right_dropped": _mean([choice.penalty.total for choice in right if not choice.kept]),
    }


def staleness_metrics(groups: Sequence[Group], version: int, stage: RlStage, overlap: float) -> dict[str, float]:
    """How much older than the weights of `version`, which learnt from them, those were that wrote a step's tokens;
    nothing for a stage that is strictly on-policy. overlap: seconds. Raises ContractBroken past the stage's bound."""
    most, per_step = stage.rollout.max_staleness_steps, stage.learning.updates_per_step
    if not most:
        return {}
    tokens: Counter[int] = Counter()
    for span in (s for g in groups for t in g.trajectories for turn in t.turns for s in turn.completion.version_spans):
        tokens[version - span.version] += span.tokens
    oldest, total = max(tokens, default=0), max(1, tokens.total())
    if oldest > most * per_step:
        raise ContractBroken(f"a token is {oldest} updates older than what learns from it, {most * per_step} allowed")
    steps: Counter[int] = Counter()
    for updates, count in tokens.items():
        steps[-(-updates // per_step)] += count
    return {
        "staleness/mean": sum(updates * count for updates, count in tokens.items()) / total,
        "staleness/max": float(oldest),
        **{f"staleness/share_{age}": steps[age] / total for age in range(most + 1)},
        "step/overlap_seconds": overlap,
    }


def _written_by(version: int, groups: Sequence[Resampled], rows: Sequence[BatchRow]) -> list[BatchRow]:
    """Rows of attempts without a token of older weights."""
    stale = {
        identity(number, choice.index)
        for number, resampled in enumerate(groups)
        for choice in resampled.choices
        for turn in resampled.group.trajectories[choice.index].turns
        if any(span.version != version for span in turn.completion.version_spans)
    }
    return [row for row in rows if row.identity not in stale]


def attempt_records(
    groups: Sequence[Resampled], rows: Sequence[BatchRow], *, policy_version: int
) -> list[AttemptRecord]:
    """One record per attempt, kept or not; rows: of those that were learnt from."""
    scored: Mapping[str, BatchRow] = {row.identity: row for row in rows}
    records = []
    for number, resampled in enumerate(groups):
        for choice in resampled.choices:
            trajectory = resampled.group.trajectories[choice.index]
            row = scored.get(identity(number, choice.index))
            records.append(
                AttemptRecord(
                    problem=resampled.group.problem,
                    trajectory=trajectory,
                    choice=choice,
                    advantage=row.advantage if row else None,
                    policy_version=policy_version,
                    entropies=row.entropies if row else None,
                    old_logprobs=row.old_logprobs if row else None,
                )
            )
    return records


def _drops(reason: Reason) -> bool:
    return reason.value.startswith("dropped.")


def _over_problems(values_PR: Sequence[Sequence[float]]) -> float | None:
    """Mean over problems of the mean over attempts."""
    means = [fmean(values) for values in values_PR if values]
    return fmean(means) if means else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
