"""Planned attempts on the torch engine, and the simulator beside it: the same steps, evictions and tokens fed again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

from rocstar.engines.pages import PAGE
from rocstar.engines.torch_decoder import PagedDecoder
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.torch_table import Work
from rocstar.forecast.engine_model import torch_engine, with_costs
from rocstar.forecast.policies import RoundRobin
from rocstar.forecast.simulate import simulate
from rocstar.forecast.workload import PlannedAttempt, TurnLengths, shrunk, synthetic_workload
from rocstar.rollout.fleet import Fleet
from rocstar.types import Sampling
from tests.engines.models import VOCAB, qwen
from tests.rollout.played import Dictated, dictated_lengths, play

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


async def test_planned_attempts_are_as_long_as_planned() -> None:
    attempts = shrunk(synthetic_workload("even", problems=2, attempts=3, limit=1600, seed=0, tool_seconds=0.001), 32)
    engine = TorchEngine(qwen(), rows=ROWS, positions=POSITIONS, vocab_size=VOCAB)
    dictated = Dictated(engine)
    dictated.lengths = dictated_lengths(attempts)
    fleet = Fleet({"a": dictated}, RoundRobin(), vocab_size=VOCAB)
    ends = await play(fleet, attempts, vocab_size=VOCAB, clock=time.monotonic)
    produced = engine.load().produced_tokens
    await fleet.close()
    await engine.close()
    assert len(ends) == len(attempts) and min(ends) > 0
    assert produced == sum(turn.sampled_tokens for each in attempts for turn in each.turns)
