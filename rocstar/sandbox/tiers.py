"""Which preloaded modules a program should be started from. Pure decisions: text in, tier out.

A fork of a process that has numpy loaded costs more than one of a bare process, and importing numpy costs a hundred
times more than that. A wrong guess is never wrong for the program: it imports what it misses, or has more than it
needs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

OFFERED = {"numpy": ("numpy",), "sympy": ("numpy", "sympy")}
EVERYTHING = ("numpy", "sympy", "scipy", "pandas", "networkx", "sklearn", "statsmodels")
PARTS = {"scipy": ("scipy.integrate", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats")}
COMES_WITH = {"mpmath": "sympy"}
# The imports of such a program cannot be read off its text.
HIDDEN = re.compile(r"\b(?:__import__|importlib|exec|eval|b64decode)\b")


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    modules: tuple[str, ...]
    """What its nursery imports, in this order."""

    @property
    def packages(self) -> frozenset[str]:
        return frozenset(module.partition(".")[0] for module in self.modules)


BARE = Tier("bare", ())


def offered(preload: Sequence[str]) -> tuple[Tier, ...]:
    """All tiers of this machine, cheapest first; one without all its modules installed is left out. `preload`: the
    operator's own list, a tier of its own unless it is one of ours."""
    everything = tuple(name for name in EVERYTHING if installed(name))
    modules = tuple(part for name in everything for part in (name, *PARTS.get(name, ())))
    lists = {"bare": (), **{name: wanted for name, wanted in OFFERED.items() if all(map(installed, wanted))}}
    lists["everything"] = modules
    own = tuple(preload)
    if own:
        lists = {name: wanted for name, wanted in lists.items() if set(wanted) != set(own)} | {"preload": own}
    tiers = {wanted: Tier(name, wanted) if wanted else BARE for name, wanted in reversed(lists.items())}
    return tuple(sorted(tiers.values(), key=lambda tier: len(tier.modules)))


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class Chooser:
    """Picks the tier by the names of packages in a program's text."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers
        names = {name for tier in tiers for name in tier.packages}
        self.covered = {tier: tier.packages for tier in tiers}
        aliases = {alias for alias, package in COMES_WITH.items() if package in names}
        words = sorted(map(re.escape, names | aliases))
        self.words = re.compile(rf"\b(?:{'|'.join(words)})\b") if words else None
        self.hidden = next((tier for tier in tiers if tier.name == "preload"), BARE)

    def choose(self, code: str) -> Tier:
        """The cheapest tier that has every package named, else the one that has most of them."""
        found = set(self.words.findall(code)) if self.words else set()
        if not found:
            return self.hidden if self.hidden is not BARE and HIDDEN.search(code) else self.tiers[0]
        wanted = {COMES_WITH.get(name, name) for name in found}
        return max(self.tiers, key=lambda tier: (len(wanted & self.covered[tier]), -len(tier.modules)))
