"""Units that can be turned into one another: which a text ends with, what they measure, how many base units they are.

Not here: temperatures of different scales and currencies convert into nothing else (offsets, no fixed rates), but they
are distinguished; a bare letter, as in `5N`, is a unit only if the caller allows it, since it may also be a variable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

_INCH = Fraction(254, 10_000)
_POUND = Fraction(45_359_237, 100_000_000)
_LITER = Fraction(1, 1000)
DEGREE, RADIAN = "degree", "rad"
MAX_SYMBOL = 2  # letters
MAX_FACTORS = 6  # of one unit; the readings of ambiguous names multiply

# names -> (base units with their powers, how many of them it is). A name may stand twice: a pound is two things.
_TABLE: tuple[tuple[str, str, Fraction | int], ...] = (
    ("in inch inches", "m", _INCH),
    ("ft foot feet", "m", 12 * _INCH),
    ("yd yard", "m", 36 * _INCH),
    ("mi mile", "m", 63_360 * _INCH),
    ("oz ounce", "g", 1000 * _POUND / 16),
    ("lb lbs pound", "g", 1000 * _POUND),
    ("tonne", "g", 1_000_000),
    ("sec", "s", 1),
    ("min minute", "s", 60),
    ("h hr hour", "s", 3600),
    ("day", "s", 86_400),
    ("week", "s", 604_800),
    ("month", "month", 1),
    ("year yr", "month", 12),
    ("Nm", "g m2 s-2", 1000),
    ("mph", "m s-1", 63_360 * _INCH / 3600),
    ("kmh kph", "m s-1", Fraction(1000, 3600)),
    ("gallon gal", "m3", 231 * _INCH**3),
    ("cc", "m3", Fraction(1, 10**6)),
    ("ha hectare", "m2", 10_000),
    ("dollar usd", "dollar", 1),
    ("euro eur", "euro", 1),
    ("gbp pound quid", "sterling", 1),
    ("cent", "dollar", Fraction(1, 100)),
    ("cent", "euro", Fraction(1, 100)),
    ("p pence", "sterling", Fraction(1, 100)),
    ("inr rupee rs", "rupee", 1),
    ("jpy yen", "yen", 1),
    ("cny rmb yuan", "yuan", 1),
    ("degree deg", DEGREE, 1),
    ("arcmin arcminute", DEGREE, Fraction(1, 60)),
    ("arcsec arcsecond", DEGREE, Fraction(1, 3600)),
    ("rad radian", RADIAN, 1),
    ("unit", "unit", 1),
    ("celsius", "celsius", 1),
    ("fahrenheit", "fahrenheit", 1),
)
# The same for units that take the prefixes below: symbol, words, base units, factor.
_PREFIXED: tuple[tuple[str, str, str, Fraction | int], ...] = (
    ("m", "meter metre", "m", 1),
    ("g", "gram gramme", "g", 1),
    ("s", "second", "s", 1),
    ("L l", "liter litre", "m3", _LITER),
    ("N", "newton", "g m s-2", 1000),
    ("J", "joule", "g m2 s-2", 1000),
    ("W", "watt", "g m2 s-3", 1000),
    ("Wh", "watthour", "g m2 s-2", 3_600_000),
    ("Pa", "pascal", "g m-1 s-2", 1000),
    ("Hz", "hertz", "s-1", 1),
    ("A", "ampere amp", "A", 1),
    ("V", "volt", "g m2 s-3 A-1", 1000),
    ("K", "kelvin", "K", 1),
    ("mol", "mole", "mol", 1),
    ("ohm", "ohm", "g m2 s-3 A-2", 1000),
    ("T", "tesla", "g s-2 A-1", 1000),
    ("", "coulomb", "s A", 1),
    ("bar", "bar", "g m-1 s-2", 10**8),
    ("cal", "calorie", "cal", 1),
    ("eV", "electronvolt", "eV", 1),
)
_PREFIXES = (
    ("", "", Fraction(1)), ("k", "kilo", Fraction(1000)), ("m", "milli", Fraction(1, 1000)),
    ("c", "centi", Fraction(1, 100)), ("d", "deci", Fraction(1, 10)), ("M", "mega", Fraction(10**6)),
    ("G", "giga", Fraction(10**9)), ("u", "micro", Fraction(1, 10**6)), ("n", "nano", Fraction(1, 10**9)),
)  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}

_WRAPPED = re.compile(r"\\(?:text|textnormal|textrm|mathrm|mbox|operatorname|rm)\s*\{([^{}\\]*)\}")
_BRACED_POWER = re.compile(r"\^\s*\{\s*(-?\d)\s*\}")
_QUOTIENT = re.compile(r"\\frac\{([^{}\d]*(?:\^-?\d)?)\}\{([^{}\d]*(?:\^-?\d)?)\}\s*$")
_GAP = re.compile(r"\\[,;:! ]|[~\s]+")
_TIMES = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|·")
_FACTOR = re.compile(r"[ *]*(?:(/|per\b)[ *]*)?([A-Za-z]+)\.?(?:\^(-?\d))?")
_START = re.compile(r"(?<![A-Za-z\\^_])[A-Za-z]")
_MICRO = re.compile(r"\\mu\s*(\\(?:text|mathrm)\{)\s*|(?<=\{)\s*\\mu\s*|(?<=\d)\s*\\mu\s*(?=[A-Za-z]{1,3}$)")
_OHMS = re.compile(r"(?<![A-Za-z])([kmMGun]?) *\\Omega(?![A-Za-z])")
_SPEED = re.compile(r"(?<=\d )m/s(?:\^2)?$")
_SCALE_OF_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:\\(?:text|mathrm)\{\s*)?([CF])\s*\}?$")
_DEGREE_SIGN = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))$")
_BEFORE = re.compile(
    r"^([+-]?)\s*(?:\\(?:text|mathrm|textrm)\{\s*)?(?P<unit>US ?\\?\$|\\?\$|USD|EUR|GBP|INR|JPY|CNY|RMB|Rs\b\.?)"
    r"\s*\}?\s*(?=[-+.\d\\])(?P<rest>.+)$",
    re.DOTALL,
)
_DOLLAR_AFTER = re.compile(r"(?<![$\\])\\?\$$")
_WORD = re.compile(r"[^\x00-@\[-`{-\x7f]+")  # letters, all that is not ASCII
_ANY = {"unit", "u", "item", "piece", "time", "point"}
_SCALE_WORDS = re.compile(r"degrees? (?=celsius|fahrenheit)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Unit:
    dimension: tuple[tuple[str, int], ...]
    """What it measures: base units with their powers, in order of their names."""
    factor: Fraction
    """How many base units it is."""


def split_unit(text: str, *, bare: bool = False) -> tuple[str, str]:
    """(text before the unit, words of the unit) of `20\\text{ m/s}`, `\\$20`, `30^\\circ`; ("the text", "") where it
    ends with no unit that is known. bare: single letters without a command around them count."""
    if found := _SCALE_OF_DEGREES.search(text):
        return text[: found.start()].strip(), {"C": "celsius", "F": "fahrenheit"}[found[1]]
    if found := _DEGREE_SIGN.search(text):
        return text[: found.start()].strip(), DEGREE
    if text.count("$") < 2 and (found := _BEFORE.match(text)):
        body = _DOLLAR_AFTER.sub("", found[1] + found["rest"].strip())
        inner, words = split_unit(body, bare=bare)
        money = "dollar" if "$" in found["unit"] else found["unit"].strip(".")
        rate = f"{money} {words}" if words.startswith(("per ", "/")) else words
        return (inner, rate) if words else (body, money)
    if text.count("$") == 1 and (found := _DOLLAR_AFTER.search(text)):
        return text[: found.start()].strip(), "dollar"
    return _split_words(text, bare=bare)


def _split_words(text: str, *, bare: bool) -> tuple[str, str]:
    if not text or not (text[-1].isalnum() or text[-1] in "}."):
        return text, ""
    flat = _BRACED_POWER.sub(r"^\1", _MICRO.sub(r"\1u", text))
    plain = _GAP.sub(" ", _TIMES.sub("*", _QUOTIENT.sub(r" \1/\2", _WRAPPED.sub(r" \1", flat)))).strip()
    plain = _WRAPPED.sub(r" \1", _OHMS.sub(r" \1ohm", plain)).replace("  ", " ")
    explicit = bare or _WRAPPED.search(flat) is not None or _SPEED.search(plain) is not None
    for found in _START.finditer(plain):
        words, body = plain[found.start() :], plain[: found.start()].strip(" *")
        if (explicit or re.search(r"[A-Za-z]{2}", words)) and body and find_units(words):
            return body, words
    return text, ""


def find_units(words: str) -> tuple[Unit, ...]:
    """The units that `words` may name, none where a part of it is unknown: "square feet", "ft^2", "km/h", "m s^-2",
    "miles per hour". A plural counts as its singular."""
    factors: list[tuple[tuple[Unit, ...], int]] = []
    at, sign, next_power = 0, 1, 1
    words = _SCALE_WORDS.sub("", words.strip().rstrip("."))
    while at < len(words) and len(factors) <= MAX_FACTORS:
        found = _FACTOR.match(words, at)
        if found is None or found.end() == at:
            return ()
        at, word = found.end(), found[2]
        sign = -1 if found[1] else sign
        if word.lower() in _POWERS:
            next_power = _POWERS[word.lower()]
        elif word.lower() in _POWERS_AFTER and factors:
            factors[-1] = (factors[-1][0], factors[-1][1] * _POWERS_AFTER[word.lower()])
        elif known := _named(word):
            factors.append((known, sign * next_power * int(found[3] or 1)))
            next_power = 1
        else:
            return ()
    if not 0 < len(factors) <= MAX_FACTORS or next_power != 1:
        return ()
    chosen = product(*(known for known, _ in factors))
    return tuple(_multiplied(zip(units, (power for _, power in factors), strict=True)) for units in chosen)


def conversion(first: str, second: str) -> Fraction | None:
    """How many of `second` one of `first` is; 0 where they measure different things, None where one is unknown and no
    symbol, and for degrees and radians, whose ratio is no fraction."""
    ours, others = find_units(first), find_units(second)
    if ours and others and (_lengths(ours) or _lengths(others)) is not None and "unit" in f"{first} {second}":
        return None if _lengths(ours) == _lengths(others) else Fraction(0)
    if bool(ours) != bool(others) and len(second if ours else first) <= MAX_SYMBOL:
        return Fraction(0)
    if not ours or not others or {is_angle(first), is_angle(second)} == {DEGREE, RADIAN}:
        return None
    factors = [one.factor / other.factor for one in ours for other in others if one.dimension == other.dimension]
    return factors[0] if factors else Fraction(0)


def _lengths(units: tuple[Unit, ...]) -> int | None:
    """2 of square metres and square units; None for anything else."""
    powers = [unit.dimension[0][1] for unit in units if [base for base, _ in unit.dimension] in (["m"], ["unit"])]
    return powers[0] if powers else None


def are_strangers(first: str, second: str) -> bool:
    """Whether words, not both known as units, name different things, cats and dogs or a loss and a
    profit: each has one that the other lacks. "units" may be anything."""
    ours, others = ({word.lower().removesuffix("s") for word in _WORD.findall(words)} for words in (first, second))
    if first.isascii() != second.isascii() and (find_units(first) or find_units(second)):
        return False  # one may translate the other
    return bool(ours - others and others - ours) and not (ours | others) & _ANY


def is_angle(words: str) -> str:
    """DEGREE or RADIAN where the words name one of these, else ""."""
    units = find_units(words)
    base = units[0].dimension[0][0] if units and len(units[0].dimension) == 1 else ""
    return base if base in (DEGREE, RADIAN) else ""


def _multiplied(factors: Iterable[tuple[Unit, int]]) -> Unit:
    powers: Counter[str] = Counter()
    size = Fraction(1)
    for unit, power in factors:
        for base, count in unit.dimension:
            powers[base] += count * power
        size *= unit.factor**power
    return Unit(tuple(sorted((base, count) for base, count in powers.items() if count)), size)


def _named(word: str) -> tuple[Unit, ...]:
    for spelled in (word, word.lower(), word.lower().removesuffix("s")):
        if spelled in _NAMES and (spelled == word or len(word) > 1):
            return _NAMES[spelled]
    return ()


def _dimension(bases: str) -> tuple[tuple[str, int], ...]:
    parts = (re.fullmatch(r"([A-Za-z]+)(-?\d)?", part) for part in bases.split())
    return tuple(sorted((found[1], int(found[2] or 1)) for found in parts if found))


def _all_names() -> dict[str, tuple[Unit, ...]]:
    names: dict[str, tuple[Unit, ...]] = {}
    for symbols, words, bases, factor in _PREFIXED:
        for symbol, word, size in _PREFIXES:
            unit = Unit(_dimension(bases), Fraction(factor) * size)
            for name in [symbol + one for one in symbols.split()] + [word + one for one in words.split()]:
                names[name] = (unit,)
    for listed, bases, factor in _TABLE:
        for name in listed.split():
            names[name] = (*names.get(name, ()), Unit(_dimension(bases), Fraction(factor)))
    return names


_NAMES = _all_names()
