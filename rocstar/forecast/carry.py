"""Carry-over (`rollout.carry_over`) on planned attempts: what each step does, and how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.policies import OURS, scheduler
from rocstar.forecast.simulate import simulate, simulate_steps
from rocstar.forecast.workload import PlannedAttempt, TurnLengths
from rocstar.rollout.carry import grown, next_limit, too_many
from rocstar.rollout.kv_scheduler import KvScheduler


def step_seconds(attempts: Sequence[PlannedAttempt], share: float, engines: Mapping[str, EngineModel]) -> float:
    """Until a step's rollout ends, by rocstar's scheduler; with carry-over the mean of the middle of a stage of such
    steps."""
    if not share:
        return simulate(attempts, engines, KvScheduler()).makespan
    return fmean(simulate_carry_over([attempts] * 5, share, engines)[0][2:-1])


def simulate_carry_over(
    steps: Sequence[Sequence[PlannedAttempt]], share: float, engines: Mapping[str, EngineModel], policy: str = OURS
) -> tuple[list[float], float, float]:
    """The seconds of each step of a stage under a policy, and the shares that `carried_over` gives. The wait of
    attempts for a limit to grow, and repeated calls of a carried attempt's own tools, take no time here."""
    done, attempts, groups = carried_over(steps, share)
    makespans = [report.makespan for report in simulate_steps(done, engines, scheduler(policy, done))]
    return makespans, attempts, groups


def carried_over(
    steps: Sequence[Sequence[PlannedAttempt]], share: float
) -> tuple[list[list[PlannedAttempt]], float, float]:
    """What each step of the stage does, and the mean shares of a step's attempts and groups that are carried over; the
    first and the last step, which wait for all, are left out of these."""
    done: list[list[PlannedAttempt]] = []
    carried: list[PlannedAttempt] = []
    shares: list[tuple[float, float]] = []
    limit: int | None = None
    for number, attempts in enumerate(steps):
        allowed, groups = int(share * len(attempts)), len({attempt.group for attempt in attempts})
        end = None if number + 1 == len(steps) else limit
        while too_many(Counter(attempt.group for attempt in _beyond(attempts, end)), groups, allowed):
            end = grown(end or 0)
        aside = _beyond(attempts, end)
        done.append([*carried, *(part(attempt, 0, end) for attempt in attempts)])
        if end is not None:
            shares.append((len(aside) / len(attempts), len({attempt.group for attempt in aside}) / groups))
        carried = [part(attempt, end or 0, None) for attempt in aside]
        lengths = (attempt.sampled_tokens for attempt in attempts)
        limit = next_limit((n if end is None or n <= end else grown(end) for n in lengths), allowed)
    of_attempts, of_groups = zip(*shares or [(0.0, 0.0)], strict=True)
    return done, fmean(of_attempts), fmean(of_groups)


def _beyond(attempts: Sequence[PlannedAttempt], end: int | None) -> list[PlannedAttempt]:
    return [attempt for attempt in attempts if end is not None and attempt.sampled_tokens > end]


def part(attempt: PlannedAttempt, begin: int, end: int | None) -> PlannedAttempt:
    """Of an attempt, what it samples from its token `begin` to `end`; what came before is its prompt."""
    context, done = attempt.prompt_tokens, 0
    turns: list[TurnLengths] = []
    for turn in attempt.turns:
        first, done = done, done + turn.sampled_tokens
        if done <= begin:
            context += turn.sampled_tokens + turn.reply_tokens
            continue
        if first < begin:
            context += begin - first
        if end is not None and done >= end:
            turns.append(TurnLengths(end - max(first, begin), 0, 0.0))
            break
        turns.append(turn._replace(sampled_tokens=done - max(first, begin)))
    limit = attempt.limit + attempt.prompt_tokens - context
    if end is not None:
        limit = min(limit, end - begin + sum(turn.reply_tokens for turn in turns))
    group = f"{attempt.group}/{context}" if begin else attempt.group
    return PlannedAttempt(group=group, prompt_tokens=context, turns=tuple(turns), limit=limit)
