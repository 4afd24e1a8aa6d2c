"""The report of one RL step: numbers for metrics.jsonl, records for the rollout file.

`suspicion` counts how often right attempts look as if the reward was won without solving the problem; the thresholds
are in `alarms.py`. It reads texts, so only of the first SAMPLE right attempts of a step. Source: ours."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from operator import xor
from statistics import fmean

from rocstar.answers.extract import boxed_answer, boxes
from rocstar.config.sections import RlStage, RolloutStage
from rocstar.errors import ContractBroken
from rocstar.evaluation.metrics import is_right, is_solved, means_of_parts, over_problems, summarise
from rocstar.record.rollouts import AttemptRecord
from rocstar.rollout.collect import RolledStep
from rocstar.types import BatchRow, Group, Problem, Reason, Resampled, Stop, Trajectory, Update, Verdict, VersionSpan

DECIDED = (Verdict.RIGHT, Verdict.WRONG)
BADLY_ENDED = (Stop.AGENT_FAILED, Stop.AGENT_TIMEOUT)
DROPPED = "dropped."  # prefix of the reasons that drop an attempt
SAMPLE = 256  # attempts: a share is then known to about three points either way
LITERAL = r"""(?:[-+]?[\d._]+(?:e[-+]?\d+)?|"[^"\n]*"|'[^'\n]*')"""
CONSTANT = re.compile(rf"\s*(?:(?:print\(\s*{LITERAL}\s*\)|{LITERAL})\s*(?:;|\n|$)\s*)+", re.IGNORECASE)
"""A program of constants only, printed or as its last value."""
NUMBER = re.compile(r"(?<![\w.)])-?\d+(?:\.\d+)?")
"""Does not read the second number of 7-10 with its minus."""
Decode = Callable[[Sequence[int]], str]
ShareAndFirst = tuple[float, str | None]
"""Share of a step's attempts, and the first one's message."""


def reason_to_halt(faults: ShareAndFirst, failures: ShareAndFirst, budget: float) -> str | None:
    """Why a run halts after a step's attempts: too many ended by service failures, or all agents failed. Arguments:
    from `faults_of` and `failed_agents`."""
    (share, first), (failed, message) = faults, failures
    if failed == 1.0:
        return f"rollout.agent failed in every attempt; the first says: {message}"
    if share <= budget:
        return None
    return (
        f"{share:.0%} of the attempts ended by failures outside the model or undecided, run.fault_budget allows "
        f"{budget:.0%}; the first says: {first}"
    )


def faults_of(groups: Sequence[Group]) -> ShareAndFirst:
    """Share of a step's attempts that are no evidence about the model: ended by a service failure, or left undecided by
    the verifier, which only a reference or the verifier's own timeout may cause; and the first one's message."""
    attempts = [(group.problem, t) for group in groups for t in group.trajectories]
    failed = [fault for problem, trajectory in attempts if (fault := _fault_of(problem, trajectory))]
    return len(failed) / max(1, len(attempts)), next(iter(failed), None)


def failed_agents(groups: Sequence[Group]) -> ShareAndFirst:
    """Share of a step's attempts whose agent ended with an error or out of time; and the first one's message."""
    attempts = [t for group in groups for t in group.trajectories]
    failed = [t.fault for t in attempts if t.stop in BADLY_ENDED]
    return len(failed) / max(1, len(attempts)), next(iter(failed), None)


def _fault_of(problem: Problem, trajectory: Trajectory) -> str | None:
    if trajectory.stop is Stop.ENVIRONMENT_FAILED:
        return trajectory.fault or "no reason was given"
    outcome = trajectory.outcome
    if outcome is None or outcome.verdict is not Verdict.UNDECIDED:
        return None
    if outcome.method == "function":
        return f"your reward function gave None, which is no reward, to an attempt at problem {problem.id}"
    return (
        f"the verifier could not decide problem {problem.id} ({outcome.method}): reference {problem.answer[:60]!r}, "
        f"answer {(outcome.extracted or '')[:60]!r}"
    )


