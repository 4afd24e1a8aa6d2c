"""Are two formulas equal? Parsed by math-verify's grammar (nothing is ever run as Python), compared by their values.

Two formulas that agree at several fixed points to many digits are taken as equal. Departure: the release simplifies the
difference to 0, with at most two letters; values decide more, in bounded time, and a changed digit shows. Runs in the
worker processes only: it loads sympy, and a hostile formula may still never end.

Not covered, and left to math-verify: inequalities, sums and integrals, sets (pieces.py takes them apart first).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from rocstar.answers.numbers import PlainNumber, are_close
from rocstar.answers.wording import bare, named_primes

RELATIVE = 1e-4  # of a decimal against an exact value; Source: release, prime_math
DIGITS = 30  # worked with
NOISE = 1e-15  # relative; equal formulas agree far better with 30 digits, a changed digit differs far more
MAX_LETTERS = 8
EQUATION = "rocstar_equation"  # marks left minus right of an equation
# No special values of the usual functions are among them.
_POINTS = [sympy.Rational(point) for point in ("0.7310", "1.3941", "-0.6124", "2.1773", "-1.8319", "3.4027")]
# For formulas with steps or corners: integers, points near them, and large values.
_WIDE = (*map(str, range(-12, 31)), "-1000", "1000", "-999999.63", "1000000.37", "-6.004", "-0.004", "0.004", "9.996")
SMALL = 7  # of the integers, those where 2^(2^n) is quickly computed
# The grammar silently drops bases; they are left to numbers.py.
_BASE = re.compile(r"\d\s*_")
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z]).*\\circ", re.DOTALL)


def equal_values(gold: str, predicted: str) -> bool | None:
    """Whether two formulas have the same value for all values of their letters; None if one cannot be read.

    A decimal agrees with the irrational that it approximates within RELATIVE, computed with pi or with 3.14, and with a
    fraction as plain numbers do. Never raises for what a text says, but may be slow."""
    wanted, given = read(gold), read(predicted)
    if wanted is None or given is None:
        return None
    decimals = [_DECIMAL.fullmatch(bare(text).strip()) for text in (gold, predicted)]
    if (decimals[0] is None) != (decimals[1] is None) and not (wanted.free_symbols or given.free_symbols):
        decimal, exact = (wanted, given) if decimals[0] else (given, wanted)
        if (value := exact.doit()).is_Rational:
            number, (written,) = PlainNumber(Fraction(int(value.p), int(value.q))), filter(None, decimals)
            rounded = PlainNumber(Fraction(written[0]), len(written[1]))
            return are_close(number, number.value, rounded, rounded.value)
        return _approximates(decimal, exact)
    return _same_values(wanted, given)


def are_numbers(*texts: str) -> bool:
    """Whether all texts are read as numbers: no letters, no equation."""
    return all(
        (found := read(text)) is not None and not found.free_symbols and not _is_equation(found) for text in texts
    )


def value_of(text: str) -> Any | None:
    """The number that a text equals for all values of its letters; None if there is none, or several."""
    found = read(text)
    return None if found is None or found.free_symbols or _is_equation(found) else _number(found)


def is_rounded(first: str, second: str) -> bool:
    """Whether one of two numbers is a decimal and the other the same but for its last place."""
    places = [len(found[1]) for text in (first, second) if (found := _DECIMAL.fullmatch(text.strip()))]
    value, other = value_of(first), value_of(second)
    if value is None or other is None or not places:
        return False
    return bool(abs(value - other) < 10 ** -min(places))


def is_linear(text: str) -> bool:
    """Whether a text is `2n` or `n + 1`, so that an equation with it says another number than its other side."""
    found = read(text)
    if found is None or found.is_Symbol or len(found.free_symbols) != 1:
        return False
    return bool(found.is_polynomial() and found.diff(*found.free_symbols).is_number)


def are_other_curves(gold: str, predicted: str) -> bool:
    """Whether both are equations between polynomials and neither is a multiple of the other: math-verify solves them,
    and takes two without a real solution for equal."""
    found = [formula.args[0] for text in (gold, predicted) if (formula := read(text)) and _is_equation(formula)]
    return len(found) == 2 and all(formula.is_polynomial() for formula in found) and _proportional(*found) is False


@functools.lru_cache(256)
def read(text: str) -> Any | None:
    """The formula or equation as a sympy object; None if it is neither. An equation is left minus right, inside
    EQUATION. The letter i is the imaginary unit. Degrees count only inside a function of an angle."""
    if _BASE.search(text):
        return None
    try:
        found = latex2sympy(
            named_primes(bare(text)),
            convert_degrees=_ANGLE.search(text) is not None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        return _supported(found)
    except Exception:  # parser and sympy may raise anything for texts that are not formulas
        return None


def _supported(found: Any) -> Any | None:
    if isinstance(found, sympy.Basic):
        found = found.xreplace({number: sympy.Rational(str(number)) for number in found.atoms(sympy.Float)})
        found = found.subs({letter: sympy.I for letter in found.free_symbols if letter.name == "i"})
    if isinstance(found, sympy.Equality):
        found = sympy.Function(EQUATION)(found.lhs - found.rhs)
    if not isinstance(found, sympy.Expr) or found.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit):
        return None
    if len(found.free_symbols) > MAX_LETTERS or found.has(sympy.nan, sympy.zoo):
        return None
    return found


def _same_values(wanted: Any, given: Any) -> bool | None:
    if wanted.doit() == given.doit():
        return True
    equations = [_is_equation(formula) for formula in (wanted, given)]
    if any(equations):
        return _proportional(wanted.args[0], given.args[0]) if all(equations) else False
    letters = _letters(wanted, given)
    if not letters and wanted.doit().is_Rational and given.doit().is_Rational:
        return False  # exactly, since 2022! - 1 and 2022! - 2 share thousands of digits
    found = _agree(wanted, given, letters, _POINTS)
    if letters and found is False and _has_roots(wanted - given) and not _has_steps(wanted - given):
        above_0 = [abs(point) for point in _POINTS]  # letters under roots stand for lengths and such
        found = _agree(wanted, given, letters, above_0)
    return found and _same_steps(wanted, given, letters)


def _agree(wanted: Any, given: Any, letters: Sequence[Any], points: Sequence[Any]) -> bool | None:
    pairs = zip(_values(wanted, letters, points), _values(given, letters, points), strict=True)
    known = [close for a, b in pairs if (close := _close(a, b)) is not None]
    return all(known) and _vanishes(wanted - given, letters, points) if known else None


def _same_steps(wanted: Any, given: Any, letters: Sequence[Any]) -> bool:
    """Whether formulas with steps or corners, such as `|x - 100|` and `100 - x`, also agree beyond them."""
    if not letters or not (_has_steps(wanted) or _has_steps(given)):
        return True
    grows = any(
        formula.has(sympy.factorial, sympy.gamma) or any(power.exp.free_symbols for power in formula.atoms(sympy.Pow))
        for formula in (wanted, given)
    )
    points = [point for point in _WIDE if not grows or abs(float(point)) < SMALL]
    for at in range(len(points)):
        values = {letter: sympy.Rational(points[(at + 7 * n) % len(points)]) for n, letter in enumerate(letters)}
        first, second = (_number(formula.subs(values)) for formula in (wanted, given))
        if first is not None and second is not None and not _close(first, second):
            return False
    return True


def _has_steps(formula: Any) -> bool:
    def is_even(power: Any) -> bool:
        return bool(power.exp.is_even and power.base.free_symbols)

    return formula.has(
        sympy.floor, sympy.ceiling, sympy.Abs, sympy.Max, sympy.Min, sympy.sign, sympy.Mod, sympy.Piecewise
    ) or any(
        not root.exp.is_integer and any(map(is_even, root.base.atoms(sympy.Pow))) for root in formula.atoms(sympy.Pow)
    )


def _has_roots(formula: Any) -> bool:
    return any(power.exp.is_Rational and not power.exp.is_integer for power in formula.atoms(sympy.Pow))


def _vanishes(difference: Any, letters: Sequence[Any], points: Sequence[Any]) -> bool:
    """Whether a sum is 0 relative to the largest of its terms: 10^30 + x is not 10^30, though the difference is
    tiny."""
    terms = [_values(term, letters, points) for term in sympy.Add.make_args(difference)]
    known = [point for point in zip(*terms, strict=True) if None not in point]
    return all(abs(sum(point)) <= NOISE * max(abs(term) for term in point) for point in known)


def _is_equation(formula: Any) -> bool:
    return bool(formula.func.__name__ == EQUATION)


def _proportional(wanted: Any, given: Any) -> bool | None:
    """Two equations `f = 0`, `g = 0` are equivalent if f/g is a constant other than 0."""
    letters = _letters(wanted, given)
    pairs = zip(_values(wanted, letters), _values(given, letters), strict=True)
    ratios = [a / b for a, b in pairs if a is not None and b is not None and b != 0]
    if len(ratios) < 2:
        return None
    return ratios[0] != 0 and all(_close(ratio, ratios[0]) for ratio in ratios)


def _approximates(decimal: Any, exact: Any) -> bool | None:
    target = _number(decimal)
    for formula in (exact, exact.subs(sympy.pi, sympy.Rational("3.14"))):
        value = _number(formula)
        if value is None or target is None:
            return None
        if abs(value - target) <= RELATIVE * abs(value):
            return True
    return False


def _letters(*formulas: Any) -> list[Any]:
    return sorted(set().union(*(formula.free_symbols for formula in formulas)), key=str)


def _values(formula: Any, letters: Sequence[Any], points: Sequence[Any] = _POINTS) -> list[Any | None]:
    """The formula at the fixed points, each letter a different value at each; once when there are no letters."""
    sevenths = [(letter, number, sympy.Rational(number, 7)) for number, letter in enumerate(letters)]
    return [
        _number(formula.subs({letter: points[(at + n) % len(points)] + more for letter, n, more in sevenths}))
        for at in range(len(points) if letters else 1)
    ]


def _number(formula: Any) -> Any | None:
    """A formula without letters as a complex number of DIGITS digits; None when it has no finite value."""
    try:
        value = sympy.N(formula, DIGITS)
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
        return None
    if not value.is_number or not value.is_finite or value.has(sympy.Function):
        return None
    # sympy marks a result whose digits all cancelled with a precision of one bit.
    return sympy.Integer(0) if value.is_Float and value._prec == 1 else value


def _close(first: Any, second: Any) -> bool | None:
    if first is None or second is None:
        return None if first is second else False
    return bool(abs(first - second) <= NOISE * max(abs(first), abs(second)))
