"""The rules that drop a row by looking at it alone, each small and named. A rule returns its evidence, or None to keep.

Rules that compare a row with others or ask somebody are in `duplicates.py`, `decontamination.py`, `agreement.py`.
These here are heuristics over words; `docs/data.md` says how often a person agrees with them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rocstar.data.pool.integers import integer_of
from rocstar.types import Problem

SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the rules measure against."""

    max_answer_digits: int
    """Digits of the longest integer answer kept."""
    max_question_chars: int
    """Characters of the longest question kept."""


Rule = Callable[[Problem, Bounds], str | None]

_DRAWING_CODE = re.compile(r"\[asy\]|\\begin\{(?:tikzpicture|picture)\}|\bdraw\s*\(")
_PICTURE_FILE = re.compile(r"!\[[^\]]*\]\([^)]*\)|\\includegraphics|<img\b", re.IGNORECASE)
_THING = r"(?:figures?|fig\.|diagrams?|pictures?|pictured|drawings?|illustrations?|images?|sketch)"
_PICTURE_WORDS = re.compile(
    rf"\b(?:in|on|from|of|by) (?:the|this|each|these) (?:\w+ )?{_THING}(?! of speech)\b"
    rf"|\bthe (?:\w+ )?{_THING} (?:\w+ )?(?:shows?|below|above|at|to the|on the|is|are|represents?)\b"
    rf"|\b{_THING} (?:\w+ )?(?:shown|below|above)\b"
    rf"|\b(?:shown|drawn|pictured|depicted|illustrated) (?:in|on) (?:the )?{_THING}\b"
    r"|\bas (?:shown|pictured|illustrated|depicted)(?! (?:by|that|in the (?:table|array|equation|example|list)))\b"
    r"|\bfig(?:ure|\.) ?\d|\b(?:pictured|depicted|illustrated) (?:below|above|here)\b"
    r"|\b(?:is|are) shown(?: (?:at|to|on) (?:the )?(?:right|left))?\.(?!\s*[|\\$])",
    re.IGNORECASE,
)
_TABLE = re.compile(r"\\begin\{(?:array|tabular|[bpv]?matrix)\}|\|\s*:?-{2,}|\btable\b", re.IGNORECASE)

_PROOF = re.compile(r"\b(?:prove|show|demonstrate|verify)(?: (?:also|directly|rigorously))? that\b", re.IGNORECASE)
_ASKS = re.compile(
    r"\b(?:find|determine|compute|calculate|evaluate|what|how (?:many|much|long|far|old|tall|often)|which|who|when|"
    r"give|simplify|solve|express|state|count|minimi[sz]e|maximi[sz]e|estimate|prove|is it|where is)\b|\?|_{2,}|\\_",
    re.IGNORECASE,
)
_PART = re.compile(
    r"(?:(?<=\s)|(?<=^)|(?<=\$)|(?<=[.;:]))\(?(?P<mark>[1-4]|[a-d]|i{1,3}|I{1,3})\s*[).]\$?(?=[\s\\$A-Z])"
)
_FOLLOWERS = ("1234", "abcd")

_LETTERS = re.compile(r"\\[A-Za-z]+|[^A-Za-z ]+")
_CHOICE = re.compile(r"\(?\s*[A-H]\s*\)?")
_PROSE = frozenset(
    ("yes", "no", "true", "false", "none", "proof", "impossible", "infinite", "infinitely", "cannot", "undefined")
)
_LISTED = re.compile(r"comma[- ]separated|separated by commas|separate[sd]? .{0,30}with commas", re.IGNORECASE)
_FIND_ALL = re.compile(r"\b(?:find|determine|list|give|what are) (?:\w+ )?all\b", re.IGNORECASE)
_SEVERAL = re.compile(r"\\text\{\s*(?:,\s*)?(?:and|or)\b|\b(?:and|or)\b|\\pm|\\cup|\\quad|\n\s*\S")
_SPACED = re.compile(r"\\left|\\right|\\[,;!: ]|\\begin\{[pb]?matrix\}|[\s$]")
_TOWER = re.compile(r"\d\)?\s*\^\s*(?:\{\s*\d+\s*\^|\{?\s*\d{3,})|\d{3,}\s*!|\d\s*!\s*\)\s*!")


def empty(problem: Problem, bounds: Bounds) -> str | None:
    """No question to speak of: fewer than two characters that are letters or digits; or no answer."""
    if sum(char.isalnum() for char in problem.question) < 2:
        return f"the question is {problem.question!r}"
    return None if problem.answer.strip() else "the answer is empty"


