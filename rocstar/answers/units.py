"""Units that can be turned into one another, and words that are units. Data and one look-up; no arithmetic.

Not here: prefixes in general (only the usual ones are listed), temperatures (they have offsets), currencies (no fixed
rate), bare letters as in `5N`, which may as well be variables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_INCH = Fraction(254, 10_000)
_POUND = Fraction(45_359_237, 100_000_000)
_LITER = Fraction(1, 1000)

# dimension -> names of a unit -> how many base units it is (metre, gram, second, cubic metre, dollar, turn, month)
_TABLE: dict[str, dict[str, Fraction | int]] = {
    "length": {
        "mm millimeter millimetre": Fraction(1, 1000),
        "cm centimeter centimetre": Fraction(1, 100),
        "dm decimeter decimetre": Fraction(1, 10),
        "m meter metre": 1,
        "km kilometer kilometre": 1000,
        "in inch inches": _INCH,
        "ft foot feet": 12 * _INCH,
        "yd yard": 36 * _INCH,
        "mi mile": 63_360 * _INCH,
    },
    "mass": {
        "mg milligram": Fraction(1, 1000),
        "g gram": 1,
        "kg kilogram": 1000,
        "oz ounce": 1000 * _POUND / 16,
        "lb pound": 1000 * _POUND,
    },
    "time": {
        "ms millisecond": Fraction(1, 1000),
        "s sec second": 1,
        "min minute": 60,
        "h hr hour": 3600,
        "day": 86_400,
        "week": 604_800,
    },
    "months": {"month": 1, "year yr": 12},
    "volume": {"ml milliliter millilitre": _LITER / 1000, "l liter litre": _LITER, "gallon gal": 231 * _INCH**3},
    "money": {"cent": Fraction(1, 100), "dollar": 1},
    "angle": {"degree deg": 1},
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}


@dataclass(frozen=True, slots=True)
class Unit:
    dimension: str
    """What it measures, with the power of a length: `length`, `length^2`."""
    factor: Fraction
    """How many base units it is."""


def find_unit(words: str, power: int = 1) -> Unit | None:
    """The unit that `words` names, else None. `power`: an exponent that was written after it.

    "square feet" and ("ft", 2) are the same; a plural counts as its singular."""
    parts = re.sub(r"[.\s]+", " ", words).strip().lower().split(" ")
    for part in (parts[0], parts[-1]):
        if part in _POWERS and len(parts) == 2 and power == 1:
            power = _POWERS[part]
            parts.remove(part)
    if len(parts) != 1:
        return None
    found = _NAMES.get(parts[0]) or _NAMES.get(parts[0].removesuffix("s"))
    if found is None or power == 1:
        return found
    dimension = f"{found.dimension}^{power}"
    return Unit("volume" if dimension == "length^3" else dimension, found.factor**power)


_NAMES = {
    name: Unit(dimension, Fraction(factor))
    for dimension, units in _TABLE.items()
    for names, factor in units.items()
    for name in names.split()
}
