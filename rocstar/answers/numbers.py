"""Compare answers that are plain numbers, exactly and in microseconds; everything else is left undecided.

Covered: integers, decimals, repeating decimals, fractions, mixed numbers, powers of ten, percent, residues; with
thousands separators, dollar signs, units in \\text{} or as words, degrees and a leading `x =`. Not covered, and left to
`symbolic.py`: any arithmetic, so no tower of powers is ever evaluated here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from rocstar.answers.units import RADIAN, are_strangers, conversion, find_units, is_angle, split_unit
from rocstar.answers.wording import NO_UNIT, SCALES, without_foreign_words
from rocstar.types import Verdict

MAX_CHARS = 400  # a plain number is shorter; also bounds int() and every pattern below
MAX_EXPONENT = 400  # of ten; beyond it exact arithmetic gets slow and answers get strange
ROUNDED_PLACES = 6  # a decimal written this long is taken as rounded (math-verify also compares six places)
FLOAT_NOISE = Fraction(1, 10**9)  # relative; what a printed float may be off by
MAX_NOISY = Fraction(10**6)  # of a larger one not more: 12345678901.999999 is no 12345678901
APPROXIMATE = Fraction(1, 10**4)  # relative; of a decimal to a value that no decimal can write. Source: prime_math

_FOLDED = {0x2212: "-", 0xD7: "*", 0xB0: "\\degree", 0xA0: " "}  # minus, times, degree, no-break space
_INTEGER = re.compile(r"[+-]?\d+")
_THIN = re.compile(r"\\[!,;:]")
_NAME = re.compile(r"^([A-Za-z])\s*=\s*")
PERCENT = re.compile(r"\s*(?:\\?%|(?:\\(?:text|mathrm)\{\s*)?\b(?:percent|per cent|pct)\b\s*\}?)$")
_UNIT = re.compile(r"\s*\\(?:text|textnormal|textrm|mathrm|mbox)\{([A-Za-z ./]*)\}(?:\^\{?([23])\}?)?$")
_BARE_WORDS = re.compile(r"(?<=\d) +([a-z]{4,}(?: [a-z]{2,})*)$")  # no letters or function: `2 xyz`, `2 sin`
_SCALE = re.compile(r"\s*(?:\\(?:text|mathrm)\{\s*)?\b(?P<word>" + "|".join(SCALES) + r")s?\s*\}?$")

_ONES = "one|two|three|four|five|six|seven|eight|nine"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_VALUES = {word: value for value, word in enumerate(f"zero|{_ONES}|{_TEENS}".split("|"))}
_VALUES |= {word: 20 + 10 * at for at, word in enumerate(_TENS.split("|"))}
_WORDS = re.compile(
    rf"(?P<text>\\text\{{\s*)?(?P<words>(?:{_TENS})[ -](?:{_ONES})|{'|'.join(_VALUES)})(?![\w-])", re.IGNORECASE
)
_GREEK = "alpha|beta|gamma|delta|epsilon|zeta|theta|kappa|lambda|phi|rho|sigma|tau|omega"
_NUMERAL = r"negative|imaginary|infinite|undefined|none|sqrt|roots?|powers?|tens|quarters|\w+(?:[fln]ths|illion\w*)"
_NOT_UNITS = re.compile(rf"{NO_UNIT}|\b(?:pi|i|e|infinity|{_GREEK}|{_NUMERAL}|{'|'.join(_VALUES)})\b", re.IGNORECASE)
_BASED = re.compile(
    r"(?P<digits>[0-9A-F]{1,40})_(?:\{\s*\(?(?P<b>\d{1,2})\)?\s*\}|(?P<b2>\d)|\{?\\text\{\s*(?P<word>[a-z]+)\s*\}\}?)"
)

# Thousands by commas, spaces, apostrophes; by two and more points (one is a decimal point); lakhs and crores.
_WHOLE = r"[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+|(?:'\d{3})+|(?:\.\d{3}){2,})|[1-9]\d?(?:,\d\d)+,\d{3}|\d+"
_UNSIGNED = rf"(?:(?:{_WHOLE})(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"(?P<number>{_UNSIGNED})(?:[eE](?P<e>[+-]?\d{{1,4}}))?")
# With a bar, a dot over the first and the last digit, brackets, or a cycle written three times before an ellipsis.
_REPEATING = (
    re.compile(r"(?P<whole>\d*)\.(?P<start>\d*)(?:\\(?:overline|bar|dot)\s*\{?(?P<cycle>\d+)\}?|\((?P<closed>\d+)\))"),
    re.compile(r"(?P<whole>\d*)\.(?P<start>\d{0,20}?)(?P<cycle>\d{1,9}?)(?P=cycle){2,}\s*(?:\\[lc]?dots|\.{2,})\s*"),
)
_DOTTED = re.compile(r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?")
_RESIDUES = re.compile(
    r"(?:(?P<name>[A-Za-z])\s*(?:\\equiv|=)\s*)?"
    r"(?P<items>-?\d{1,9}(?:(?:\s|,|\bor\b|\band\b|\\text\{\s*(?:or|and)\s*\})+-?\d{1,9})*)\s*,?\s*\(?\s*"
    r"(?:\\[pb]?mod|mod|\\(?:text|mathrm|operatorname)\{\s*mod\s*\})\s*\{?\s*(?P<modulus>[1-9]\d{0,8})\s*\}?\s*\)?"
)
_TEN_POWER = re.compile(
    rf"(?:(?P<number>{_UNSIGNED})\s*(?:\\times|\\cdot|[*xX])\s*)?"
    r"10\s*\^\s*(?:\{\s*(?P<e>[+-]?\d{1,4})\s*\}|(?P<e2>-?\d{1,4}))"
)
_PART = rf"-?{_UNSIGNED}"
_FRACTION = re.compile(
    rf"(?:\\frac\s*(?:\{{\s*(?P<n>{_PART})\s*\}}|(?P<n1>\d))\s*(?:\{{\s*(?P<d>{_PART})\s*\}}|(?P<d1>\d))"
    rf"|(?P<n2>{_UNSIGNED})\s*/\s*(?P<d2>{_UNSIGNED}))"
)
_AND = r"\s*(?:\\text\{\s*and\s*\}|and)\s*"
_MIXED = re.compile(
    rf"(?P<whole>\d+)(?:{_AND}|\s*)(?P<fraction>\\frac.+)|(?P<whole2>\d+)(?:{_AND}| +)(?P<fraction2>\d+\s*/\s*\d+)"
)
_DECIMAL_COMMA = re.compile(r"(?P<whole>[1-9]\d{0,2}(?:(?:\.\d{3})+|(?: \d{3})+|(?:'\d{3})+)|\d+),(?P<part>\d+)")
_NEVER_A_NUMBER = re.compile(rf"[A-Za-z\s]+|[+-]?\d[\d\s,.']*[\s,.'][\d\s,.']*|{_BASED.pattern}")  # 2_2
_UNWRAPPED = re.compile(r"\\(?:text|mathrm|textrm)\{([^{}\\]*)\}")
_CIRCLE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])")
_STEP = re.compile(r"(?:and\b|,)?\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_MINUTES = ((re.compile(r"(?:''|\")"), " arcsec "), (re.compile(r"'"), " arcmin "))


@dataclass(frozen=True, slots=True)
class PlainNumber:
    value: Fraction
    """Exact, before a percent sign is applied."""
    places: int | None = None
    """Digits after the point when written as a decimal; None for integers and fractions, which are exact."""
    percent: bool = False
    """A percent sign followed."""
    name: str = ""
    """`x` of `x = 5`."""
    unit: str = ""
    """Words of the unit, with the powers written after them: `cm^2`, `km/h`."""
    comma: bool = False
    """Read with a decimal comma and no known unit after it, so it may also be a list of two."""
    base: int = 0
    """The base written after the digits, `204_5`; 0 for none."""


def compare_numbers(gold: str, predicted: str) -> tuple[Verdict, str] | None:
    """(verdict, method) if both sides are certainly plain numbers, or the reference is one and the prediction certainly
    is not; None if undecided. Never raises.

    Percent: `10%` agrees with both 10 and 0.1. A decimal of six places or more is taken as rounded; one of fewer only
    against a fraction without an exact decimal, within APPROXIMATE. Source: ours, after math-verify's rules."""
    if not (gold.isascii() and predicted.isascii()):
        gold, predicted = without_foreign_words(gold, predicted)
    if "mod" in gold or "mod" in predicted:
        return _compare_residues(gold, predicted)
    expected = parse_number(gold)
    if expected is None and gold[-1:].isalpha():  # a letter is a unit if both end with it, or one has a unit
        given = parse_number(predicted, letters=predicted[-1:] == gold[-1])
        expected = parse_number(gold, letters=True) if given and given.unit else None
    if expected is None:
        return None
    given = parse_number(predicted, letters=expected.unit != "")
    if given is not None:
        return _compare(expected, given)
    words = _clean(predicted)
    same = words.lower() == _UNWRAPPED.sub(r"\1", _clean(gold)).lower()  # two lines
    if not (same or expected.comma) and len(predicted) <= MAX_CHARS and _NEVER_A_NUMBER.fullmatch(words):
        return Verdict.WRONG, "not_a_number"
    return None


