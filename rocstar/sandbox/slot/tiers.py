"""Tiers: sets of preloaded modules that a program may be started from, and how a tier's zygote warms them up. Pure
decisions: text in, tier out.

Forking a process with numpy loaded takes longer than forking a bare one, and importing numpy takes a hundred times as
long as either. A wrong guess costs only time or memory: the program imports missing modules, or has unneeded ones.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

OFFERED = {"numpy": ("numpy",), "sympy": ("numpy", "sympy")}
EVERYTHING = ("numpy", "sympy", "scipy", "pandas", "networkx", "sklearn", "statsmodels")
PARTS = {"scipy": ("scipy.integrate", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats")}
COMES_WITH = {"mpmath": "sympy"}
# The text of such a program does not show all of its imports.
HIDDEN = re.compile(r"\b(?:__import__|importlib|exec|eval|b64decode)\b")


class Tier(NamedTuple):
    name: str
    modules: tuple[str, ...]
    """Modules that its zygote imports, in this order."""

    @property
    def packages(self) -> frozenset[str]:
        return frozenset(module.partition(".")[0] for module in self.modules)


BARE = Tier("bare", ())


def offered(preload: Sequence[str]) -> tuple[Tier, ...]:
    """All tiers of this machine, cheapest first, skipping those with missing modules. `preload`: the operator's own
    list, an additional tier unless it equals one of ours."""
    parts = (part for name in EVERYTHING if installed(name) for part in (name, *PARTS.get(name, ())))
    tiers = {frozenset[str](): BARE}
    for name, modules in (("preload", tuple(preload)), *OFFERED.items(), ("everything", tuple(parts))):
        if name == "preload" or all(map(installed, modules)):
            tiers.setdefault(frozenset(modules), Tier(name, modules))
    return tuple(sorted(tiers.values(), key=lambda tier: len(tier.modules)))


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def chooser(tiers: Sequence[Tier]) -> Callable[[str], Tier]:
    """What picks one of these tiers by the names of packages in a program's text: the cheapest with every named
    package, else the one with most of them."""
    covered = {tier: tier.packages for tier in tiers}
    names = frozenset[str]().union(*covered.values())
    aliases = {alias for alias, package in COMES_WITH.items() if package in names}
    words = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, names | aliases)))})\b") if names else None
    hidden = next((tier for tier in tiers if tier.name == "preload"), BARE)

    def choose(code: str) -> Tier:
        found = set(words.findall(code)) if words else set()
        if not found:
            return hidden if hidden is not BARE and HIDDEN.search(code) else tiers[0]
        needed = {COMES_WITH.get(name, name) for name in found}
        return max(tiers, key=lambda tier: (len(needed & covered[tier]), -len(tier.modules)))

    return choose


# The warm-up that a zygote does once for all programs: run common code paths and fill the caches of libraries. Results
# are thrown away; if a line fails with a newer library, programs only take longer.

ROUNDS = 12  # Python rewrites the instructions of a function that was run about eight times; every write costs a page
EVERYDAY = (
    "print(1)",
    "import math\nprint(math.gcd(12, 18))",
    "def f(x):\n    return x * 2\nprint(f(2), [f(n) for n in range(3)])\nf(3)",
    "x = {'a': 1.5}\nfor k, v in x.items():\n    print(f'{k}={v:.2f}', sorted(x))\nx",
    "import sys\nprint(sys.version_info[0], file=sys.stderr)\nif 1: pass",
)
FAILING = (
    "def f():\n    return 1 / 0\nf()",
    "x = = 1",
    "raise ValueError('no')",
    "import no_such_module",
    "raise SystemExit(1)",
)
# module: a program with the most used functions of it.
LIBRARIES = {
    "numpy": """
import numpy as np
a = np.eye(3) + np.arange(9.0).reshape(3, 3)
np.linalg.det(a), np.linalg.inv(a), np.linalg.solve(a, np.ones(3)), np.linalg.eigvals(a), np.linalg.norm(a)
repr(a), str(np.float64(1.5)), a @ a.T, a.sum(axis=0).mean(), np.random.rand(2), np.array([1, 2]).tolist()
np.polyfit([0, 1, 2], [1, 2, 5], 1), np.roots([1, -3, 2]), np.where(a > 1, a, 0)
""",
    "sympy": """
import sympy as sp
x, y, n = sp.symbols("x y n")
sp.integrate(sp.sin(x) ** 2, (x, 0, 1)), sp.integrate(x * sp.exp(x), x), sp.diff(sp.log(x) * x, x)
sp.solve(x**2 - 3 * x + 2, x), sp.solve([x + y - 3, x - y - 1], [x, y]), sp.solve(x**3 - 2 * x - 4)
sp.simplify((x**2 - 1) / (x - 1)), sp.factor(x**3 - 1), sp.expand((x + y) ** 3), sp.limit(sp.sin(x) / x, x, 0)
sp.Matrix([[1, 2], [3, 4]]).inv(), sp.Rational(3, 4) + sp.sqrt(2), sp.N(sp.pi, 20), sp.factorint(360)
sp.summation(n, (n, 1, 10)), sp.series(sp.cos(x), x, 0, 4), sp.gcd(12, 18), sp.nsimplify(0.25), sp.isprime(97)
str(sp.sqrt(8) / 2), repr(x**2 + 1), sp.latex(x / y), sp.sympify("2*x + 1"), (x > 1), sp.trigsimp(sp.sin(x) ** 2)
""",
    "scipy": """
import scipy.integrate, scipy.linalg, scipy.optimize, scipy.special, scipy.stats
scipy.integrate.quad(lambda t: t * t, 0, 1), scipy.optimize.brentq(lambda t: t - 0.5, 0, 1)
scipy.optimize.minimize(lambda t: (t[0] - 1) ** 2, [0.0]), scipy.special.comb(5, 2, exact=True)
scipy.stats.norm.cdf(1.0), scipy.stats.binom.pmf(1, 3, 0.5)
""",
    "pandas": """
import pandas as pd
frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "x"]})
frame.groupby("b").a.sum(), repr(frame), frame.describe(), frame.sort_values("a").iloc[0]
""",
}


def warm_up_programs() -> Iterator[str]:
    """The programs to run, for the loaded modules."""
    for name, code in LIBRARIES.items():
        if name in sys.modules:
            yield code
    for _ in range(ROUNDS):
        yield from EVERYDAY + FAILING
