"""RoC on plain lists, for batches of other trainers: rewards and penalties in, kept rows and a reason for each row out.

Needs neither torch nor a library of theirs. `rocstar.learning.resample.select` is the same for one group."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from rocstar.answers.extract import answer_blocks
from rocstar.learning.quality import penalty_of
from rocstar.learning.resample import KEPT, seed_of_choice, select
from rocstar.types import RIGHT_ABOVE, Reason


class Drawn(NamedTuple):
    """One finished attempt of a batch."""

    group: Hashable  # what its siblings share: the problem's id. `str(group)` seeds their draw
    reward: float | None  # none without a verdict: such an attempt is not compared
    penalty: float  # p_total, lower is better
    outage: bool = False
    """Whether the sandbox failed during it: its reward is no evidence about the model."""


def reasons_of(
    batch: Sequence[Drawn], keep: int, *, seed: int, step: int, success_above: float = RIGHT_ABOVE
) -> list[Reason]:
    """[N] why each attempt is kept or dropped: at most `keep` of each group, and none of a group whose rewards are
    equal. A reward above `success_above` is a success. The same seed and step choose the same again, in any order of
    groups. Raises ValueError for a `keep` under 2 and numbers that are not finite, TypeError for a reward that is
    text."""
    groups: dict[Hashable, list[int]] = {}
    for row, drawn in enumerate(batch):
        groups.setdefault(drawn.group, []).append(row)
    reasons: dict[int, Reason] = {}
    for group, rows in groups.items():
        rewards = {row: reward for row in rows if (reward := batch[row].reward) is not None and not batch[row].outage}
        rng = random.Random(seed_of_choice(seed, step, str(group)))
        penalties = [batch[row].penalty for row in rewards]
        _, chosen = select([*rewards.values()], penalties, keep, rng, success_above=success_above)
        reasons |= zip(rewards, chosen, strict=True)
    lost = {True: Reason.DROPPED_ENVIRONMENT, False: Reason.DROPPED_UNDECIDED}
    return [reasons.get(row) or lost[drawn.outage] for row, drawn in enumerate(batch)]


def penalty_of_messages(
    messages: Sequence[Mapping[str, Any]], *, calls: int, failed_calls: int, asked: bool = True
) -> float:
    """p_err + p_format of an attempt in messages of OpenAI's chat completions, from the first answer on. Which calls
    failed is in no message: the caller passes it. asked: whether the prompt asks for an `<answer>` block, else p_format
    is 0. Source: paper §2.2.3."""
    texts = [str(message.get("content") or "") for message in messages if message.get("role") == "assistant"]
    blocks = sum(len(answer_blocks(text)) for text in texts)
    turns = max(1, len(texts))
    return penalty_of(calls=calls, failed_calls=failed_calls, answer_blocks=blocks, turns=turns, asked=asked).total


def is_kept(reason: Reason) -> bool:
    return reason in KEPT