def parse_number(text: str, *, letters: bool = False) -> PlainNumber | None:
    """The number that a short text certainly means, else None. letters: the m of `5 m` is a unit, not a variable."""
    if len(text) > MAX_CHARS or not _fold(text).isascii():
        return None
    body = _spelled(_clean(text))
    if _INTEGER.fullmatch(body):
        return PlainNumber(Fraction(int(body)))
    named = _NAME.match(body)
    name, body = (named[1], body[named.end() :]) if named else ("", body)
    if found := _BASED.fullmatch(body):
        return _based(found, name)
    whole = body
    shorter = PERCENT.sub("", body)
    rest, unit = _split_unit(body, letters) if shorter == body else (shorter, "")
    scaled = _SCALE.search(rest)
    scale, rest = (SCALES[scaled["word"]], rest[: scaled.start()]) if scaled else (1, rest)
    number = _parse_signed(rest.strip())
    if number is None:
        return _in_steps(whole, name)
    value, places, comma = number
    single = scale != 1 or shorter != body or (comma and find_units(unit))  # 2,5 h is one quantity, 2,5 may be two
    return PlainNumber(value * scale, places, shorter != body, name, unit, comma=comma and not single)


def _based(found: re.Match[str], name: str) -> PlainNumber | None:
    """`204_5` is 54; None when a digit is not one of that base."""
    base = int(found["b"] or found["b2"] or _VALUES.get(found["word"], 0))
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in found["digits"]):
        return None
    return PlainNumber(Fraction(int(found["digits"], base)), name=name, base=base)


