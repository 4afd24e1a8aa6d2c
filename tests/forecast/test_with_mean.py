"""Lengths with a given mean under a cap."""

from __future__ import annotations

from statistics import fmean

import pytest

from rocstar.forecast.workload import synthetic_workload, with_mean


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8, 0.97])
def test_no_response_exceeds_its_cap_whatever_the_mean(share: float) -> None:
    work = synthetic_workload("even", problems=50, attempts=8, limit=1000, seed=0)
    found = with_mean(work, 1000 * share, prompt_tokens=90)
    assert fmean(attempt.response_tokens for attempt in found) == pytest.approx(1000 * share, rel=0.02)
    assert all(attempt.response_tokens <= 1000 + len(attempt.turns) for attempt in found)
    assert fmean(attempt.prompt_tokens for attempt in found) == pytest.approx(90, rel=0.02)