def step_metrics(groups: Sequence[Resampled], rows: Sequence[BatchRow], version: int | None = None) -> dict[str, float]:
    """Figures of all attempts drawn, then of the ones kept. Every drop has its own counter. version: of the weights
    that learnt from them; tokens of older weights are reported separately, since they also differ by what was learnt
    since. None if those weights wrote all tokens."""
    attempts = max(len(r.group.trajectories) for r in groups)
    decided_PR = [[o for t in r.group.trajectories if (o := t.outcome) and o.verdict in DECIDED] for r in groups]
    summary = summarise([r.group for r in groups], attempts)
    fresh, stale = (rows, ()) if version is None else _by_age(version, groups, rows)
    gap_mean, gap_max = engine_gap(fresh)
    entropies = [e for row in rows for e, mine in zip(row.entropies, row.loss_mask, strict=True) if mine]  # nats
    reasons = Counter(choice.reason for r in groups for choice in r.choices)
    metrics: dict[str, float | None] = {
        "reward/mean": over_problems([[o.reward for o in some] for some in decided_PR]),
        "verdict/right": over_problems([[o.verdict is Verdict.RIGHT for o in some] for some in decided_PR]),
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
        "roc/kept": len({row.origin[:2] for row in rows}),
        "group/usable": sum(bool(r.kept) for r in groups),
        "group/solved_share": _mean([float(is_solved(r.group)) for r in groups]),
        "policy/entropy": (sum(entropies) / len(entropies) if entropies else 0.0) if rows else None,
        "policy/logprob_gap": gap_mean if fresh else None,
        "policy/logprob_gap_max": gap_max if fresh else None,
        "staleness/logprob_gap": engine_gap(stale)[0] if stale else None,
        **means_of_parts([[o.parts for o in some] for some in decided_PR]),
        **penalties(groups),
        **{f"drop/{r.value.removeprefix(DROPPED)}": reasons[r] for r in Reason if r.value.startswith(DROPPED)},
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}


def mean_of_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics of a step's updates, averaged; empty if there was nothing to learn from."""
    names = updates[0].metrics if updates else ()
    means = {f"learn/{name}": sum(update.metrics[name] for update in updates) / len(updates) for name in names}
    return {"learn/updates": float(len(updates)), **means}


def penalties(groups: Sequence[Resampled]) -> dict[str, float | None]:
    """Mean total penalty of right attempts, drawn, kept and dropped, which shows the effect of RoC."""
    right = [choice for r in groups for choice in r.choices if is_right(r.group.trajectories[choice.index])]
    return {
        "roc/penalty_right": _mean([choice.penalty.total for choice in right]),
        "roc/penalty_right_kept": _mean([choice.penalty.total for choice in right if choice.kept]),
        "roc/penalty_right_dropped": _mean([choice.penalty.total for choice in right if not choice.kept]),
    }


def staleness_metrics(groups: Sequence[Group], version: int, stage: RlStage, overlap: float) -> dict[str, float]:
    """How much older the weights that wrote a step's tokens were than those of `version`, which learnt from them; empty
    for a strictly on-policy stage. overlap: seconds. Raises ContractBroken past the stage's bound."""
    most, per_step = stage.rollout.max_staleness_steps, stage.learning.updates_of_step
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


def rolled_metrics(rolled: RolledStep, stage: RolloutStage) -> dict[str, float]:
    """Counts of groups that replace ones without a signal; empty for a stage that replaces none."""
    if not stage.rollout.refill:
        return {}
    further = rolled.groups[len(rolled.groups) - rolled.refilled :]
    tokens = sum(t.num_sampled_tokens for group in further for t in group.trajectories)
    return {"refill/groups": float(rolled.refilled), "refill/tokens": float(tokens)}


def tool_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the attempts' time spent in tools; empty if no time was measured."""
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    whole = sum(one.seconds for one in attempts)
    return {"tool/seconds_share": sum(one.tool_seconds for one in attempts) / whole} if whole else {}