def _fold(text: str) -> str:
    return text if text.isascii() else text.translate(_FOLDED)


def _clean(text: str) -> str:
    body = _fold(text).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if body.startswith(opening) and body.endswith(closing) and len(body) > len(opening) + len(closing):
            body = body[len(opening) : -len(closing)].strip()
            break
    body = body.removesuffix(".")
    body = _THIN.sub("", body).replace("{,}", ",").replace("\\ ", " ").replace("~", " ")
    return body.replace("dfrac", "frac").replace("tfrac", "frac").replace("cfrac", "frac").strip()


def _spelled(body: str) -> str:
    """`\\text{twenty-five students}` -> `25\\text{ students}`."""
    if not (found := _WORDS.match(body)):
        return body
    value = sum(_VALUES[word] for word in re.split("[ -]", found["words"].lower()))
    return f"{value}{'' if found['text'] is None else chr(92) + 'text{ '}{body[found.end() :]}"


def _split_unit(body: str, letters: bool) -> tuple[str, str]:
    shorter, words = split_unit(body, bare=letters)
    if words or not (found := _UNIT.search(body) or _BARE_WORDS.search(body)) or _NOT_UNITS.search(found[1]):
        return shorter, words
    words, power = found[1].strip(), found.re is _UNIT and found[2]
    return body[: found.start()], f"{words}^{power}" if words and power else words


