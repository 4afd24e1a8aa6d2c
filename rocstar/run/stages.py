"""Rules that end a stage early by its own metrics: pure functions of rows of metrics.jsonl, and window means, which
alarms use too.

The paper changed stages by hand (§4.3): from 1 to 2 when the share of truncated attempts was stable near 10% and the
reward flat, from 2 to 3 when over 70% of the groups were solved by every attempt, and it stopped when the reward had
saturated and began to fall. The rules here express the same in numbers; a budget of tokens can end a stage too. Their
form is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rocstar.config.sections import EndSection, RlStage
from rocstar.support.screen import plural

Row = Mapping[str, float | None]
"""Metrics of one step."""
REWARD, TRUNCATED, SOLVED, SAMPLED = "reward/mean", "len/truncated", "group/solved_share", "step/tokens"


def why_over(rule: EndSection, rows: Sequence[Row]) -> str | None:
    """Why a stage with these steps is over; None while it continues. rows: its metrics, one a step."""
    return _spent(rule, rows) or _saturated(rule, rows) or _declined(rule, rows) or _flat(rule, rows)


def early_ends(stages: Sequence[RlStage]) -> Iterator[str]:
    """Describes rules that cannot end their stage, which may be given more steps later."""
    for stage in stages:
        window, steps = stage.end.window, stage.steps
        for rule, needed in (("solved_share", window), ("reward_loss", window + 1), ("reward_gain", 2 * window)):
            if getattr(stage.end, rule) not in (None, -1) and 0 < steps < needed:  # -1: never flat
                yield (
                    f"stage {stage.name} makes {plural(steps, 'step')} and end.{rule} is first looked at after "
                    f"{needed} (end.window is {window}), so it does not end the stage"
                )


def expected_steps(rule: EndSection, steps: int, rows: Sequence[Row]) -> int:
    """How many of at most `steps` a stage will take if its steps keep their present number of tokens."""
    sampled, most = sum(row.get(SAMPLED) or 0 for row in rows), rule.sampled_tokens
    return min(steps, math.ceil(most * len(rows) / sampled)) if most and sampled else steps


def _spent(rule: EndSection, rows: Sequence[Row]) -> str | None:
    if rule.sampled_tokens is None or (sampled := sum(row.get(SAMPLED) or 0 for row in rows)) < rule.sampled_tokens:
        return None
    return f"its attempts have {sampled:,.0f} tokens of the model (end.sampled_tokens is {rule.sampled_tokens:,})"


def _saturated(rule: EndSection, rows: Sequence[Row]) -> str | None:
    share = window_mean(rows, SOLVED, rule.window)
    if rule.solved_share is None or share is None or share < rule.solved_share:
        return None
    return (
        f"every attempt was right in {share:.0%} of the groups of its last {plural(rule.window, 'step')} "
        f"(end.solved_share is {rule.solved_share:g})"
    )


def _declined(rule: EndSection, rows: Sequence[Row]) -> str | None:
    last = window_mean(rows, REWARD, rule.window)
    if rule.reward_loss is None or last is None:
        return None
    best = max(window_means(rows, REWARD, rule.window))
    if best - last < rule.reward_loss:
        return None
    return (
        f"the mean reward of its last {plural(rule.window, 'step')}, {last:.3f}, is {best - last:.3f} below the best "
        f"so many steps (end.reward_loss is {rule.reward_loss:g})"
    )


def _flat(rule: EndSection, rows: Sequence[Row]) -> str | None:
    last, before = (window_mean(rows, REWARD, rule.window, back) for back in (0, rule.window))
    if rule.reward_gain is None or last is None or before is None or last - before >= rule.reward_gain:
        return None
    target = rule.truncated_share
    shares = [window_mean(rows, TRUNCATED, rule.window, back) for back in (0, rule.window)]
    if target is not None and not all(one is not None and abs(one - target) <= rule.truncated_band for one in shares):
        return None
    return (
        f"the mean reward of its last {plural(rule.window, 'step')}, {last:.3f}, is {last - before:+.3f} against the "
        f"steps before them (end.reward_gain is {rule.reward_gain:g})"
    )


def window_mean(rows: Sequence[Row], name: str, window: int, back: int = 0) -> float | None:
    """The mean over the `window` steps up to `back` before the last; None if there are fewer or one lacks the
    metric."""
    end = len(rows) - back
    values = [row.get(name) for row in rows[max(0, end - window) : max(0, end)]]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == window else None


def window_means(rows: Sequence[Row], name: str, window: int) -> Iterator[float]:
    """Means of all windows of so many steps that have the metric, in order."""
    for back in range(len(rows) - window, -1, -1):
        mean = window_mean(rows, name, window, back)
        if mean is not None:
            yield mean
