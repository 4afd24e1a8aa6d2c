"""RoC (Resample on Correct) and its rivals: which siblings of a group are trained on, and why.

All METHODS first set aside siblings that cannot be compared, then drop the whole group when fewer than two are left, or
when the rewards of all, or of the chosen ones, are equal. The paper names only perfect groups here; the release drops
both kinds, and so do we. Groups that are left with no more than G are kept whole (the release drops those under G).

Not here: the penalties themselves (`quality.py`), and cutting groups to suit learner ranks, as the release does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rocstar.config.sections import ResampleSection
from rocstar.errors import ConfigError
from rocstar.learning.quality import has_void_turn, penalty
from rocstar.protocols import Resampler
from rocstar.support.plugins import check_call, named, own_code
from rocstar.types import (
    RIGHT_ABOVE,
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
    Stop,
    Trajectory,
    Turn,
    Verdict,
    seed_for,
)

PENALTY_FLOOR = 0.01
"""Added to a penalty before it is inverted, because the paper does not define 1/0. It is well below the smallest
penalties that occur (1/15), so the draw stays close to the paper's inverse (docs/roc.md)."""

KEPT = frozenset(reason for reason in Reason if reason.startswith("kept."))
"""Reasons of kept siblings."""
NEGATIVE = (Reason.DROPPED_NEGATIVE, Reason.KEPT_NEGATIVE)

Fate = tuple[Reason, float]
"""The decision about one sibling, and the weight of its draw (0 if there was none)."""

Choose = Callable[[Sequence[bool], Sequence[float], random.Random], list[Fate]]
"""(which are successes [n], total penalties [n], rng) -> fates [n], for n comparable siblings with unequal rewards."""


def seed_of_choice(run_seed: int, step: int, problem_id: str) -> int:
    """The seed of the rng by which a step chooses among a problem's siblings; the run's page repeats the choice."""
    return seed_for(seed_for(run_seed, "step", step), "resample", problem_id)


def draw_weight(total_penalty: float) -> float:
    """Relative probability of drawing a success; penalty 0 to 2 gives 100 to 0.5. Source: paper §2.2.3, floor ours."""
    return 1.0 / (total_penalty + PENALTY_FLOOR)


def select(
    rewards: Sequence[float],
    penalties: Sequence[float],
    keep: int,
    rng: random.Random,
    *,
    success_above: float = RIGHT_ABOVE,
) -> tuple[tuple[int, ...], tuple[Reason, ...]]:
    """RoC in the paper's form on plain numbers, for trainers that do not share our types.

    `rewards` and `penalties` (p_total) are [n], siblings of one problem; a reward above `success_above` is a success.
    Returns the kept indices in rising order and one reason for each sibling. Nothing is kept when n < 2 or all rewards
    are equal, drawn or kept. Raises ValueError when the lengths differ, a reward is not finite, a penalty is negative
    or not finite, or `keep` is not a whole number of 2 or more, and TypeError for rewards that are not numbers."""
    rewards, penalties = list(map(_plain, rewards)), list(map(_plain, penalties))
    if len(rewards) != len(penalties):
        raise ValueError(f"rewards and penalties must pair up, got {len(rewards)} and {len(penalties)}")
    for index, (reward, total) in enumerate(zip(rewards, penalties, strict=True)):
        if not (math.isfinite(reward) and math.isfinite(total) and total >= 0):
            numbers = f"attempt {index} has reward {reward} and penalty {total}"
            raise ValueError(f"{numbers}; give finite numbers, the penalty 0 or more")
    right = [reward > success_above for reward in rewards]
    if not isinstance(keep, int) or keep < 2:
        raise ValueError(f"keep is {keep}, but siblings are compared with each other; keep a whole number, at least 2")
    fates = _fates(rewards, right, penalties, rng, partial(_choose, settings=ResampleSection(keep=keep)))
    kept = tuple(index for index, (reason, _) in enumerate(fates) if reason in KEPT)
    return kept, tuple(reason for reason, _ in fates)


def _plain(number: float) -> float:
    """As a float; tensor elements would not compare as equal in a set. Raises TypeError for text."""
    if isinstance(number, str):
        raise TypeError(f"{number!r} is text; give a number")
    return float(number)


def roc(right: Sequence[bool], penalties: Sequence[float], rng: random.Random, settings: ResampleSection) -> list[Fate]:
    """RoC as the paper defines it (§2.2.3), with these decisions where the paper leaves a choice.

    - Negatives keep floor(n_neg * G / n), which is the paper's floor(n_neg / 2) when n = 2G, drawn uniformly; but at
      least `failure_floor` where there are as many. Positives take the rest, so exactly G are kept even when both
      counts are odd. At least one positive is then always kept too. With a floor of 0, as in the paper, a single
      failure among 2G is never kept, and the group has no signal.
    - Positives are drawn one after the other without replacement, each time with probability proportional to
      1 / (p_total + 0.01) among those that remain; see PENALTY_FLOOR for the 0.01."""
    positives, negatives = _split(right)
    quota = negatives_kept(len(negatives), len(right), settings)
    kept = set(rng.sample(negatives, quota))
    # The `count` earliest of independent exponential clocks with these rates are a sequential weighted draw.
    clocks = {index: rng.expovariate(draw_weight(penalties[index])) for index in positives}
    kept.update(sorted(positives, key=clocks.__getitem__)[: settings.keep - quota])
    drawn = (Reason.DROPPED_QUALITY, Reason.KEPT_QUALITY)
    return [
        (drawn[index in kept], draw_weight(penalties[index])) if success else (NEGATIVE[index in kept], 1.0)
        for index, success in enumerate(right)
    ]


