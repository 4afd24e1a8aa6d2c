"""Costs of an engine, found again from what it measured; engines of the simulator and one real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from rocstar.errors import DataError  # noqa: E402
from rocstar.forecast.engine_model import COSTS, EngineModel, with_costs  # noqa: E402
from rocstar.forecast.fit import Trial, fit, nonnegative  # noqa: E402
from rocstar.forecast.policies import LeastRequests  # noqa: E402
from rocstar.forecast.simulate import simulate  # noqa: E402
from rocstar.forecast.workload import PlannedAttempt, planned, shrunk, synthetic_workload  # noqa: E402

SIZES = with_costs(
    EngineModel(
        capacity_tokens=2048,
        step_seconds=0.0,
        seconds_per_cached_token=0.0,
        seconds_per_sequence=0.0,
        seconds_per_prefill_token=0.0,
        chunk_tokens=32,
        most_running=16,
        watermark=0.0,
        page_tokens=16,
        patience_seconds=1.0,
        oldest_first=True,
    ),
    [0.0] * len(COSTS),
)


def designed(longest: int) -> list[list[PlannedAttempt]]:
    """Workloads for one engine that tell its costs apart: alone, in small and large batches, with short and long
    contexts, with much to feed while most wait for room, and with many short turns. `longest`: most tokens of one
    attempt, of which the cache holds fourteen. Nobody gives way."""
    short, some, long = longest // 16, longest // 4, longest // 2
    return [
        *(_alike(count, short, (some,)) for count in (1, 4, 16)),
        *(_alike(count, long, (longest - long - short,)) for count in (1, 14)),
        _alike(48, long, (1,)),
        _alike(4, short, (1,) * some),
        _alike(4, short, tuple(range(1, 1 + short // 2))),
    ]


def _alike(count: int, prompt: int, sampled: Sequence[int]) -> list[PlannedAttempt]:
    """Attempts of different problems, with one token of reply between turns and no wait."""
    limit, lengths = sum(sampled) + len(sampled), [(tokens, 1) for tokens in sampled]
    return [planned(f"{place}", prompt, lengths, wait=0.0, limit=limit) for place in range(count)]


costs = st.tuples(
    st.floats(1e-4, 1e-2), st.floats(1e-8, 1e-5), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(1e-5, 1e-2)
)


def measured(model: EngineModel, longest: int = 64) -> list[Trial]:
    trials = []
    for attempts in designed(longest):
        ends = simulate(attempts, {"engine0": model}, LeastRequests()).ends
        trials.append(Trial(attempts=attempts, ends=ends))
    return trials


@settings(deadline=None, max_examples=8)
@given(costs)
def test_the_designed_workloads_tell_all_costs_apart(true: tuple[float, ...]) -> None:
    found, errors = fit(SIZES, measured(with_costs(SIZES, true)))
    assert [getattr(found, name) for name in COSTS] == pytest.approx(true, rel=1e-3)
    assert max(map(abs, errors)) < 1e-6


REAL = (2e-3, 1e-7, 3e-5, 2e-5, 1e-3)  # about what a small torch engine on one core costs


def test_what_was_fitted_with_noise_predicts_other_workloads() -> None:
    """Of their sum: when the last of a few attempts ends is partly luck, which small changes of a cost turn."""
    rng, model = np.random.default_rng(0), with_costs(SIZES, REAL)
    trials = measured(model, 128) * 3
    noisy = [replace(trial, ends=tuple(np.array(trial.ends) * rng.normal(1, 0.02))) for trial in trials]
    found, _ = fit(SIZES, noisy)
    predicted, truly = (
        sum(
            simulate(small_workload("spread", seed), {"engine0": each, "engine1": each}, LeastRequests()).makespan
            for seed in range(4)
        )
        for each in (found, model)
    )
    assert predicted == pytest.approx(truly, rel=0.05)


def small_workload(lengths: str, seed: int) -> list[PlannedAttempt]:
    drawn = synthetic_workload(lengths, problems=6, attempts=8, limit=1600, seed=seed, tool_seconds=0.01)
    return shrunk(drawn, 16)


def test_costs_come_out_of_a_step_with_tools_on_two_engines() -> None:
    model = with_costs(SIZES, REAL)
    trials = []
    for seed in range(2):
        work = small_workload("even", seed)
        ends = simulate(work, {"engine0": model, "engine1": model}, LeastRequests()).ends
        trials.append(Trial(attempts=work, ends=ends, engines=2, scheduler=LeastRequests))
    _, errors = fit(SIZES, trials)
    assert max(map(abs, errors)) < 0.03


def test_without_a_measured_time_there_is_nothing_to_fit() -> None:
    with pytest.raises(DataError, match="took some time"):
        fit(SIZES, [])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=3, max_size=6), st.integers(0, 99))
def test_no_other_point_without_a_negative_is_nearer(rows: list[list[float]], seed: int) -> None:
    rng, matrix = np.random.default_rng(seed), np.array(rows)
    target = rng.normal(size=len(rows))
    found = nonnegative(matrix, target)
    others = np.abs(rng.normal(size=(20, 3)))
    least = np.sum((matrix @ found - target) ** 2)
    assert (found >= 0).all()
    assert all(least <= np.sum((matrix @ other - target) ** 2) + 1e-9 for other in (*others, np.zeros(3)))
