"""Answers that are words or the letter of a choice, compared without mathematics."""

from __future__ import annotations

import re

from rocstar.answers.wording import plain_text
from rocstar.types import Verdict

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\((?P<closed>[A-Ja-j])\)|(?P<open>[A-J])(?:[).:]|$))(?:\s.*)?", re.DOTALL
)
_GOLD_CHOICE = re.compile(r"\(?([A-J])\)?")


def compare_text(gold: str, predicted: str) -> tuple[Verdict, str] | None:
    """(verdict, method) when both say the same, or when the reference is the letter of a choice and the prediction
    surely names one; None for "don't know".

    The reference `B` or `(B)` agrees with `\\text{(B)}`, `(b)`, `B. 12`, `option B`; a letter inside a formula is no
    choice. Source: ours."""
    wanted, given = plain_text(gold), plain_text(predicted)
    if wanted == given != "":
        return Verdict.RIGHT, "text"
    if not (letter := _GOLD_CHOICE.fullmatch(wanted)):
        return None
    chosen = _CHOICE.fullmatch(given)
    if chosen is None:
        return None
    same = (chosen["closed"] or chosen["open"]).upper() == letter[1]
    return (Verdict.RIGHT if same else Verdict.WRONG), "choice"