def _in_steps(body: str, name: str) -> PlainNumber | None:
    """`1 h 30 min`, `22^\\circ 30'`: a number in units that get smaller, as one of the first."""
    flat = _UNWRAPPED.sub(r" \1 ", _CIRCLE.sub(" degree ", body))
    if "degree" in flat:
        for sign, word in _MINUTES:
            flat = sign.sub(word, flat)
    steps = _STEP.findall(flat)
    if len(steps) < 2 or _STEP.sub("", flat).strip():
        return None
    value, before = Fraction(0), Fraction(0)
    for number, unit in steps:
        size = conversion(unit, steps[0][1])
        if not size or (before and size >= before):
            return None
        value, before = value + Fraction(number) * size, size
    return PlainNumber(value, name=name, unit=steps[0][1])


def _parse_signed(body: str) -> tuple[Fraction, int | None, bool] | None:
    """(value, decimal places, read with a comma) of an optional sign and one of the written forms."""
    sign = -1 if body.startswith("-") else 1
    if body[:1] in ("-", "+"):
        body = body[1:].lstrip()
    if found := _DECIMAL.fullmatch(body) or _TEN_POWER.fullmatch(body):
        parsed = _scaled(found)
        return (sign * parsed[0], parsed[1], False) if parsed else None
    if found := _DECIMAL_COMMA.fullmatch(body):
        whole, part = found["whole"], found["part"]
        written = f"{re.sub('[^0-9]', '', whole)}.{part}"
        return sign * Fraction(written), len(part), whole.isdigit() and part != "00"
    for read in (_fraction, _mixed, _repeating):
        if (value := read(body)) is not None:
            return sign * value, None, False
    return None


def _scaled(found: re.Match[str]) -> tuple[Fraction, int | None] | None:
    groups = found.groupdict()
    exponent = int(groups["e"] or groups.get("e2") or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    written = _ungrouped(groups["number"] or "1")
    value = _decimal(written) * Fraction(10) ** exponent
    places = len(written.partition(".")[2])
    return value, (places - exponent if "." in written or exponent < 0 else None)


def _fraction(body: str) -> Fraction | None:
    found = _FRACTION.fullmatch(body)
    if found is None:
        return None
    top = _decimal(found["n"] or found["n1"] or found["n2"])
    bottom = _decimal(found["d"] or found["d1"] or found["d2"])
    return top / bottom if bottom else None


def _mixed(body: str) -> Fraction | None:
    found = _MIXED.fullmatch(body)
    if found is None:
        return None
    part = _fraction(found["fraction"] or found["fraction2"])
    if part is None or not 0 < part < 1:
        return None
    return int(found["whole"] or found["whole2"]) + part


def _repeating(body: str) -> Fraction | None:
    r"""`0.1\overline{6}` is 1/6."""
    body = _DOTTED.sub(r"\\overline{\1\2\3}", body)
    found = next(filter(None, (pattern.fullmatch(body) for pattern in _REPEATING)), None)
    if found is None:
        return None
    start, cycle = found["start"], found["cycle"] or found["closed"]
    repeated = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(start))
    return Fraction(f"{found['whole'] or 0}.{start or 0}") + repeated


def _compare_residues(gold: str, predicted: str) -> tuple[Verdict, str] | None:
    r"""`x \equiv 3 \pmod 7` against `10 \bmod 7`; a reference `3` against `3 \pmod 7`. None where a number without a
    modulus fits a reference with one: it may be one solution of many."""
    wanted, given = _residues(gold), _residues(predicted)
    if wanted is None or given is None:
        plain = parse_number(predicted if wanted else gold)
        if plain is None or not (wanted or given):
            return None
        if wanted is None:
            return (Verdict.RIGHT if given and given[1] == {plain.value} else Verdict.WRONG), "residue"
        _, residues, modulus = wanted
        return None if any((plain.value - one) % modulus == 0 for one in residues) else (Verdict.WRONG, "residue")
    (name, residues, modulus), (other_name, others, other_modulus) = wanted, given
    classes, other_classes = {one % modulus for one in residues}, {one % other_modulus for one in others}
    if modulus != other_modulus and len(classes) * other_modulus == len(other_classes) * modulus:
        return None  # as many numbers: 0 and 2 mod 4, or 0 mod 2
    same = modulus == other_modulus and classes == other_classes and not _differ(name, other_name)
    return (Verdict.RIGHT if same else Verdict.WRONG), "residue"


