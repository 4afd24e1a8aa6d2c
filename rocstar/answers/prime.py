"""The PRIME-style grader: texts made alike, answers taken apart, the parts compared one by one. Written after the
description of the release's second opinion (prime_math), not after its code.

Departures, each because the original would pay for a wrong answer: two plain numbers are compared exactly (the release
allows 1e-4, so 10000 passes for 10001); a tolerance is given to a decimal against an exact value only; units that can
be turned into one another are (5 m is 500 cm and not 5 cm); `eval` is never used. And one that is more generous: a bare
list is a set, whatever its order, as math-verify has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rocstar.answers.closeness import are_numbers, are_other_curves, equal_values, is_linear, is_rounded, read, value_of
from rocstar.answers.numbers import PERCENT, compare_numbers, parse_number
from rocstar.answers.pieces import Pieces, are_opposed, as_interval, split_top, take_apart
from rocstar.answers.units import DEGREE, RADIAN, are_strangers, conversion, is_angle, split_unit
from rocstar.answers.wording import (
    bare,
    is_name,
    loose_style,
    math_style,
    undelimited,
    without_names,
    without_point,
    without_range,
    without_thousands,
    words_after,
)
from rocstar.types import Verdict

MAX_ITEMS = 60  # of an unordered list; finding partners takes the square of it
MAX_NESTING = 4
EQUALS = ("=", "\\approx", "\\simeq")
_NO_SIDE = re.compile(r"^[!?]?$|[<>]$|[A-Za-z]\s*!$")  # of `x <= 6`, `x != 6` and `? = 6`
_UNITS = re.compile(r"\\(?:text|mathrm|circ|degree)(?![A-Za-z])|[\d}]\s*[A-Za-z]{2}")
_SIGN = re.compile(r"%|\\\$|\\circ")
_THOUSAND = re.compile(r",0\d\d")  # no list has such an item
_TUPLE = re.compile(r"[=(]|\\langle")  # what a bare list of values does not have
_CLOSED = re.compile(r"\\infty\s*\]|\[\s*-\s*\\infty")
_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def grade_prime(gold: str, predicted: str) -> tuple[Verdict, str]:
    """(verdict, method). RIGHT or WRONG by `prime`; WRONG by `value` when both are numbers that differ, by `unit`,
    `brackets` or `names` when these differ: no room for another opinion. UNDECIDED when the texts differ and the values
    cannot be decided. Running text is ignored. May be slow."""
    sides = split_top(undelimited(gold), EQUALS)
    gold = sides[-1] if len(sides) > 1 and all(map(_is_number, sides)) else gold
    signs = [set(_SIGN.findall(text)) for text in (gold, predicted)]
    if all(signs) and signs[0].isdisjoint(signs[1]) and take_apart(undelimited(gold)):
        return Verdict.WRONG, "unit"  # lists of dollars and of percent, whose signs are gone where items are compared
    if (settled := _stated(gold, predicted) or _settled(*_prepared(gold, predicted))) is not None:
        return settled
    found = same_answer(gold, predicted)
    if found is None:
        return Verdict.UNDECIDED, "gold_unparsed"
    both_signs = "\\pm" in gold or "\\pm" in predicted  # of which math-verify loses one
    if not found and (both_signs or are_numbers(*without_names(gold, predicted)) or are_other_curves(gold, predicted)):
        return Verdict.WRONG, "value"
    if not found and _have_units(gold) and _have_units(predicted):
        return Verdict.WRONG, "unit"
    return (Verdict.RIGHT if found else Verdict.WRONG), "prime"


def same_answer(gold: str, predicted: str, nesting: int = 0) -> bool | None:
    """Whether two answers are the same; None for "cannot tell"."""
    if (plain := compare_numbers(gold, predicted)) is not None:
        return plain[0] is Verdict.RIGHT
    gold, predicted = _prepared(gold, predicted)
    if (settled := _settled(gold, predicted)) is not None:
        return settled[0] is Verdict.RIGHT
    wanted, given = _pieces(undelimited(gold), undelimited(predicted))
    both = wanted is not None and given is not None and nesting < MAX_NESTING
    if _same_items(gold, predicted) if both else same_text(gold, predicted):
        return True
    if nesting < MAX_NESTING and wanted is not None and given is not None:
        return _same_pieces(wanted, given, nesting)
    if wanted is not None or given is not None:
        return False  # several values against one
    found = equal_values(gold, predicted)
    if found is None and read(gold) is not None and read(predicted) is None:
        return False  # the reference is a formula and the prediction is none
    return found


def same_text(gold: str, predicted: str) -> bool:
    """Equal after either normalisation, which drops units: degrees, too, but not inside a function of angles."""
    if _ANGLES.search(gold) and len({"\\circ" in text for text in (gold, predicted)}) > 1:
        return False
    return any(style(gold) == style(predicted) != "" for style in (math_style, loose_style))


def _prepared(gold: str, predicted: str) -> tuple[str, str]:
    gold, predicted = without_range(bare(gold), bare(predicted))
    if not take_apart(gold) or _THOUSAND.search(predicted):
        predicted = without_thousands(predicted)
    if not take_apart(predicted):
        gold = without_thousands(gold)
    return without_names(gold, without_point(gold, predicted))


def _settled(gold: str, predicted: str) -> tuple[Verdict, str] | None:
    """What units or brackets alone decide: those that both texts have and that the other graders ignore."""
    wanted, given = take_apart(undelimited(gold)), take_apart(undelimited(predicted))
    if wanted is None and given is None:
        found = _same_percentage(gold, predicted)
        found = _same_quantity(gold, predicted) if found is None else found
        if found is None and are_strangers(words_after(gold), words_after(predicted)):
            found = False
        return None if found is None else (Verdict.RIGHT if found else Verdict.WRONG, "unit")
    if wanted is None and given and given.opening == "" and len(given.items) > 1:
        return Verdict.WRONG, "brackets"  # another grader would take the first
    if _CLOSED.search(predicted) and not _CLOSED.search(gold):
        return Verdict.WRONG, "brackets"
    if wanted and given and are_opposed(gold, predicted):
        return Verdict.WRONG, "brackets"
    listed = "\\pm" in gold or "\\pm" in predicted or not _TUPLE.search(gold)
    if wanted and given and (_clash(wanted, given) or (listed and {wanted.opening, given.opening} == {"(", ""})):
        return Verdict.WRONG, "brackets"
    if wanted and given and _misplaced(wanted, given):
        return Verdict.WRONG, "names"
    return None


def _stated(gold: str, predicted: str) -> tuple[Verdict, str] | None:
    """What an equation says where the reference is none: the numbers among its sides agree, and one of them is the
    answer. `2n = 8` says 4, and `8 = 9` says nothing."""
    sides = split_top(undelimited(predicted), EQUALS)
    if len(sides) < 2 or len(split_top(gold, EQUALS)) > 1 or take_apart(predicted) or any(map(_NO_SIDE.search, sides)):
        return None
    numbers = [side for side in sides if _is_number(side)]
    # The same number, or one is the other rounded.
    agreed = [number for number in numbers if same_answer(numbers[0], number) or is_rounded(numbers[0], number)]
    exact = split_top(split_top(undelimited(predicted), EQUALS[1:])[0], EQUALS[:1])
    contradict = any(number in exact and number not in agreed for number in numbers)
    if numbers and (contradict or any(is_linear(split_unit(side)[0]) for side in sides if side not in numbers)):
        return Verdict.WRONG, "value"
    if any(same_answer(gold, number) for number in agreed):
        return Verdict.RIGHT, "prime"
    return (Verdict.WRONG, "value") if agreed != numbers else None


def _is_number(side: str) -> bool:
    text = split_unit(side)[0]
    return not is_name(text) and (parse_number(text) is not None or value_of(text) is not None)


def _have_units(text: str) -> bool:
    """Whether each item of a list has a unit that is known."""
    pieces = take_apart(undelimited(bare(text)))
    return pieces is not None and all(split_unit(item)[1] for item in pieces.items)


def _misplaced(wanted: Pieces, given: Pieces) -> bool:
    """`x = 1, y = 2` against `2, 1`: values with names against as many without, in no order of these; other names, or
    other values of the same."""
    ours, others = wanted.named(), given.named()
    if ours and others:
        return ours.keys() != others.keys() or _all(same_answer(ours[name], others[name]) for name in ours) is False
    for named, plain in ((wanted, given), (given, wanted)):
        values = named.named()
        if values and not plain.named() and len(plain.items) == len(values) and not any("=" in i for i in plain.items):
            orders = (list(values.values()), [values[name] for name in sorted(values)])
            return all(_all(map(same_answer, order, plain.items)) is False for order in orders)
    return False


def _clash(wanted: Pieces, given: Pieces) -> bool:
    """A tuple is no set, a matrix no determinant."""
    kinds = {wanted.opening, given.opening}
    several = min(len(wanted.items), len(given.items)) > 1
    return (several and kinds == {"(", "{"}) or (len(kinds) == 2 and bool(kinds & {"v", "V"}) and "m" in kinds)


def _same_percentage(gold: str, predicted: str) -> bool | None:
    """Whether a formula in percent is the hundredth that the reference is; None where that is no question."""
    hundredfold, wanted = PERCENT.sub("", predicted), PERCENT.sub("", gold)
    if hundredfold != predicted and wanted != gold:
        return equal_values(wanted, hundredfold)
    if hundredfold == predicted or "%" in gold or "percent" in gold or read(gold) is None:
        return None
    return bool(equal_values(gold, rf"\frac{{{hundredfold}}}{{100}}"))


def _same_quantity(gold: str, predicted: str) -> bool | None:
    """Two formulas with units that are known, else None. A multiple of pi against degrees is in radians."""
    if _ANGLES.search(gold) or _ANGLES.search(predicted):
        return None
    (wanted, unit), (given, other) = split_unit(gold), split_unit(predicted)
    if unit and not other:
        given, other = split_unit(predicted, bare=True)
    elif other and not unit:
        wanted, unit = split_unit(gold, bare=True)
    if is_angle(unit) == DEGREE and not other and "\\pi" in given:
        other = RADIAN
    elif is_angle(other) == DEGREE and not unit and "\\pi" in wanted:
        unit = RADIAN
    if not unit or not other:
        return None
    angles = [is_angle(unit), is_angle(other)]
    if angles == [DEGREE, RADIAN]:
        return equal_values(rf"({wanted})\cdot\frac{{\pi}}{{180}}", given)
    if angles == [RADIAN, DEGREE]:
        return equal_values(wanted, rf"({given})\cdot\frac{{\pi}}{{180}}")
    factor = conversion(other, unit)
    if not factor:
        return None if factor is None else False
    if factor == 1:
        return same_answer(wanted, given)
    return equal_values(wanted, rf"({given})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}")


def _same_items(gold: str, predicted: str) -> bool:
    """`same_text` of lists, whose units are looked at one by one."""
    return same_text(gold, predicted) and not (_UNITS.search(gold) and _UNITS.search(predicted))


def _pieces(gold: str, predicted: str) -> tuple[Pieces | None, Pieces | None]:
    """Both taken apart; an inequality is the interval that it means where the other is one, and two sets of all x with
    a property are intervals."""
    if gold.startswith("\\{") and predicted.startswith("\\{"):
        gold, predicted = as_interval(gold), as_interval(predicted)
    wanted, given = take_apart(gold), take_apart(predicted)
    if wanted and wanted.is_interval:
        given = take_apart(as_interval(predicted)) or given
    elif given and given.is_interval:
        wanted = take_apart(as_interval(gold)) or wanted
    return wanted, given


def _same_pieces(wanted: Pieces, given: Pieces, nesting: int) -> bool | None:
    wanted, given = wanted.as_vector(given), given.as_vector(wanted)
    if not _compatible(wanted, given) or len(wanted.items) != len(given.items):
        return False
    if wanted.opening in ("m", "v", "V"):
        return _same_rows(wanted.items, given.items, nesting)
    if wanted.is_ordered or given.is_ordered:
        return _all(same_answer(a, b, nesting + 1) for a, b in zip(wanted.items, given.items, strict=True))
    return _same_set(wanted.items, given.items, nesting)


def _compatible(wanted: Pieces, given: Pieces) -> bool:
    """Brackets mean the same. A bare list may stand for a set, not for a tuple; `{` is both a set and a group."""
    unordered = ("", "{")
    if wanted.opening in unordered and given.opening in unordered:
        return True
    return wanted.opening == given.opening and wanted.closing == given.closing


def _same_rows(wanted: Sequence[str], given: Sequence[str], nesting: int) -> bool | None:
    cells = [(split_top(a, ("&",)), split_top(b, ("&",))) for a, b in zip(wanted, given, strict=True)]
    if any(len(row) != len(other) for row, other in cells):
        return False
    return _all(same_answer(a, b, nesting + 1) for row, other in cells for a, b in zip(row, other, strict=True))


def _same_set(wanted: Sequence[str], given: Sequence[str], nesting: int) -> bool | None:
    """Each item finds a partner of its own."""
    left = list(given)
    unknown = False
    rest = []
    for item in wanted:  # equal texts first: most partners are, and they cost nothing
        partner = next((other for other in left if _same_items(item, other)), None)
        if partner is None:
            rest.append(item)
        else:
            left.remove(partner)
    if len(rest) > MAX_ITEMS:
        return None
    for item in rest:
        for other in left:
            same = same_answer(item, other, nesting + 1)
            unknown = unknown or same is None
            if same:
                left.remove(other)
                break
        else:
            return None if unknown else False
    return True


def _all(found: Iterable[bool | None]) -> bool | None:
    """True when all are, False when one is not, None when one cannot be decided and none is False."""
    unknown = False
    for same in found:
        if same is False:
            return False
        unknown = unknown or same is None
    return None if unknown else True
