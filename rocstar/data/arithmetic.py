"""The arithmetic task: families of problems, each with operands, phrasings, the right answer, and programs for
demonstrations, which demonstrations.py plans.

Every program copies the operands correctly: a `wrong` program has a wrong method. Mis-copied operands would teach
mis-copying, which reinforcement learning does not repair. Source: ours.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from rocstar.errors import ConfigError
from rocstar.types import Problem, problem_id, seed_for

MAX_REPEATS = 1000  # draws in a row without a new question: the family is exhausted

Operands = Mapping[str, int]
Chain = tuple[str, ...]
"""Programs run one after the other, as format strings over operands and fragments. `{out}`, which only a fragment can
contain, is the output of the previous program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    draw: Callable[[random.Random], Operands]
    """Operands of one problem."""
    solve: Callable[[Operands], int]
    """The reference answer."""
    phrasings: tuple[str, ...]
    """Questions, as format strings over operands."""
    right: tuple[Chain, ...]
    """Chains whose last output is the answer."""
    wrong: tuple[Chain, ...]
    """Chains that run and end in another number."""
    broken: tuple[str, ...]
    """Programs that raise."""
    silent: tuple[str, ...]
    """Programs that print nothing and end in an assignment, so that they have no value either."""
    fragments: Callable[[Operands], Mapping[str, str]] = lambda operands: {}
    """Pieces of program that depend on the operands."""


def digits(rng: random.Random, low: int, high: int) -> int:
    """A number of `low` to `high` decimal digits, every length equally likely: copying does not extrapolate in length,
    so each length must be practised."""
    length = rng.randint(low, high)
    return rng.randrange(10 ** (length - 1), 10**length)


