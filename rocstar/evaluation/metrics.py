"""Evaluation figures with their uncertainty: avg@k, pass@k, maj@k, and one summary.

Every judged attempt counts, and one that the verifier left UNDECIDED is not right: only attempts ended by a service
failure are excluded. Attempts at one problem are not independent, so every 95% interval treats the problem as the unit:
n is problems, never attempts. None includes the seed variance of training.

Not here: intervals (intervals.py), running attempts, verifying them, saving and printing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb
from statistics import fmean

from rocstar.answers.grade import AT_ONCE
from rocstar.answers.wording import clean
from rocstar.evaluation.intervals import Estimate, mean_over_problems
from rocstar.types import Group, Stop, Trajectory, Verdict

UNFIT = re.compile(r"[^\w-]|^$")  # in the name of a part: MLflow refuses it, or takes it for a path's


def is_right(attempt: Trajectory) -> bool:
    """The only definition of a right attempt, for all figures."""
    return attempt.outcome is not None and attempt.outcome.verdict is Verdict.RIGHT


def is_solved(group: Group) -> bool:
    """Whether every attempt is right."""
    return all(map(is_right, group.trajectories))


def is_judged(attempt: Trajectory) -> bool:
    """Whether it counts in the figures: no service failure ended it."""
    return attempt.outcome is not None and attempt.stop is not Stop.ENVIRONMENT_FAILED


def avg_at_k(right_PR: Sequence[Sequence[bool]]) -> Estimate:
    """Mean over problems of the share of right attempts. Problems without a judged attempt are omitted.

    Its interval is clustered by problem: `mean_over_problems`."""
    return mean_over_problems([fmean(right) for right in right_PR if right])


def pass_at_k(right_PR: Sequence[Sequence[bool]], k: int) -> Estimate:
    """Chance that at least one of k attempts is right: 1 - C(n - c, k) / C(n, k) for c right of n, mean over problems.

    Unbiased for n >= k (Chen et al. 2021, arXiv 2107.03374). A problem with fewer judged attempts than k counts with
    those it has, which can only underestimate. Interval as in `avg_at_k`. Raises ValueError when k < 1, or when no
    problem of a non-empty set has k attempts."""
    most = max((len(right) for right in right_PR), default=0)
    if k < 1 or 0 < most < k:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} attempts per problem, got at most {most}")
    tries = [(len(right), sum(right), min(k, len(right))) for right in right_PR if right]
    return mean_over_problems([1.0 - comb(n - right, some) / comb(n, some) for n, right, some in tries])


Vote = tuple[str | None, bool]
"""(extracted answer, whether the attempt is right)."""


def maj_at_k(votes_PR: Sequence[Sequence[Vote]]) -> Estimate | None:
    """Share of problems whose most frequent answer is right; None if a right attempt has no answer, because its judge
    (a reward function, instructions) uses no answer, so there is nothing to vote on.

    All right answers are one candidate, however they are spelled, and so are wrong ones that the fast graders consider
    equal, such as `1` and `1.0`. Attempts without an answer do not vote; among candidates tied for first the credit is
    shared. Interval as in `avg_at_k`."""
    if any(right and answer is None for votes in votes_PR for answer, right in votes):
        return None
    return mean_over_problems([_majority_credit(votes) for votes in votes_PR if votes])


def votes_PR(groups: Sequence[Group]) -> list[list[Vote]]:
    """The votes for `maj_at_k`."""
    return [
        [(a.outcome.extracted, is_right(a)) for a in group.trajectories if a.outcome is not None and is_judged(a)]
        for group in groups
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """The figures of one evaluation. Shares are over judged attempts, None if there are none."""

    problems: int
    """Problems posed, judged or not."""
    attempts: int
    """Attempts made, judged or not."""
    avg_at_k: Estimate
    pass_at_k: Estimate
    undecided: int
    """Attempts that the verifier left undecided; they count as not right."""
    environment_failed: int
    """Attempts ended by a service failure; in no denominator."""
    mean_response_tokens: float | None
    """Tokens after the prompt, tool replies included."""
    calls_per_attempt: float | None
    failed_call_share: float | None
    """Failed calls / calls."""
    tool_error_share_in_correct: float | None
    """Right attempts with at least one failed call / right attempts."""
    failed_call_share_in_correct: float | None
    """Failed calls / calls of right attempts (paper, Fig. 4)."""
    no_tool_share: float | None
    """Attempts without any call, answered or not: an agent's own tools answer it alone."""
    truncation_share: float | None
    """Attempts cut by the token limit (the paper's clipping ratio)."""
    no_room_share: float | None
    """Attempts whose prompt alone fills the engine's positions: they count as wrong and as cut."""
    out_of_turns_share: float | None
    """Attempts cut by the turn limit."""
    agent_failed_share: float | None
    """Attempts whose agent ended with an error or out of time; None without agents."""
    accuracy_by_source: Mapping[str, Estimate]


