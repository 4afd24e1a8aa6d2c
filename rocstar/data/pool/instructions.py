"""Say the standing instructions of contests in other words, so that they alone do not make a problem overlap.

An instruction says how to write the answer or what a sign means; it is no part of the problem, and many questions share
its eight words. Each wording here has one meaning before and after. Not here: phrases that are mathematics.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rocstar.types import Problem, problem_id

_FRACTION = (
    r"\s{0,4}(?<![^\s.?!$)\]])(?:Express|Give|Write|Enter|Leave) (?:your|the) (?:final )?(?:answer|result|probability) "
    r"as an? (?:(?:single|common|reduced|simplified|simplest|proper|improper|mixed) )*(?:fraction|number)"
    r"(?: in (?:its )?(?:lowest|simplest|reduced) (?:terms|form)| reduced to (?:lowest|simplest) terms)?[.!]"
)
_NAMED = r"(?P<names>(?:(?! are )[^.?!]){1,40})"
_COPRIME = rf"\bwhere {_NAMED} are (?:positive )?relatively prime (?P<kind>(?:positive )?integers)\b"
WORDINGS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("coprime", re.compile(_COPRIME), r"for coprime \g<kind> \g<names>"),
    ("coprime", re.compile(r"\brelatively prime\b"), "coprime"),
    (
        "squarefree",
        re.compile(r"\bnot divisible by the square of any prime(?: number| integer)?\b"),
        "free of repeated prime factors",
    ),
    (
        "floor",
        re.compile(r"\b(?:greatest|largest) integer (?:that is )?(?:less than or equal to|not exceeding)(?=\W)"),
        "largest integer that does not exceed",
    ),
    # The answer of the pool is an integer, in whatever form a fraction was wanted.
    ("fraction", re.compile(_FRACTION), ""),
)
"""(name, what is looked for, what stands there afterwards)."""


def in_other_words(problem: Problem) -> Problem | None:
    """The problem with its standing instructions worded differently, the names of the wordings in `metadata` as
    "reworded"; None where it has none. Source: ours."""
    question, used = problem.question, []
    for name, pattern, wording in WORDINGS:
        question, times = pattern.subn(wording, question)
        used += [name] if times and name not in used else []
    if not used:
        return None
    question = question.strip()
    return replace(problem, id=problem_id(question), question=question, metadata={**problem.metadata, "reworded": used})