def long_question(problem: Problem, bounds: Bounds) -> str | None:
    """Longer than a prompt may be."""
    length = len(problem.question)
    return f"{length} characters" if length > bounds.max_question_chars else None


def picture(problem: Problem, bounds: Bounds) -> str | None:
    """Speaks of a picture that is not there. Drawing code ([asy], TikZ) is the picture, in a form a model can read."""
    if found := _PICTURE_FILE.search(problem.question):
        return f"shows {_shown(found.group())}"
    if _DRAWING_CODE.search(problem.question):
        return None
    found = _PICTURE_WORDS.search(problem.question)
    if found is None or (_TABLE.search(problem.question) and "table" not in found.group()):
        return None
    return f'says "{found.group().strip()}" and has no drawing'


def proof(problem: Problem, bounds: Bounds) -> str | None:
    """Asks for a proof and for no value."""
    found = _PROOF.search(problem.question)
    if found is None:
        return None
    rest = problem.question[: found.start()] + problem.question[found.end() :]
    return None if _ASKS.search(rest) else f'asks to "{found.group()}" and for no value'


def multi_part(problem: Problem, bounds: Bounds) -> str | None:
    """Asks two or more numbered questions, of which the one answer can belong to one only."""
    marks = [(found["mark"], found.start(), found.end()) for found in _PART.finditer(problem.question)]
    for first, second in itertools.pairwise(marks):
        if _follows(first[0], second[0]):
            end = next((start for mark, start, _ in marks if start > second[1]), len(problem.question))
            parts = problem.question[first[2] : second[1]], problem.question[second[2] : end]
            if all(_ASKS.search(part) for part in parts):
                return f'asks ({first[0]}) "{_shown(parts[0])}" and ({second[0]}) "{_shown(parts[1])}"'
    return None


def unverifiable(problem: Problem, bounds: Bounds) -> str | None:
    """The answer is prose, yes or no, or the letter of a choice: chance or wording would decide."""
    answer = problem.answer.strip().strip("$.")
    words = _LETTERS.sub(" ", answer.replace("\\text", " ")).split()
    bare = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*|[{}]", "", answer).strip()
    if _CHOICE.fullmatch(bare):
        return f"the answer is the letter {bare}"
    if {word.lower() for word in words} & _PROSE:
        return f'the answer is "{_shown(answer)}"'
    prose = [word for word in words if len(word) > 2]
    return f'the answer is the text "{_shown(answer)}"' if len(prose) > 3 else None


def composite(problem: Problem, bounds: Bounds) -> str | None:
    """Several values in one answer: a list, a tuple, an interval, plus-minus."""
    listed = _LISTED.search(problem.question) or _FIND_ALL.search(problem.question)
    if integer_of(problem.answer) is not None and not (listed and "," in problem.answer):
        return None
    if _SEVERAL.search(problem.answer) or _is_list(_SPACED.sub("", problem.answer.replace("{,}", ""))):
        return f'the answer "{_shown(problem.answer)}" has several parts'
    return None


def huge_answer(problem: Problem, bounds: Bounds) -> str | None:
    """An integer of very many digits, or a power or factorial that would: verifiers time out on these (paper §4.2)."""
    value = integer_of(problem.answer)
    digits = sum(char.isdigit() for char in problem.answer)
    if value is not None:
        return f"the answer has {digits} digits" if digits > bounds.max_answer_digits else None
    found = _TOWER.search(problem.answer)
    return f'the answer "{_shown(problem.answer)}" holds a huge number' if found else None


def not_integer(problem: Problem, bounds: Bounds) -> str | None:
    """The answer is no single integer (paper §4.2 keeps integers only, because they are verified without doubt)."""
    value = integer_of(problem.answer)
    return f'the answer is "{_shown(problem.answer)}"' if value is None else None


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (empty, long_question, picture, proof, multi_part, unverifiable, composite, huge_answer, not_integer)
}
"""By name, in the order in which they are applied; the first that speaks drops the row."""


def _follows(first: str, second: str) -> bool:
    """1 then 2, a then b, i then ii."""
    if set(first.lower()) == {"i"} and first[0] == second[0]:
        return len(second) == len(first) + 1
    return any(first + second in order for order in _FOLLOWERS)


def _is_list(answer: str) -> bool:
    """A comma or semicolon outside all brackets, or right inside those that enclose the whole."""
    depth, commas, closes_early = 0, set(), False
    for place, char in enumerate(answer):
        depth += (char in "([{") - (char in ")]}")
        closes_early |= depth == 0 and place < len(answer) - 1
        if char in ",;":
            commas.add(depth)
    return 0 in commas or (1 in commas and not closes_early and answer[:1] in ("(", "[", "{", "\\"))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"