def summarise(groups: Sequence[Group], k: int) -> EvalSummary:
    """All figures of one evaluation with k attempts per problem: every problem with its verified attempts, faults and
    undecided ones included. Raises ValueError when k < 1."""
    every = [attempt for group in groups for attempt in group.trajectories]
    judged = [attempt for attempt in every if is_judged(attempt)]
    right = [attempt for attempt in judged if is_right(attempt)]
    right_PR = _right_PR(groups)

    def mean(number: Callable[[Trajectory], int], attempts: Sequence[Trajectory] = judged) -> float | None:
        return sum(map(number, attempts)) / len(attempts) if attempts else None

    return EvalSummary(
        problems=len(groups),
        attempts=len(every),
        avg_at_k=avg_at_k(right_PR),
        pass_at_k=pass_at_k(right_PR, min(k, max(map(len, right_PR), default=k) or k)),
        undecided=sum(a.outcome is not None and a.outcome.verdict is Verdict.UNDECIDED for a in judged),
        environment_failed=len(every) - len(judged),
        mean_response_tokens=mean(lambda a: a.num_response_tokens),
        calls_per_attempt=mean(lambda a: a.num_calls),
        failed_call_share=_failed_share(judged),
        tool_error_share_in_correct=mean(lambda a: a.num_failed_calls > 0, right),
        failed_call_share_in_correct=_failed_share(right),
        no_tool_share=mean(lambda a: not any(turn.calls or turn.results for turn in a.turns)),
        truncation_share=mean(lambda a: a.stop is Stop.MAX_TOKENS),
        no_room_share=mean(lambda a: a.stop is Stop.MAX_TOKENS and a.num_sampled_tokens == 0),
        out_of_turns_share=mean(lambda a: a.stop is Stop.MAX_TURNS),
        agent_failed_share=mean(lambda a: a.stop in (Stop.AGENT_FAILED, Stop.AGENT_TIMEOUT)) or None,
        accuracy_by_source=accuracy_by_source(groups),
    )


def accuracy_by_source(groups: Sequence[Group]) -> dict[str, Estimate]:
    """avg@k for each `metadata["family"]`, or source for a problem without a family, in their order."""
    parts: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        parts[str(group.problem.metadata.get("family") or group.problem.source or "all")].append(group)
    return {name: avg_at_k(_right_PR(part)) for name, part in sorted(parts.items())}


def means_of_parts(parts_PR: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float | None]:
    """Mean of each part of the rewards, taken as that of the rewards, of the attempts that have it."""
    values: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in parts_PR])
    for place, some in enumerate(parts_PR):
        for name, value in chain.from_iterable(parts.items() for parts in some):
            values[name][place].append(value)
    found, clashes = dict[str, float | None](), Counter[str]()
    for name in sorted(values, key=lambda name: (UNFIT.search(name) is not None, name)):
        fit = f"reward/parts/{UNFIT.sub('_', name)}"
        metric = fit + "_" * clashes[fit]
        while metric in found:
            metric += "_"
        clashes[fit] = len(metric) - len(fit) + 1
        found[metric] = over_problems(values[name])
    return found


def over_problems(values_PR: Sequence[Sequence[float]]) -> float | None:
    """Mean over problems of the mean over attempts."""
    means = [fmean(values) for values in values_PR if values]
    return fmean(means) if means else None


def _right_PR(groups: Sequence[Group]) -> list[list[bool]]:
    """Whether each judged attempt is right."""
    return [[is_right(a) for a in group.trajectories if is_judged(a)] for group in groups]


def _failed_share(attempts: Sequence[Trajectory]) -> float | None:
    """Failed calls / calls."""
    calls = sum(attempt.num_calls for attempt in attempts)
    return sum(attempt.num_failed_calls for attempt in attempts) / calls if calls else None


def _majority_credit(votes: Sequence[Vote]) -> float:
    counts = Counter(answer.strip() for answer, _ in votes if answer is not None)
    right = {answer.strip() for answer, right in votes if answer is not None and right}
    for_right = sum(counts.pop(answer) for answer in right)
    candidates = [for_right, *(sum(counts[answer] for answer in same) for same in _alike(list(counts)))]
    return 1 / candidates.count(for_right) if for_right == max(candidates) > 0 else 0.0


def _alike(answers: Sequence[str]) -> list[list[str]]:
    """Groups of answers: each equals another of its group; independent of their order."""
    groups: list[list[str]] = []
    for answer in answers:
        same = [group for group in groups if any(_is_same(answer, other) for other in group)]
        groups = [*(group for group in groups if group not in same), [answer, *chain.from_iterable(same)]]
    return groups


def _is_same(a: str, b: str) -> bool:
    """Whether a fast grader considers them equal, whichever is the reference."""
    one, other = clean(a), clean(b)
    results = (grader(*pair) for pair in ((one, other), (other, one)) for grader in AT_ONCE.values())
    return any(found is not None and found[0] is Verdict.RIGHT for found in results)
