"""Which tier a program starts from, what a zygote has loaded, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from rocstar.sandbox.slot import tiers
from rocstar.sandbox.slot.tiers import Chooser, Tier
from tests.sandbox.driver import Daemon
from tests.sandbox.slots import zygote

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
def test_preloaded_modules_are_there_no_thread_is_and_others_are_imported_under_default_limits() -> None:
    with Daemon(preload=("numpy", "sympy"), slots=1) as daemon:
        seen = daemon.run("import sys, threading\n'sympy' in sys.modules, threading.active_count()")
        assert seen.value == "(True, 1)"
    with Daemon(slots=1) as daemon:
        seen = daemon.run("import sys\nname = 'num' 'py'\nname in sys.modules, __import__(name).eye(4).sum() == 4")
        assert seen.value == "(False, np.True_)", seen
