"""The programs of `sandbox_soak`: ordinary ones whose right answer follows from their number, and the rows of
`hostile_programs`. Pure: numbers in, calls and verdicts out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import hostile_programs as hostile

from rocstar.sandbox.call import Call, Limits, Response

HOSTILE_SHARE = 0.1
PATIENT = 60.0  # seconds; a busy machine must not end a program that would end by itself
LOOP_SECONDS = 0.2
# Rows that run until their wall limit ends them.
LOOPS = (
    "endless loop ends at its limit",
    "deaf sleeper ends at its limit",
    "deep recursion ends",
    "fork bomb ends at its limit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    call: Call
    kind: str
    """Name of the ordinary program, or of the hostile row."""
    hostile: bool
    passes: Callable[[Response, str], bool]
    """Whether a response and the level in force are what this program must lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordinary:
    """A program with `{n}` for its number, and what it must lead to."""

    code: str
    weight: int
    """How often it comes, relative to the others."""
    outcome: str = "ok"
    stdout: Callable[[int], str] = lambda n: ""
    stdin: bool = False
    """Its number comes on stdin too."""
    more: Callable[[Response, int], bool] = lambda response, n: True
    """What else must hold."""


ORDINARY: Mapping[str, Ordinary] = {
    "print": Ordinary(code="print({n} ** 2)", weight=30, stdout=lambda n: f"{n**2}\n"),
    "stdin": Ordinary(code="print(int(input()) + 1)", weight=10, stdin=True, stdout=lambda n: f"{n + 1}\n"),
    "value": Ordinary(code="[{n}] * 2", weight=10, more=lambda response, n: response.value == str([n, n])),
    "work": Ordinary(
        code="print(sum(i % 7 for i in range({n} % 1000 * 20)))",
        weight=10,
        stdout=lambda n: f"{sum(i % 7 for i in range(n % 1000 * 20))}\n",
    ),
    "file": Ordinary(
        code="import os\nold = os.listdir()\nopen('f', 'w').write('{n}')\nprint(old, open('f').read())",
        weight=5,
        stdout=lambda n: f"[] {n}\n",
    ),
    "large output": Ordinary(code="print('{n} ' * 2000)", weight=5, stdout=lambda n: f"{n} " * 2000 + "\n"),
    "numpy": Ordinary(
        code="import numpy as np\nprint(int(np.arange({n} % 100).sum()))",
        weight=12,
        stdout=lambda n: f"{sum(range(n % 100))}\n",
    ),
    "sympy": Ordinary(
        code="from sympy import symbols, expand\nx = symbols('x')\nprint(expand((x + {n}) ** 2))",
        weight=5,
        stdout=lambda n: f"x**2 + {2 * n}*x + {n**2}\n",
    ),
    "raise": Ordinary(
        code="def f():\n    raise ValueError('{n}')\nf()",
        weight=8,
        outcome="exception",
        more=lambda response, n: response.exception is not None and response.exception.message == str(n),
    ),
    "exit": Ordinary(
        code="import sys\nsys.exit({n} % 200 + 1)",
        weight=5,
        outcome="exit_nonzero",
        more=lambda response, n: response.exit_code == n % 200 + 1,
    ),
}


def task(number: int, seed: int) -> Task:
    """The call of that number, 1 is the first; the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    if rng.random() < HOSTILE_SHARE:
        return hostile_task(number, rng.choice(hostile.ROWS))
    names, weights = list(ORDINARY), [kind.weight for kind in ORDINARY.values()]
    return ordinary_task(number, rng.choices(names, weights)[0])


def ordinary_task(number: int, name: str) -> Task:
    kind = ORDINARY[name]

    def passes(response: Response, level: str) -> bool:
        told = (str(response.outcome), response.stdout) == (kind.outcome, kind.stdout(number))
        return told and kind.more(response, number)

    call = Call(
        id=str(number),
        code=kind.code.replace("{n}", str(number)),
        stdin=f"{number}\n" if kind.stdin else "",
        limits=Limits(wall_seconds=PATIENT, cpu_seconds=PATIENT),
        seed=number,
    )
    return Task(call=call, kind=name, hostile=False, passes=passes)


def hostile_task(number: int, row: hostile.Row) -> Task:
    """The row with time limits that suit a soak."""
    seconds = LOOP_SECONDS if row.name in LOOPS else PATIENT
    limits: dict[str, Any] = {**(row.limits or {}), "wall_seconds": seconds, "cpu_seconds": PATIENT}
    call = Call(id=str(number), code=row.code, limits=Limits(**limits), seed=number)
    return Task(call=call, kind=row.name, hostile=True, passes=partial(is_held, row))


def is_held(row: hostile.Row, response: Response, level: str) -> bool:
    return hostile.judge(row, response, level) != "fail"
