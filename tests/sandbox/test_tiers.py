"""Which tier a program starts from, and that it makes no difference to the program but time."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from rocstar.sandbox import tiers
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.tiers import Chooser, Tier
from rocstar.sandbox.wire import ProgramOutcome, Request
from tests.sandbox.support import eventually, run

NUMPY = Tier("numpy", ("numpy",))
SYMPY = Tier("sympy", ("numpy", "sympy"))
EVERYTHING = Tier("everything", ("numpy", "sympy", "scipy", "scipy.stats"))
OWN = Tier("preload", ("shapes.flat",))


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


async def test_a_tier_comes_up_when_the_first_program_needs_it(own_client: SandboxClient) -> None:
    host = psutil.Process(own_client.process.pid)
    await run(own_client, "1")
    assert len(host.children()) == 1
    response = await run(own_client, "import sys\nprint('numpy' in sys.modules)\nimport numpy")
    assert response.stdout == "True\n"
    assert len(host.children()) == 2


async def test_programs_of_other_tiers_do_not_wait_for_one_that_comes_up(own_client: SandboxClient) -> None:
    order: list[str] = []

    async def one(name: str, code: str) -> None:
        await run(own_client, code)
        order.append(name)

    await asyncio.gather(one("sympy", "import sympy"), one("bare", "1"))
    assert order == ["bare", "sympy"]


async def test_a_killed_nursery_is_replaced_with_its_slots(own_client: SandboxClient) -> None:
    assert (await run(own_client, "import numpy\n1")).value == "1"
    nurseries = psutil.Process(own_client.process.pid).children()
    for nursery in nurseries:
        nursery.kill()
    assert await asyncio.to_thread(eventually, lambda: not any(nursery.is_running() for nursery in nurseries))
    assert (await run(own_client, "2")).value == "2"
    assert (await run(own_client, "import numpy\n3")).value == "3"


@pytest.mark.parametrize("generator", ["random.random()", "numpy.random.rand()", "sympy.core.random.random()"])
async def test_generators_are_seeded_in_every_tier_and_when_imported_late(
    client: SandboxClient, generator: str
) -> None:
    package = generator.partition(".")[0]
    imports = f"import {package}{', sympy.core.random' * (package == 'sympy')}"
    hidden = f"exec(bytes.fromhex('{imports.encode().hex()}'))\neval(bytes.fromhex('{generator.encode().hex()}'))"
    programs = [f"{imports}\n{generator}", hidden]
    values = {seed: {(await run(client, code, seed=seed)).value for code in programs} for seed in (1, 1, 2)}
    assert all(len(seen) == 1 for seen in values.values())
    assert values[1] != values[2]


async def test_without_a_seed_every_call_draws_its_own(client: SandboxClient) -> None:
    responses = [await client.run(Request(id="r", code="import random\nrandom.random()")) for _ in range(3)]
    assert len({response.value for response in responses}) == 3


async def test_forks_of_a_program_draw_other_numbers_than_the_program(client: SandboxClient) -> None:
    code = """
import os, random
source, sink = os.pipe()
if os.fork() == 0:
    os.write(sink, repr(random.random()).encode())
    os._exit(0)
print(os.read(source, 100).decode() != repr(random.random()))
"""
    assert (await run(client, code)).stdout == "True\n"


async def test_preloading_starts_no_thread_in_the_compiled_path(client: SandboxClient) -> None:
    response = await run(client, "import threading, sympy, numpy\nthreading.active_count()")
    assert response.value == "1"


async def test_an_import_of_the_heavy_kind_succeeds_under_the_smallest_limits(client: SandboxClient) -> None:
    code = "import numpy, sympy\nint(numpy.linalg.det(numpy.eye(3)))"
    response = await run(client, code, memory_bytes=16 * 2**20, processes=1)
    assert (response.outcome, response.value) == (ProgramOutcome.OK, "1")