def _residues(text: str) -> tuple[str, set[int], int] | None:
    """(name, residues as written, modulus)."""
    found = _RESIDUES.fullmatch(_clean(text))
    return found and (found["name"] or "", set(map(int, re.findall(r"-?\d+", found["items"]))), int(found["modulus"]))


def _decimal(written: str) -> Fraction:
    return Fraction(_ungrouped(written).removesuffix("."))


def _ungrouped(written: str) -> str:
    """Without what separates thousands."""
    digits = written.replace(",", "").replace(" ", "").replace("'", "")
    return digits.replace(".", "") if digits.count(".") > 1 else digits


def _compare(expected: PlainNumber, given: PlainNumber) -> tuple[Verdict, str] | None:
    if _differ(expected.name, given.name):
        return None
    if _differ(expected.unit, given.unit):
        return _compare_converted(expected, given)
    if (expected.percent and find_units(given.unit)) or (given.percent and find_units(expected.unit)):
        return Verdict.WRONG, "unit"
    if is_angle(given.unit) == RADIAN and not expected.unit:
        return Verdict.WRONG, "unit"  # an angle in radians that is no multiple of pi; the reference may be in degrees
    if bool(expected.base) != bool(given.base):
        # The digits or the value may be meant; the symbolic graders ignore bases.
        return (Verdict.WRONG, "unit") if expected.unit or expected.percent else None
    equal = any(are_close(expected, a, given, b) for a, b in _readings(expected, given))
    if expected.comma:
        # A comma may make a list of two: only agreement with a written decimal settles that it does not.
        settled = equal and given.places is not None and not given.comma
        return (Verdict.RIGHT, "number") if settled else None
    if given.comma:  # another number, or two of them, or thousands at the wrong place
        return (Verdict.RIGHT if equal and given.value.denominator > 1 else Verdict.WRONG), "number"
    both_whole = expected.value.denominator == 1 == given.value.denominator
    return (Verdict.RIGHT if equal else Verdict.WRONG), ("integer" if both_whole else "number")


def _compare_converted(expected: PlainNumber, given: PlainNumber) -> tuple[Verdict, str] | None:
    """Compare 5 m with 500 cm or 5 kg, 5 cats with 5 dogs. None if words may mean the same, and for degrees and
    radians."""
    factor = conversion(given.unit, expected.unit)
    if factor is None and (is_angle(given.unit) or not are_strangers(given.unit, expected.unit)):
        return None
    if not factor:
        return Verdict.WRONG, "unit"
    same = factor == 1
    first = replace(expected, unit="", places=expected.places if same else None)
    found = _compare(first, replace(given, value=given.value * factor, unit="", places=given.places if same else None))
    return (found[0], "unit") if found else None


def _differ(first: str, second: str) -> bool:
    return bool(first and second and first != second)


def _readings(expected: PlainNumber, given: PlainNumber) -> list[tuple[Fraction, Fraction]]:
    """Values to compare: `10%` is 0.1, or 10 if the sign was dropped or the question asked for percent, which it did
    not if the reference is 0.5."""
    a, b = expected.value, given.value
    if expected.percent and not given.percent:
        return [(a, b), (a / 100, b)]
    if given.percent and not expected.percent:
        return [(a, b / 100), *([(a, b)] if abs(a) > 1 else [])]
    return [(a, b)]


def are_close(expected: PlainNumber, a: Fraction, given: PlainNumber, b: Fraction) -> bool:
    """Whether values of two numbers are the same, as far as one of them is rounded."""
    if a == b:
        return True
    gap = abs(a - b)
    rounded = [n.places for n in (expected, given) if n.places is not None and n.places >= ROUNDED_PLACES]
    if rounded and (gap < Fraction(1, 10 ** min(rounded)) or gap <= min(abs(a), MAX_NOISY) * FLOAT_NOISE):
        return not a or gap <= abs(a) * APPROXIMATE
    for decimal, exact in ((expected, given), (given, expected)):
        if decimal.places is not None and exact.places is None and not _is_finite(exact.value):
            return gap < Fraction(10) ** -decimal.places and gap <= abs(a) * APPROXIMATE
    return False


def _is_finite(value: Fraction) -> bool:
    """Whether a decimal can write it exactly."""
    left = value.denominator
    for prime in (2, 5):
        while left % prime == 0:
            left //= prime
    return left == 1
