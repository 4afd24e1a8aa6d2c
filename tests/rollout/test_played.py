"""Planned attempts on the torch engine, and the simulator beside it: the same steps, evictions and tokens fed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

from rocstar.engines.pages import PAGE
from rocstar.engines.torch_decoder import PagedDecoder
from rocstar.engines.torch_table import Work
from rocstar.forecast.engine_model import torch_engine, with_costs
from rocstar.forecast.policies import RoundRobin
from rocstar.forecast.simulate import simulate
from rocstar.forecast.workload import PlannedAttempt, TurnLengths, shrunk, synthetic_workload
from rocstar.types import Sampling
from tests.engines.models import VOCAB, qwen

POSITIONS, PAGES, ROWS = 128, 24, 16


def alone(seed: int) -> list[PlannedAttempt]:
    """Uneven attempts of one turn."""
    drawn = synthetic_workload("spread", problems=4, attempts=6, limit=1600, seed=seed)
    return [
        PlannedAttempt(
            group=each.group,
            prompt_tokens=each.prompt_tokens,
            turns=(TurnLengths(min(90, sum(turn.sampled_tokens for turn in each.turns)), 0, 0.0),),
            limit=100,
        )
        for each in shrunk(drawn, 16)
    ]


def stepped(decoder: PagedDecoder, attempts: Sequence[PlannedAttempt]) -> int:
    """All at once; the number of steps until the last has ended."""
    for number, plan in enumerate(attempts):
        ids = tuple((int(plan.group[-1]) + place * place) % VOCAB for place in range(plan.prompt_tokens))
        sampling = Sampling(max_new_tokens=plan.turns[0].sampled_tokens, seed=number)
        decoder.submit(Work(request_id=f"{number}", session_id=f"{number}", token_ids=ids, sampling=sampling))
    steps = 0
    while decoder.active or decoder.waiting:
        steps += 1
        for work, _ in decoder.step():
            decoder.close_session(work.session_id)
    return steps


def test_the_simulated_torch_engine_takes_about_the_steps_of_the_real_one() -> None:
    """Over several workloads under pressure; who gives way differs in detail, so evictions agree only roughly."""
    sizes = torch_engine(capacity_tokens=PAGES * PAGE, most_running=ROWS)
    model = with_costs(replace(sizes, told_lengths=True), (1.0, 0, 0, 0, 0))
    steps = simulated = 0.0
    again, simulated_again = 0, 0
    for seed in range(4):
        attempts = alone(seed)
        decoder = PagedDecoder(qwen(), rows=ROWS, positions=POSITIONS, pages=PAGES, vocab_size=VOCAB)
        steps += stepped(decoder, attempts)
        again += decoder.recomputed_tokens
        report = simulate(attempts, {"engine0": model}, RoundRobin())
        simulated += report.makespan
        simulated_again += report.recomputed_tokens
    assert again > 500
    assert simulated == pytest.approx(steps, rel=0.05)
    assert simulated_again == pytest.approx(again, rel=0.5)
