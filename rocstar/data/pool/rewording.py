"""Rewords questions: fractions and simple roots become problems with an integer answer. Also parses integers.

Asking for a sum of the parts of an answer is how contests do it (AIME) and how the paper's DAPO source was made.
Nothing is evaluated here: a tower of powers is not an integer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd, isqrt

from rocstar.types import Problem, problem_id

MAX_CHARS = 400  # longer than any realistic integer answer; bounds int() and the patterns

_DELIMITED = re.compile(r"\\\[(.*)\\\]|\\\((.*)\\\)|\$(.*)\$", re.DOTALL)
_DROPPED = re.compile(r"\\[!,;: ]|\\left|\\right|~|\s+$|^\s+")
_UNIT = re.compile(
    r"\s*(?:\\?%|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree|°"
    r"|\\(?:text|textrm|mathrm|mbox)\{(?P<word>[A-Za-z ./]*)\}(?:\^\{?[23]\}?)?)$"
)
_NOT_UNITS = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen|and|or|to|pi|i|e)\b", re.IGNORECASE)
_NAME = re.compile(r"^[A-Za-z]\s*=\s*")
_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")
_SIGNED = r"(?P<sign>[+-]?)\s*"
_TOP = r"(?:\{\s*(?P<top>-?\d+)\s*\}|(?P<top1>\d))"
_BOTTOM = r"(?:\{\s*(?P<bottom>\d+)\s*\}|(?P<bottom1>\d))"
_FRACTION = re.compile(rf"{_SIGNED}(?:\\frac\s*{_TOP}\s*{_BOTTOM}|(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+))")
_RADICAND = r"\\sqrt\s*(?:\{\s*(?P<root>\d+)\s*\}|(?P<root1>\d))"
_ROOT = re.compile(
    rf"{_SIGNED}(?:(?P<factor>\d+)\s*)?{_RADICAND}"
    rf"|{_SIGNED.replace('sign', 'sign2')}\\frac\s*\{{\s*(?P<top>\d*)\s*"
    rf"{_RADICAND.replace('root', 'root2')}\s*\}}\s*{_BOTTOM}"
)
_MAX_ROOT = 10**9  # keeps the search for square factors to some thousand divisions

ASK_FRACTION = "Write the result as a reduced fraction $p/q$ with $q > 0$ and answer with the number $p + q$."
ASK_ROOT = (
    "Write the result as $p\\sqrt{r}/q$ with integers $p$, $q > 0$ and $r > 0$, fully simplified ($r$ has no square "
    "factor, $p/q$ is reduced), and answer with the number $p + q + r$."
)


def integer_of(answer: str) -> int | None:
    """The integer that an answer certainly is, as in 1,013 or $-7$; 36\\text{ cm}^2 and 60^\\circ lose their unit."""
    if len(answer) > MAX_CHARS:
        return None
    body = _bare(answer)
    unit = _UNIT.search(body)
    if unit and not _NOT_UNITS.search(unit["word"] or ""):
        body = body[: unit.start()]
    if _INTEGER.fullmatch(body):
        return int(body.partition(".")[0].replace(",", ""))
    parts = _fraction_of(body)
    return parts[0] if parts and parts[1] == 1 else None


def asked_for_integer(problem: Problem) -> Problem | None:
    """The problem with its question extended so that the answer is an integer: p + q of a fraction, p + q + r of p
    sqrt(r)/q. None if the answer is neither. `metadata` keeps the former answer as "asked_from".

    Source: ours; contests and DAPO-Math-17k do the same."""
    body = _bare(problem.answer)
    if len(body) > MAX_CHARS:
        return None
    if (fraction := _fraction_of(body)) is not None and fraction[1] != 1:
        return _asked(problem, ASK_FRACTION, sum(fraction))
    if (root := _root_of(body)) is not None:
        return _asked(problem, ASK_ROOT, sum(root))
    return None


def before_asking(problem: Problem) -> tuple[str, str]:
    """(question, answer) without the sentence that `asked_for_integer` added; unchanged for any other problem.

    The sentence is the same in many questions and must not make them alike."""
    former = problem.metadata.get("asked_from")
    for request in (ASK_FRACTION, ASK_ROOT):
        if problem.question.endswith(f" {request}"):
            return problem.question.removesuffix(f" {request}"), former or problem.answer
    return problem.question, problem.answer


def same_form(answer: str) -> str:
    """A text that is the same for equal integers, fractions and simple roots; any other answer unchanged."""
    value = integer_of(answer)
    if value is not None or len(answer) > MAX_CHARS:
        return answer if value is None else str(value)
    body = _bare(answer)
    parts = _fraction_of(body) or _root_of(body)
    return answer if parts is None else "/".join(map(str, parts))


def _asked(problem: Problem, request: str, answer: int) -> Problem:
    question, metadata = f"{problem.question} {request}", {**problem.metadata, "asked_from": problem.answer}
    return replace(problem, id=problem_id(question), question=question, answer=str(answer), metadata=metadata)


def _bare(answer: str) -> str:
    """Without mathematics delimiters, currency, thin spaces, a leading `x =` and a final full stop."""
    if found := _DELIMITED.fullmatch(answer.strip()):
        answer = next(inner for inner in found.groups() if inner is not None)
    body = _DROPPED.sub("", answer.replace("\u2212", "-").replace("{,}", ",").strip())
    body = _NAME.sub("", body.removesuffix("."))
    return re.sub(r"\\([dtc])frac", r"\\frac", body.removeprefix("\\$").removesuffix("\\$")).strip()


def _fraction_of(body: str) -> tuple[int, int] | None:
    """(numerator, positive denominator) in lowest terms."""
    found = _FRACTION.fullmatch(body)
    if found is None:
        return None
    top = int(found["top"] or found["top1"] or found["top2"])
    bottom = int(found["bottom"] or found["bottom1"] or found["bottom2"])
    if bottom == 0:
        return None
    common = gcd(top, bottom)
    return (-1 if found["sign"] == "-" else 1) * top // common, bottom // common


def _root_of(body: str) -> tuple[int, int, int] | None:
    """(p, q, r) of p sqrt(r)/q with r free of squares, or None where r would be 1 or 0 or is very large."""
    found = _ROOT.fullmatch(body)
    if found is None:
        return None
    root = int(found["root"] or found["root1"] or found["root2"] or found["root21"])
    if not 1 < root < _MAX_ROOT:
        return None
    bottom = int(found["bottom"] or found["bottom1"] or 1)
    outside, inside = _square_free(root)
    top = int(found["factor"] or found["top"] or 1) * outside
    if inside == 1 or top == 0 or bottom == 0:
        return None
    common = gcd(top, bottom)
    sign = -1 if "-" in (found["sign"], found["sign2"]) else 1
    return sign * top // common, bottom // common, inside


def _square_free(number: int) -> tuple[int, int]:
    """(a, b) with number = a^2 b and b free of squares."""
    outside = 1
    for divisor in range(2, isqrt(number) + 1):
        while number % divisor**2 == 0:
            number //= divisor**2
            outside *= divisor
        if divisor**2 > number:
            break
    return outside, number
