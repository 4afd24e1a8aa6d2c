"""`rocstar simulate` under the sizes and costs that are given."""

from __future__ import annotations

import json

import pytest

from rocstar.cli.main import run as command
from rocstar.forecast.engine_model import EngineModel, torch_engine
from rocstar.forecast.policies import LeastRequests
from rocstar.forecast.simulate import alike, simulate_steps
from rocstar.forecast.workload import synthetic_workload


def test_the_last_step_is_shown_under_the_options_given(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--problems", "4", "--attempts", "8", "--cap", "400", "--steps", "2", "--engines", "2", "--seed", "3")
    given = ("--capacity", "4000", "--most-running", "8", "--step-seconds", "1", "--prefill-token-seconds", "0")
    none = ("--cached-token-seconds", "0", "--sequence-seconds", "0", "--request-seconds", "2")
    assert command(["simulate", *sizes, *given, *none, "--policies", "least-requests", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = EngineModel(capacity_tokens=4000, most_running=8, step_seconds=1.0, seconds_per_request=2.0)
    work = [synthetic_workload("even", problems=4, attempts=8, limit=400, seed=seed) for seed in (3, 4)]
    expected = simulate_steps(work, alike(model, 2), LeastRequests())[-1]
    (row,) = found["policies"]
    assert (row["makespan_seconds"], row["moves"]) == (pytest.approx(expected.makespan, abs=1e-3), expected.moves)
    assert row["produced_tokens"] == sum(attempt.sampled_tokens for attempt in work[1])
    assert found["engines"] == 2 and found["engine"]["seconds_per_request"] == 2


def test_the_torch_engine_is_simulated_with_its_own_sizes() -> None:
    pytest.importorskip("torch")
    from rocstar.engines.pages import PAGE
    from rocstar.engines.torch_decoder import PREFILL_TOKENS
    from rocstar.engines.torch_engine import PATIENCE_SECONDS

    model = torch_engine(capacity_tokens=1, most_running=1)
    assert (model.page_tokens, model.chunk_tokens, model.patience_seconds) == (PAGE, PREFILL_TOKENS, PATIENCE_SECONDS)