def negatives_kept(negatives: int, siblings: int, settings: ResampleSection) -> int:
    """How many failures `roc` keeps, of `negatives` among `siblings` > G."""
    return max(negatives * settings.keep // siblings, min(settings.failure_floor, negatives))


def roc_release(
    right: Sequence[bool], penalties: Sequence[float], rng: random.Random, settings: ResampleSection
) -> list[Fate]:
    """RoC as released: successes with the lowest penalty, ties in order; the first failures in order, which for
    independent attempts is a uniform draw (before the fix of issue 49 the release sorted failures too). No draw."""
    positives, negatives = _split(right)
    positive_quota, negative_quota = release_quotas(len(positives), len(negatives), settings)
    kept = {*sorted(positives, key=penalties.__getitem__)[:positive_quota], *negatives[:negative_quota]}
    lowest = (Reason.DROPPED_HIGHER_PENALTY, Reason.KEPT_LOWEST_PENALTY)
    return [((lowest if success else NEGATIVE)[index in kept], 0.0) for index, success in enumerate(right)]


def release_quotas(positives: int, negatives: int, settings: ResampleSection) -> tuple[int, int]:
    """(successes, failures) that `roc_release` keeps of a group larger than G; they add up to G.

    They are proportional, rounded half to even, with a minimum of each class. Where those roundings do not add up to G
    (14 to 7, 30 to 15) the release fails an assertion; here positives take the rest."""
    total = positives + negatives
    kept_negatives, kept_positives = (round(count * settings.keep / total) for count in (negatives, positives))
    if kept_negatives <= (least := min(settings.min_negative, negatives)):
        kept_negatives, kept_positives = least, settings.keep - least
    if kept_positives <= (least := min(settings.min_positive, positives)):
        kept_negatives = settings.keep - least
    return settings.keep - kept_negatives, kept_negatives


def uniform(
    right: Sequence[bool], penalties: Sequence[float], rng: random.Random, settings: ResampleSection
) -> list[Fate]:
    """G siblings at random, ignoring reward and penalty: a control with RoC's cost but not its choice. From 2G it has
    the same distribution as plain GRPO with G attempts."""
    kept = set(rng.sample(range(len(right)), settings.keep))
    return [((Reason.DROPPED_UNIFORM, Reason.KEPT_UNIFORM)[index in kept], 1.0) for index in range(len(right))]


def keep_all(
    right: Sequence[bool], penalties: Sequence[float], rng: random.Random, settings: ResampleSection
) -> list[Fate]:
    """Plain GRPO: every comparable sibling of a group with unequal rewards."""
    return [(Reason.KEPT_ALL, 0.0)] * len(right)


METHODS = {"roc": roc, "roc_release": roc_release, "uniform": uniform, "all": keep_all}
"""By their names in a recipe, for more than G siblings; tests/contracts/test_resampler.py runs over them."""


def _choose(
    right: Sequence[bool], penalties: Sequence[float], rng: random.Random, settings: ResampleSection
) -> list[Fate]:
    method = METHODS[settings.method] if len(right) > settings.keep else keep_all
    return method(right, penalties, rng, settings)


def resample(
    group: Group, rng: random.Random, settings: ResampleSection, penalties: Sequence[Penalty] | None = None
) -> Resampled:
    """Resample by a method of METHODS. penalties: of all siblings, where they are known."""
    return resampled(group, rng, partial(_choose, settings=settings), settings, penalties)


def resampler_of(settings: ResampleSection, folders: Sequence[Path | str] = ()) -> Resampler:
    """The resampler that `resample.method` names. folders: where the user's modules are. Raises ConfigError if it does
    not exist, or if a user's own resampler returns something else: checked now on a made-up group, later on those of
    each step."""
    if settings.method in METHODS:
        return partial(resample, settings=settings)
    make: Callable[..., Any] = named(
        settings.method, METHODS, setting="resample.method", takes=("settings",), folders=folders
    )
    setting = f"resample.method = {settings.method!r}"
    with own_code(f"{setting} failed on its settings", make):
        own = make(settings)
    if not callable(own):
        raise ConfigError(f"{setting} returned {own!r} for the settings; let it return a function of (group, rng)")
    check_call(own, ("group", "rng"), said=f"what {setting} makes")

    def checked(group: Group, rng: random.Random) -> Resampled:
        attempts = group.trajectories
        with own_code(f"{setting} failed on a group of {len(attempts)} attempts", make):
            result = own(group, rng)
            if not (isinstance(result, Resampled) and result.group is group and isinstance(result.choices, Sequence)):
                kind = type(result).__name__
                raise ConfigError(f"{setting} returned {kind}; return Resampled(group=group, choices=(...))")
            if len(result.choices) != len(attempts) or len(result.kept) > settings.keep:
                raise ConfigError(
                    f"{setting} returned {len(result.choices)} choices for {len(attempts)} attempts and kept "
                    f"{len(result.kept)}; return one for each, in order, and keep at most resample.keep {settings.keep}"
                )
            for place, choice in enumerate(result.choices):
                if choice.index != place or not _fits(choice) or (choice.kept and _unusable(attempts[place], settings)):
                    raise ConfigError(
                        f"{setting} returned {choice} for attempt {place}; let kept be a bool as the Reason implies, "
                        "the Penalty finite and the weight 0 or more, and keep no attempt without a verdict"
                    )
        return result

    for each in (2, settings.keep):
        checked(_made_up(each), random.Random(0))
    return checked


def _fits(choice: Choice) -> bool:
    """Whether a choice of the user's own resampler has valid fields."""
    reasoned = isinstance(choice.reason, Reason) and choice.kept is (choice.reason in KEPT)
    plain = isinstance(choice.penalty, Penalty) and isinstance(choice.weight, int | float)
    return reasoned and plain and math.isfinite(choice.penalty.total) and 0 <= choice.weight < math.inf


def _made_up(each: int) -> Group:
    """`each` right and `each` wrong attempts, and one that failed by our fault, to try a resampler on."""
    turn = Turn(completion=Completion(token_ids=(1,), logprobs=(0.0,), finish=Finish.STOP))
    right = Outcome(verdict=Verdict.RIGHT, reward=1.0, extracted="1", method="made up", format_facts=FormatFacts())
    wrong = replace(right, verdict=Verdict.WRONG, reward=0.0)
    one = Trajectory(problem_id="", index=0, prompt_ids=(0,), turns=(turn,), stop=Stop.ANSWERED, outcome=right)
    judged = (replace(one, index=place, outcome=outcome) for place, outcome in enumerate((right, wrong) * each))
    attempts = *judged, replace(one, index=2 * each, outcome=None, stop=Stop.ENVIRONMENT_FAILED, fault="made up")
    return Group(problem=Problem(id="", question="made up", answer="1"), trajectories=attempts)


def resampled(
    group: Group,
    rng: random.Random,
    choose: Choose,
    settings: ResampleSection,
    penalties: Sequence[Penalty] | None = None,
) -> Resampled:
    """Run `choose` on the comparable siblings and return the choices of all, in the group's order. A group whose
    comparable or chosen siblings all have the same reward is dropped. penalties: as for `resample`."""
    found = penalties or [penalty(trajectory, settings) for trajectory in group.trajectories]
    unusable = [_unusable(trajectory, settings) for trajectory in group.trajectories]
    usable = [index for index, reason in enumerate(unusable) if reason is None]
    outcomes = [outcome for index in usable if (outcome := group.trajectories[index].outcome)]
    rewards, right = [o.reward for o in outcomes], [o.verdict is Verdict.RIGHT for o in outcomes]
    chosen = iter(_fates(rewards, right, [found[index].total for index in usable], rng, choose))
    fates = [(reason, 0.0) if reason else next(chosen) for reason in unusable]
    choices = (
        Choice(index=index, kept=reason in KEPT, reason=reason, penalty=found[index], weight=weight)
        for index, (reason, weight) in enumerate(fates)
    )
    return Resampled(group=group, choices=tuple(choices))


def _fates(
    rewards: Sequence[float], right: Sequence[bool], penalties: Sequence[float], rng: random.Random, choose: Choose
) -> list[Fate]:
    """Choose only if rewards are unequal, and drop the group if those of the chosen ones are equal."""
    dropped = Reason.DROPPED_TOO_FEW if len(rewards) < 2 else Reason.DROPPED_EQUAL_REWARDS
    if len(set(rewards)) < 2:
        return [(dropped, 0.0)] * len(rewards)
    fates = choose(right, penalties, rng)
    if len(fates) != len(right):
        raise ValueError(f"chose {len(fates)} fates for {len(right)} attempts")
    if len({reward for reward, (reason, _) in zip(rewards, fates, strict=True) if reason in KEPT}) < 2:
        return [(dropped, 0.0)] * len(rewards)
    return fates


def _unusable(trajectory: Trajectory, settings: ResampleSection) -> Reason | None:
    """Why a sibling has no reward to compare; None when it has one."""
    if settings.drop_truncated and trajectory.stop is Stop.MAX_TOKENS:
        return Reason.DROPPED_TRUNCATED
    if trajectory.stop is Stop.ENVIRONMENT_FAILED:
        return Reason.DROPPED_ENVIRONMENT
    if trajectory.outcome is None or trajectory.outcome.verdict is Verdict.UNDECIDED:
        return Reason.DROPPED_UNDECIDED
    return Reason.DROPPED_VOID_TURN if settings.drop_void_turns and has_void_turn(trajectory) else None


def _split(right: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Indices of successes and of failures, in order."""
    positives = [index for index, success in enumerate(right) if success]
    return positives, [index for index, success in enumerate(right) if not success]
