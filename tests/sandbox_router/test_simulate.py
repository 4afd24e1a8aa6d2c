"""Nodes that run nothing, for testing routing at sizes that one machine does not have."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.router.simulate import parse_service_time
from tests.sandbox_router.support import TOKEN, assert_all_right, run_many


async def test_a_process_of_simulated_nodes_serves_like_real_ones() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, policy=Policy(max_attempts=20, rest_seconds=0.01))
    options = ["--nodes=3", "--slots=20", "--time=uniform:0.005", "--fault-rate=0.1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rocstar.sandbox.router.simulate", "--router", router.address, "--token-file=-"),
        *options,
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(TOKEN.encode() + b"\n")
    process.stdin.close()
    await router.wait_for_nodes(3, seconds=30.0)
    assert router.info().slots == 60
    responses = await run_many(router, 1000)
    assert_all_right(responses)
    assert max(response.attempt for response in responses) > 1
    process.kill()
    await process.wait()
    router.close()


@pytest.mark.parametrize(
    ("text", "low", "high"), [("constant:2", 2, 2), ("uniform:2", 0, 4), ("exponential:2", 0, 1e9)]
)
def test_service_times_have_the_mean_they_name(text: str, low: float, high: float) -> None:
    rng, draw = random.Random(0), parse_service_time(text)
    drawn = [draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(2, rel=0.05)
    assert low <= min(drawn) and max(drawn) <= high


def test_an_unknown_service_time_is_told() -> None:
    with pytest.raises(ValueError, match="is none of"):
        parse_service_time("gamma:1")
