"""Decide whether a final answer equals the reference: plain numbers, then text, then symbolic equality.

Works on answers that were already extracted; finding them is `extract.py`, rewards are `verifier.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rocstar.answers.numbers import compare_numbers
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.types import Verdict

MAX_CHARS = 2000  # longer than any reference answer we know; math-verify's parser is slower than linear

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}\\]*)\}")
_DROPPED = re.compile(r"\\left\b|\\right\b|\\[!,;:]")
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Grade:
    verdict: Verdict
    """RIGHT, WRONG or UNDECIDED."""
    method: str
    """What decided: integer, number, not_a_number, text, math_verify, no_answer, too_long, deadline, memory,
    gold_unparsed."""
    extracted: str | None
    """The answer that was compared; None when there was none."""


class Grader:
    """Compares answers; owns the symbolic process, which starts at the first question that needs it."""

    def __init__(self, symbolic: SymbolicChecker | None = None) -> None:
        self._symbolic = symbolic or SymbolicChecker()

    async def grade(self, gold: str, predicted: str | None, *, prose: bool = False) -> Grade:
        """Compare an extracted answer with the reference. Same input, same grade, as long as no limit is hit.

        A prediction over MAX_CHARS that is not the reference itself is WRONG. `prose` says that `predicted` is running
        text in which nothing was boxed; math-verify then searches its last MAX_CHARS, which is generous and meant for
        foreign transcripts, never for rewards. Raises VerifierUnavailable. Source: ours; paper §2.2.1 says no more
        than "rule-based"."""
        if predicted is None or not predicted.strip():
            return Grade(Verdict.WRONG, "no_answer", None)
        if prose:
            predicted = predicted[-MAX_CHARS:]
        verdict, method = self._at_once(gold, predicted) or await self._symbolic.compare(gold, predicted, prose=prose)
        return Grade(verdict, method, predicted)

    async def close(self) -> None:
        """End the symbolic process."""
        await self._symbolic.close()

    @staticmethod
    def _at_once(gold: str, predicted: str) -> tuple[Verdict, str] | None:
        """A verdict that needs no symbolic mathematics, else None."""
        if gold == predicted and len(gold) > MAX_CHARS:
            return Verdict.RIGHT, "text"
        if len(predicted) > MAX_CHARS:
            return Verdict.WRONG, "too_long"
        if len(gold) > MAX_CHARS:
            return Verdict.UNDECIDED, "too_long"
        if found := compare_numbers(gold, predicted):
            return found
        if plain_text(gold) == plain_text(predicted) != "":
            return Verdict.RIGHT, "text"
        return None


def plain_text(answer: str) -> str:
    """An answer without the LaTeX that changes only its looks: equal results mean equal answers, unequal ones mean
    nothing."""
    text = _WRAPPED.sub(r"\1", _DROPPED.sub("", answer.strip().strip("$")))
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("\\ ", " ")
    return _SPACES.sub(" ", text).strip().removesuffix(".")
