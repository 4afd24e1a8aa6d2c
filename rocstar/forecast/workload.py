"""What a simulated step has to do: the lengths and tool waits of its attempts, drawn or given. No text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from rocstar.errors import DataError
from rocstar.types import seed_for

TOOL_CALLS = 2.7  # per attempt on average: 45K calls for 512 x 32 attempts (paper, 3.1)
MOST_CALLS = 9  # ten turns
TOOL_SECONDS = 0.3  # mean of the exponential wait (paper, table of the code service)
PROMPT_TOKENS = (150, 600)  # evenly drawn; a competition problem with the system prompt and the tool's description


class TurnLengths(NamedTuple):
    sampled_tokens: int
    reply_tokens: int
    """Appended after the tool has answered; 0 in the last turn."""
    tool_seconds: float
    """Between the end of the completion and the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttempt:
    """What one attempt will turn out to be. Only the simulator and a clairvoyant scheduler look at it."""

    group: str
    """Siblings share it, and their prompt."""
    prompt_tokens: int
    turns: tuple[TurnLengths, ...]
    limit: int
    """Most tokens after the prompt, replies included."""

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def response_tokens(self) -> int:
        return sum(turn.sampled_tokens + turn.reply_tokens for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Prompt and response, at the end."""
        return self.prompt_tokens + self.response_tokens


Draw = tuple[Callable[[random.Random], float], Callable[[random.Random, float], float]]
"""Draws the length of a response as a share of the limit: first what siblings have in common, then each one's."""


def _log_normal(problem_spread: float, attempt_spread: float) -> Draw:
    return (
        lambda rng: 0.4 * math.exp(rng.gauss(0.0, problem_spread)),
        lambda rng, centre: centre * math.exp(rng.gauss(0.0, attempt_spread)),
    )


def _easy_or_hard(rng: random.Random, difficulty: float) -> float:
    """Easy attempts end early; a hard problem's often run into the limit."""
    hard = rng.random() < difficulty
    return rng.lognormvariate(math.log(0.9), 0.3) if hard else rng.lognormvariate(math.log(0.2), 0.5)


DISTRIBUTIONS: Mapping[str, Draw] = {
    "even": _log_normal(0.5, 0.4),
    "spread": _log_normal(0.8, 0.5),
    "easy-or-hard": (lambda rng: rng.betavariate(0.5, 1.0), _easy_or_hard),
    "alike": (lambda rng: 0.4, lambda rng, centre: rng.gammavariate(2.0, centre / 2.0)),
    "pareto": (lambda rng: 0.04 * math.exp(rng.gauss(0.0, 0.3)), lambda rng, centre: centre * rng.paretovariate(1.1)),
    "run-on": (
        lambda rng: 0.1 * math.exp(rng.gauss(0.0, 0.5)),
        lambda rng, centre: 1.0 if rng.random() < 0.03 else centre * math.exp(rng.gauss(0.0, 0.4)),
    ),
    "two-kinds": (
        lambda rng: rng.betavariate(0.5, 2.0),
        lambda rng, hard: rng.lognormvariate(math.log(0.8 if rng.random() < hard else 0.06), 0.2),
    ),
    "uniform": (lambda rng: 1.0, lambda rng, most: rng.uniform(0.02, most)),
}
"""`even` and `spread`: log-normal with a spread between problems and one between siblings. `easy-or-hard`: two kinds of
attempts, mixed per problem. `alike`: gamma lengths where siblings say nothing about one another. `pareto` and `run-on`:
a heavy tail, where 3% of all attempts reach the limit; most of the others are short.
`two-kinds`: very short and long, mixed per problem. `uniform`: nothing is typical."""


def synthetic_workload(
    distribution: str, *, problems: int, attempts: int, limit: int, seed: int, tool_seconds: float = TOOL_SECONDS
) -> list[PlannedAttempt]:
    """Siblings stand together, as a step asks for them. Raises DataError for an unknown distribution."""
    if distribution not in DISTRIBUTIONS:
        raise DataError(f"there is no length distribution {distribution!r}; choose of {', '.join(DISTRIBUTIONS)}")
    common, own = DISTRIBUTIONS[distribution]
    found = []
    for problem in range(problems):
        group = f"{seed}/{problem}"
        rng = random.Random(seed_for(distribution, group))
        centre, prompt = common(rng), rng.randint(*PROMPT_TOKENS)
        for _ in range(attempts):
            length = min(limit, max(1, round(own(rng, centre) * limit)))
            turns = _turns(rng, length, tool_seconds)
            found.append(PlannedAttempt(group=group, prompt_tokens=prompt, turns=turns, limit=limit))
    return found


def _turns(rng: random.Random, length: int, tool_seconds: float) -> tuple[TurnLengths, ...]:
    """`length` tokens cut at random places into sampled parts and replies."""
    calls = min(MOST_CALLS, _poisson(rng, TOOL_CALLS))
    replies = [round(rng.lognormvariate(math.log(60), 0.7)) for _ in range(calls)]
    sampled = length - sum(replies)
    if calls == 0 or sampled <= calls + 1:
        return (TurnLengths(length, 0, 0.0),)
    cuts = sorted(rng.sample(range(1, sampled), calls))
    parts = [after - before for before, after in pairwise([0, *cuts, sampled])]
    waits = [rng.expovariate(1.0 / tool_seconds) if tool_seconds else 0.0 for _ in replies]
    return tuple(map(TurnLengths, parts, [*replies, 0], [*waits, 0.0]))


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's product of uniforms; fine for a small mean."""
    count, product, floor = 0, rng.random(), math.exp(-mean)
    while product > floor:
        count, product = count + 1, product * rng.random()
    return count


def scaled(attempts: Iterable[PlannedAttempt], responses: float, rest: float = 1.0) -> list[PlannedAttempt]:
    """Every turn and reply `responses` times as long, prompts and limits `rest` times; the waits kept. A turn samples a
    token at least, and a limit holds its attempt."""

    def turn(lengths: TurnLengths) -> TurnLengths:
        sampled, reply = (round(tokens * responses) for tokens in lengths[:2])
        return TurnLengths(max(1, sampled), reply, lengths.tool_seconds)

    found = []
    for attempt in attempts:
        turns = tuple(map(turn, attempt.turns))
        limit = max(round(attempt.limit * rest), sum(each.sampled_tokens + each.reply_tokens for each in turns))
        prompt = max(1, round(attempt.prompt_tokens * rest))
        found.append(PlannedAttempt(group=attempt.group, prompt_tokens=prompt, turns=turns, limit=limit))
    return found


def with_mean(attempts: Sequence[PlannedAttempt], mean: float, prompt_tokens: float) -> list[PlannedAttempt]:
    """Attempts scaled so that responses have this mean and prompts that one; no response exceeds its limit, so where
    the mean is near it many are cut there."""
    prompts = prompt_tokens / fmean(attempt.prompt_tokens for attempt in attempts)
    lengths = [(attempt.limit, attempt.response_tokens) for attempt in attempts]
    low, high = 0.0, max(limit / tokens for limit, tokens in lengths)
    for _ in range(30):
        factor = (low + high) / 2
        reached = fmean([min(limit, factor * tokens) for limit, tokens in lengths])
        low, high = (factor, high) if reached < mean else (low, factor)
    return [_cut(attempt, min(high, attempt.limit / attempt.response_tokens), prompts) for attempt in attempts]


def _cut(attempt: PlannedAttempt, factor: float, prompts: float) -> PlannedAttempt:
    """`scaled`, its limit kept."""
    (found,) = scaled([attempt], factor)
    return replace(found, prompt_tokens=max(1, round(prompts * attempt.prompt_tokens)))


def shrunk(attempts: Iterable[PlannedAttempt], divisor: float) -> list[PlannedAttempt]:
    """The same shape for a small engine."""
    return scaled(attempts, 1 / divisor, 1 / divisor)
