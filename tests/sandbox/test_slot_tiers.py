"""Which tier a program starts from, what a zygote has loaded, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from rocstar.sandbox.slot import tiers
from rocstar.sandbox.slot.tiers import Chooser, Tier
from tests.sandbox.slots import programs, zygote

NUMPY = Tier("numpy", ("numpy",))
SYMPY = Tier("sympy", ("numpy", "sympy"))
EVERYTHING = Tier("everything", ("numpy", "sympy", "scipy", "scipy.stats"))
OWN = Tier("preload", ("shapes.flat",))
needs_sympy = pytest.mark.skipif(not importlib.util.find_spec("sympy"), reason="sympy is not installed")


@pytest.mark.parametrize(
    ("code", "tier"),
    [
        ("print(1)", tiers.BARE),
        ("import math", tiers.BARE),
        ("import numpy as np", NUMPY),
        ("from numpy.linalg import det", NUMPY),
        ("import os, numpy", NUMPY),
        ("from sympy import *", SYMPY),
        ("import mpmath", SYMPY),
        ("import numpy, sympy", SYMPY),
        ("import scipy.stats", EVERYTHING),
        ("import shapes", OWN),
        ("numpythonic = 1", tiers.BARE),
        ("__import__('base64')", OWN),
        ("import numpy, shapes", NUMPY),
    ],
)
def test_tier_follows_the_packages_a_program_names(code: str, tier: Tier) -> None:
    assert Chooser((tiers.BARE, NUMPY, OWN, SYMPY, EVERYTHING)).choose(code) == tier


def test_offered_tiers_are_those_that_can_be_imported_cheapest_first() -> None:
    offered = tiers.offered(("json", "no_such_module"))
    sizes = [len(tier.modules) for tier in offered]
    assert offered[0] is tiers.BARE  # others look for it by identity
    assert sizes == sorted(sizes)
    assert Tier("preload", ("json", "no_such_module")) in offered  # the operator is told when it cannot be had
    assert not any("no_such_module" in tier.modules for tier in tiers.offered(()))


def test_an_operators_list_that_is_one_of_ours_is_not_offered_twice() -> None:
    assert [tier.modules for tier in tiers.offered(("numpy",))].count(("numpy",)) == 1


def test_what_is_rehearsed_is_python_that_runs_or_fails_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sympy", raising=False)
    texts = set(tiers.rehearsal())
    assert "print(1)" in texts and not any("import sympy" in text for text in texts)
    for text in tiers.EVERYDAY:
        exec(compile(text, "<rehearsal>", "exec"), {})


def test_a_zygote_that_cannot_import_a_module_names_it() -> None:
    with zygote(preload=("no_such_module",)) as started:
        assert "no_such_module" in started.hello["problem"]
        assert started.process.wait(30) == 0


@needs_sympy
def test_preloaded_modules_are_there_and_no_thread_is() -> None:
    with programs(preload=("numpy", "sympy")) as started:
        seen = started.run("import sys, threading\n'sympy' in sys.modules, threading.active_count()")
        assert seen.value == "(True, 1)"
        library = "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(sp.sin(x)**2, (x, 0, sp.pi)))"
        assert started.run(library).stdout == "pi/2\n"


@needs_sympy
def test_modules_that_are_not_preloaded_can_be_imported_under_default_limits() -> None:
    with programs() as started:
        seen = started.run("import numpy\nint(numpy.linalg.det(numpy.eye(4)))", memory_bytes=512 * 2**20)
        assert seen.value == "1", seen.stderr


@pytest.mark.parametrize("compiled", [True, False])
def test_a_zygote_says_which_loop_its_slots_run(compiled: bool) -> None:
    has_compiled = importlib.util.find_spec("rocstar.sandbox.slot._fork") is not None
    with programs(compiled=compiled) as started:
        assert started.source.hello["fork_path"] == ("c" if compiled and has_compiled else "python")
        assert [started.run("1 + 1").value for _ in range(3)] == ["2", "2", "2"]