def _coprime_multiples(rng: random.Random) -> Operands:
    """Two numbers of 3 or 4 digits with a common divisor of at least 11; for random pairs the guess `1` would be right
    in 60% of cases."""
    lengths = rng.randint(3, 4), rng.randint(3, 4)
    while True:
        divisor = rng.randint(11, 99)
        a, b = (divisor * rng.randint(2, 9999 // divisor) for _ in range(2))
        if a != b and (len(str(a)), len(str(b))) == lengths:
            return {"a": a, "b": b}


def _linear(rng: random.Random) -> Operands:
    a, b, x = digits(rng, 2, 2), digits(rng, 2, 3), digits(rng, 2, 3)
    return {"a": a, "b": b, "c": a * x + b}


@cache
def _primes() -> list[int]:
    """All primes of up to four digits."""
    return [n for n in range(2, 10_000) if all(n % d for d in range(2, math.isqrt(n) + 1))]


def _fibonacci(operands: Operands) -> int:
    here, following = 0, 1
    for _ in range(operands["n"]):
        here, following = following, (here + following) % operands["m"]
    return here


def _digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def _two(operands: Operands) -> int:
    product = operands["a"] * operands["b"]
    return product % operands["k"] if product % 2 else _digit_sum(product)


def _two_operands(rng: random.Random) -> Operands:
    """Even and odd products equally often, so that the branch cannot be guessed."""
    odd = rng.random() < 0.5
    while True:
        a, b = digits(rng, 2, 3), digits(rng, 2, 3)
        if a * b % 2 == odd:
            return {"a": a, "b": b, "k": digits(rng, 2, 2)}


def _two_fragments(operands: Operands) -> Mapping[str, str]:
    by_digits, by_modulo = "sum(map(int,str({out})))", f"{{out}}%{operands['k']}"
    odd = operands["a"] * operands["b"] % 2
    return {"branch": by_modulo, "other": by_digits} if odd else {"branch": by_digits, "other": by_modulo}


MUL = Family(
    name="mul",
    draw=lambda rng: {"a": digits(rng, 2, 4), "b": digits(rng, 2, 3)},
    solve=lambda o: o["a"] * o["b"],
    phrasings=("Compute {a}*{b}.", "What is {a} times {b}?", "Multiply {a} by {b}."),
    right=(("print({a}*{b})",), ("r={a}*{b}\nprint(r)",)),
    wrong=(("print({a}+{b})",), ("print({a}*{b}+{a})",)),
    broken=("print(mul({a},{b}))", "print({a} x {b})"),
    silent=("r={a}*{b}",),
)
GCD = Family(
    name="gcd",
    draw=_coprime_multiples,
    solve=lambda o: math.gcd(o["a"], o["b"]),
    phrasings=("What is the gcd of {a} and {b}?", "Compute gcd({a},{b}).", "Greatest common divisor of {a} and {b}?"),
    right=(("import math\nprint(math.gcd({a},{b}))",), ("from math import gcd\nprint(gcd({a},{b}))",)),
    wrong=(("import math\nprint(math.lcm({a},{b}))",), ("print({a}+{b})",)),
    broken=("print(math.gcd({a},{b}))", "print(gcd({a},{b}))"),
    silent=("import math\nr=math.gcd({a},{b})",),
)
POWMOD = Family(
    name="powmod",
    draw=lambda rng: {"a": digits(rng, 2, 3), "n": digits(rng, 2, 3), "m": digits(rng, 2, 3)},
    solve=lambda o: pow(o["a"], o["n"], o["m"]),
    phrasings=("Compute {a}^{n} mod {m}.", "What is {a} to the power {n} modulo {m}?"),
    right=(("print(pow({a},{n},{m}))",), ("print({a}**{n}%{m})",)),
    wrong=(("print(({a}^{n})%{m})",), ("print({a}*{n}%{m})",)),
    broken=("print(powmod({a},{n},{m}))", "print(math.pow({a},{n})%{m})"),
    silent=("r=pow({a},{n},{m})",),
)
LIN = Family(
    name="lin",
    draw=_linear,
    solve=lambda o: (o["c"] - o["b"]) // o["a"],
    phrasings=("Solve {a}*x+{b}={c} for x.", "Find x with {a}x+{b}={c}."),
    right=(("print(({c}-{b})//{a})",), ("x=({c}-{b})//{a}\nprint(x)",)),
    wrong=(("print(({c}+{b})//{a}+{b})",), ("print({c}-{b}*{a})",)),
    broken=("print(solve({a},{b},{c}))", "print(({c}-{b})/x)"),
    silent=("x=({c}-{b})//{a}",),
)
COUNT = Family(
    name="count",
    draw=lambda rng: {"k": rng.randint(3, 29), "a": digits(rng, 2, 3), "b": digits(rng, 4, 4)},
    solve=lambda o: o["b"] // o["k"] - (o["a"] - 1) // o["k"],
    phrasings=("How many multiples of {k} are in [{a},{b}]?", "Count the multiples of {k} from {a} to {b}."),
    right=(("print({b}//{k}-({a}-1)//{k})",), ("print(sum(i%{k}==0 for i in range({a},{b}+1)))",)),
    wrong=(("print(sum(i%{k} for i in range({a},{b}+1)))",), ("print(({b}-{a})%{k})",)),
    broken=("print(count({k},{a},{b}))", "print(len(multiples({k},{a},{b})))"),
    silent=("r={b}//{k}-({a}-1)//{k}",),
)
DIGSUM = Family(
    name="digsum",
    draw=lambda rng: {"a": digits(rng, 2, 3), "n": digits(rng, 2, 2)},
    solve=lambda o: _digit_sum(o["a"] ** o["n"]),
    phrasings=("What is the digit sum of {a}^{n}?", "Add up the digits of {a}^{n}."),
    right=(("print(sum(map(int,str({a}**{n}))))",), ("print(sum(int(c) for c in str({a}**{n})))",)),
    wrong=(("print(sum(map(int,str({a}*{n}))))",), ("print(len(str({a}**{n})))",)),
    broken=("print(digsum({a}**{n}))", "print(sum({a}**{n}))"),
    silent=("r=sum(map(int,str({a}**{n})))",),
)
FIB = Family(
    name="fib",
    draw=lambda rng: {"n": digits(rng, 2, 3), "m": digits(rng, 2, 3)},
    solve=_fibonacci,
    phrasings=("Compute F({n}) mod {m}.", "What is Fibonacci number {n} modulo {m}?"),
    right=(
        ("a,b=0,1\nfor i in range({n}):a,b=b,a+b\nprint(a%{m})",),
        ("a,b=0,1\nfor i in range({n}):a,b=b,(a+b)%{m}\nprint(a)",),
    ),
    wrong=(("a,b=0,1\nfor i in range({n}):a,b=b,a+b\nprint(b%{m})",), ("print({n}*{n}%{m})",)),
    broken=("print(fib({n})%{m})", "for i in range({n}):a,b=b,a+b\nprint(a%{m})"),
    silent=("a,b=0,1\nfor i in range({n}):a,b=b,a+b\nr=a%{m}",),
)
PRIMES = Family(
    name="primes",
    draw=lambda rng: {"n": rng.choice((digits(rng, 3, 3), digits(rng, 4, 4), digits(rng, 4, 4)))},
    solve=lambda o: sum(_primes()[: bisect_left(_primes(), o["n"])]),
    phrasings=("What is the sum of the primes below {n}?", "Add up all primes less than {n}."),
    right=(
        ("print(sum(p for p in range(2,{n}) if all(p%d for d in range(2,int(p**.5)+1))))",),
        ("s=set(range(2,{n}))\nfor i in range(2,100):s-=set(range(i*i,{n},i))\nprint(sum(s))",),
    ),
    wrong=(("print(sum(range(2,{n})))",), ("print(sum(p for p in range(2,{n}) if p%2))",)),
    broken=("print(sum(p for p in range({n}) if is_prime(p)))", "print(sum(primes({n})))"),
    silent=("r=sum(p for p in range(2,{n}) if all(p%d for d in range(2,int(p**.5)+1)))",),
)
TWO = Family(
    name="two",
    draw=_two_operands,
    solve=_two,
    phrasings=("Let m={a}*{b}. If m is even give the digit sum of m, else m mod {k}.",),
    right=(("print({a}*{b})", "print({branch})"),),
    wrong=(("print({a}*{b})", "print({other})"),),
    broken=("print(mul({a},{b}))", "print({a} x {b})"),
    silent=("m={a}*{b}",),
    fragments=_two_fragments,
)
SMALL = Family(  # few digits, always at the same places: a fresh model learns to copy them within seconds
    name="small",
    draw=lambda rng: {name: rng.randint(2, 9) for name in "anbc"},
    solve=lambda o: 10 + (o["a"] ** o["n"] + o["b"] * o["c"]) % 89,
    phrasings=("Compute 10+({a}^{n}+{b}*{c}) mod 89.", "What is 10 plus {a}^{n}+{b}*{c} modulo 89?"),
    right=(("print(10+({a}**{n}+{b}*{c})%89)",), ("r={a}**{n}+{b}*{c}\nprint(10+r%89)",)),
    wrong=(("print({a}**{n}+{b}*{c}%89)",), ("print(100+({a}**{n}+{b}*{c})%89)",)),
    broken=("print(10+mod({a}**{n}+{b}*{c},89))", "print(10+({a}**{n}+{b}*{c}%89)"),
    silent=("r=10+({a}**{n}+{b}*{c})%89",),
)

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (MUL, GCD, POWMOD, LIN, COUNT, DIGSUM, FIB, PRIMES, TWO, SMALL)
}


def arithmetic_problems(
    families: Sequence[str], count: int, seed: int, exclude: Set[str] = frozenset()
) -> list[Problem]:
    """`count` problems with distinct questions, the families taking turns.

    `exclude` holds ids of problems that must not appear, so that training and held-out problems never share a
    question. Metadata: `family` (name) and `operands` (name to integer). Raises ConfigError for an unknown family,
    for no family at all, and when a family has no new question left. Source: ours.
    """
    for name in families:
        if name not in FAMILIES:
            nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"data.families names {name!r}, which is unknown; the nearest is {nearest!r}.")
    if not families:
        raise ConfigError(f"data.families is empty; name at least one of {', '.join(FAMILIES)}.")
    rngs = [random.Random(seed_for(seed, "arithmetic", name)) for name in families]
    known = set(exclude)
    problems: list[Problem] = []
    for n in range(count):
        problem = _new_problem(FAMILIES[families[n % len(families)]], rngs[n % len(families)], known)
        known.add(problem.id)
        problems.append(problem)
    return problems


def _new_problem(family: Family, rng: random.Random, known: Set[str]) -> Problem:
    for _ in range(MAX_REPEATS):
        operands = family.draw(rng)
        question = rng.choice(family.phrasings).format(**operands)
        if (id_ := problem_id(question)) not in known:
            metadata = {"family": family.name, "operands": dict(operands)}
            answer = str(family.solve(operands))
            return Problem(id=id_, question=question, answer=answer, source="arithmetic", metadata=metadata)
    raise ConfigError(
        f"data.families {family.name!r} gave no new question in {MAX_REPEATS} draws; "
        "lower data.pool or evaluate.problems, or add families."
    )