def agent_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How a step's agents ended, and the conversations of their attempts. A conversation is a branch if it begins with
    an earlier one, answers included, else it is a new one."""
    failed, _ = failed_agents(groups)
    found = [trajectory.conversations for group in groups for trajectory in group.trajectories]
    return {
        "agent/failed": failed,
        "agent/conversations": fmean([len(parts) for parts in found] or [0]),
        "agent/branches": fmean([sum(_is_branch(part, parts) for part in parts) for parts in found] or [0]),
    }


def _is_branch(part: Trajectory, parts: Sequence[Trajectory]) -> bool:
    answered = ((*each.prompt_ids, *each.turns[0].completion.token_ids) for each in parts if each.turns)
    return any(part.prompt_ids[: len(ids)] == ids for ids in answered)


def _by_age(
    version: int, groups: Sequence[Resampled], rows: Sequence[BatchRow]
) -> tuple[list[BatchRow], list[BatchRow]]:
    """Rows restricted to tokens that `version` wrote, and rows restricted to those of older weights. After an exchange
    of weights an engine computes from the new ones alone."""
    fresh: list[BatchRow] = []
    stale: list[BatchRow] = []
    for row in rows:
        number, place, part = row.origin
        conversation = groups[number].group.trajectories[place].conversations[part]
        completions = [turn.completion for turn in conversation.turns]
        spans = [s for c in completions for s in c.version_spans or (VersionSpan(version, len(c.token_ids)),)]
        if all(span.version == version for span in spans):
            fresh.append(row)
            continue
        old = chain.from_iterable(repeat(span.version != version, span.tokens) for span in spans)
        is_old = [mine and next(old, False) for mine in row.loss_mask]
        for some, masked in ((stale, is_old), (fresh, list(map(xor, row.loss_mask, is_old)))):
            if any(masked):
                some.append(replace(row, loss_mask=masked))
    return fresh, stale


def attempt_records(
    groups: Sequence[Resampled], rows: Sequence[BatchRow], *, policy_version: int
) -> list[AttemptRecord]:
    """One record per attempt, kept or not; rows: of those that were learnt from."""
    scored: dict[tuple[int, ...], list[BatchRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.origin.conversation):
        scored[row.origin[:2]].append(row)
    records = []
    for number, resampled in enumerate(groups):
        for choice in resampled.choices:
            trajectory = resampled.group.trajectories[choice.index]
            own = scored[number, choice.index]
            records.append(
                AttemptRecord(
                    problem=resampled.group.problem,
                    trajectory=trajectory,
                    choice=choice,
                    advantage=own[0].advantage if own else None,
                    policy_version=policy_version,
                    entropies=[value for row in own for value in row.entropies] if own else None,
                    old_logprobs=[value for row in own for value in row.old_logprobs] if own else None,
                )
            )
    return records


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def suspicion(groups: Sequence[Resampled], decode: Decode) -> dict[str, float]:
    """Shares among right attempts: `suspect/constant_print` (of those with calls), `suspect/unfounded_answer` and
    `suspect/several_boxes`; a share of no attempts is omitted."""
    right = list(islice((one for r in groups for one in r.group.trajectories if is_right(one)), SAMPLE))
    shares = {
        "suspect/constant_print": [prints_constants(attempt) for attempt in right if attempt.num_calls],
        "suspect/unfounded_answer": [is_unfounded(attempt, decode) for attempt in right],
        "suspect/several_boxes": [gives_several_answers(attempt, decode) for attempt in right],
    }
    return {name: fmean(found) for name, found in shares.items() if found}


def prints_constants(attempt: Trajectory) -> bool:
    """Whether none of its calls computes anything."""
    codes = [str(call.arguments.get("code", "")) for turn in attempt.turns for call in turn.calls]
    return all(CONSTANT.fullmatch(code) for code in codes)


def is_unfounded(attempt: Trajectory, decode: Decode) -> bool:
    """Whether its answer is neither in a tool's output nor in the text outside of boxes, or only with the other sign: a
    model learns to print 7-10 and to answer 3."""
    answer = attempt.outcome.extracted if attempt.outcome else None
    if not answer:
        return False
    bare = "".join(_without_boxes(decode(turn.completion.token_ids)) for turn in attempt.turns)
    shown = "\n".join(f"{result.stdout}\n{result.value or ''}" for result in attempt.results)
    if not any(_plain(answer) in _plain(text) for text in (bare, shown)):
        return True
    if not NUMBER.fullmatch(plain := _plain(answer)):
        return False
    numbers = {float(found) for found in NUMBER.findall(f"{bare}\n{shown}".replace(",", ""))}
    return float(plain) not in numbers and -float(plain) in numbers


def gives_several_answers(attempt: Trajectory, decode: Decode) -> bool:
    """Whether its last turn has boxes with texts other than its answer. A list of joined boxes is one answer."""
    text = decode(attempt.turns[-1].completion.token_ids)
    answer = boxed_answer(text) or ""
    return any(text[start:end].strip() not in answer for _, start, end in boxes(text))


def _without_boxes(text: str) -> str:
    pieces, end_of_last = [], 0
    for start, _, end in sorted(boxes(text)):
        pieces.append(text[end_of_last : max(start, end_of_last)])
        end_of_last = max(end_of_last, end + 1)
    return " ".join([*pieces, text[end_of_last:]])


def _plain(text: str) -> str:
    return re.sub(r"[\s,$]", "", text)


def engine_gap(rows: Sequence[BatchRow]) -> tuple[float, float]:
    """Mean and largest |old - sampled| logprob over policy tokens of scored rows, nats."""
    gaps = [
        abs(old - sampled)
        for row in rows
        for old, sampled, mine in zip(row.old_logprobs, row.sampled_logprobs, row.loss_mask, strict=True)
        if mine
    ]
    return (sum(gaps) / len(gaps), max(gaps)) if gaps else (0.0, 0.0)
