"""The exactness harness finds what it is there to find, and nothing else."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.benchmarks.test_sandbox_replay import load

exactness: Any = load("rollout_exactness")


@pytest.fixture(scope="module", params=["qwen", "qwen3_5"])
def options(request: pytest.FixtureRequest) -> argparse.Namespace:
    sizes = {"trajectories": 8, "rows": 4, "kv_tokens": 192, "at_once": 8, "seed": 1}
    return argparse.Namespace(**sizes, swaps=2, faults=1, kills=0, shape=request.param, deviation=1.5)


@pytest.fixture(scope="module")
async def records(options: argparse.Namespace) -> Any:
    found, facts = await exactness.rolled(options)
    assert facts["swaps"] == 2
    return found


def beyond(records: Any, options: argparse.Namespace) -> tuple[int, int]:
    errors = exactness.checked(records, options)
    return errors.logprob_beyond, errors.law_beyond


def changed(record: Any, **fields: Any) -> Any:
    """A record whose first completion is another."""
    (start, sampling, completion), *rest = record.completions
    return replace(record, completions=[(start, sampling, replace(completion, **fields)), *rest])


async def test_what_a_whole_engine_records_is_exact(records: Any, options: Any) -> None:
    assert beyond(records, options) == (0, 0)


async def test_a_wrong_stamp_is_found(records: Any, options: Any) -> None:
    completion = records[0].completions[0][2]
    spans = tuple(span._replace(version=span.version + 1) for span in completion.version_spans)
    logprobs, laws = beyond([changed(records[0], version_spans=spans)], options)
    assert logprobs > 0 and laws > 0


async def test_a_logprob_that_is_a_little_off_is_found(records: Any, options: Any) -> None:
    completion = records[0].completions[0][2]
    off = (completion.logprobs[0] + 3e-4, *completion.logprobs[1:])
    assert beyond([changed(records[0], logprobs=off)], options) == (1, 0)


async def test_an_id_that_was_not_drawn_is_found(records: Any, options: Any) -> None:
    ids = list(records[0].ids)
    ids[records[0].completions[0][0]] ^= 1
    assert beyond([replace(records[0], ids=ids)], options)[1] >= 1
