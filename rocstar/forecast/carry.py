"""Carry-over (`rollout.carry_over`) on planned attempts: what each step does, so that it can be simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.simulate import simulate_steps
from rocstar.forecast.workload import PlannedAttempt, TurnLengths
from rocstar.rollout.carry import grown, next_limit
from rocstar.rollout.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedStep:
    """What a step with carry-over does."""

    phases: list[list[PlannedAttempt]]
    """One after another: what is carried in and what is drawn, then those set aside as often as the limit grows."""
    carried: int
    """Attempts that go on in the next step."""
    groups: int
    """Groups that are learned from in the next step."""


def carried_over(steps: Sequence[Sequence[PlannedAttempt]], share: float) -> list[CarriedStep]:
    """What the steps of a stage do with `rollout.carry_over`. The first and the last one wait for all."""
    found: list[CarriedStep] = []
    carried: list[PlannedAttempt] = []
    limit: int | None = None
    for attempts in steps:
        last, allowed = attempts is steps[-1], int(share * len(attempts))
        begin, phases, open_ = 0, [carried], list(attempts)
        while open_:
            end = None if last else limit
            phases[-1] = [*phases[-1], *(part(attempt, begin, end) for attempt in open_)]
            open_ = [attempt for attempt in open_ if end is not None and _sampled(attempt) > end]
            groups = {attempt.group for attempt in open_}
            if len(open_) <= allowed and groups < {attempt.group for attempt in attempts}:
                break
            assert end is not None
            begin, limit = end, grown(end)
            phases.append([])
        carried = [part(attempt, limit or 0, None) for attempt in open_]
        found.append(CarriedStep(phases=phases, carried=len(open_), groups=len(groups)))
        seen = (_sampled(attempt) if attempt not in open_ else grown(limit or 0) for attempt in attempts)
        limit = next_limit(seen, allowed)
    return found


def _sampled(attempt: PlannedAttempt) -> int:
    return sum(turn.sampled_tokens for turn in attempt.turns)


def part(attempt: PlannedAttempt, begin: int, end: int | None) -> PlannedAttempt:
    """Of an attempt, what it samples from its token `begin` to `end`; what came before is its prompt."""
    context, done = attempt.prompt_tokens, 0
    turns: list[TurnLengths] = []
    for turn in attempt.turns:
        first, done = done, done + turn.sampled_tokens
        if done <= begin:
            context += turn.sampled_tokens + turn.reply_tokens
            continue
        if not turns:
            context += max(0, begin - first)
        tokens = min(done, done if end is None else end) - max(first, begin)
        if end is not None and done >= end:
            turns.append(TurnLengths(tokens, 0, 0.0))
            break
        turns.append(turn._replace(sampled_tokens=tokens))
    limit = attempt.limit + attempt.prompt_tokens - context
    if end is not None:
        limit = min(limit, end - begin + sum(turn.reply_tokens for turn in attempt.turns))
    group = f"{attempt.group}/{context}" if begin else attempt.group
    return PlannedAttempt(group=group, prompt_tokens=context, turns=tuple(turns), limit=limit)
