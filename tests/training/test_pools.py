"""Which problems a stage and a step take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from rocstar.config import DataSection
from rocstar.training.pools import is_solved, problems_of_step, stage_pool
from rocstar.types import Group, Problem, Verdict
from tests.runs.examples import recipe, trajectory

POOL = [Problem(id=str(n), question=f"q{n}", answer="1") for n in range(10)]


def ids(problems: list[Problem]) -> list[str]:
    return [problem.id for problem in problems]


@given(st.integers(1, 12), st.integers(0, 5), st.integers())
def test_each_epoch_takes_every_problem_at_most_once_and_a_step_none_twice(count: int, epoch: int, seed: int) -> None:
    steps = len(POOL) // min(count, len(POOL))
    taken = [ids(problems_of_step(POOL, epoch * steps + place, count, seed)) for place in range(steps)]
    flat = [problem for step in taken for problem in step]
    assert len(flat) == len(set(flat)) == steps * min(count, len(POOL))
    assert all(len(step) == min(count, len(POOL)) for step in taken)


def test_an_epoch_that_divides_evenly_takes_every_problem() -> None:
    taken = [problem for step in range(5) for problem in ids(problems_of_step(POOL, step, 2, seed=3))]
    assert sorted(taken, key=int) == ids(POOL)


def test_epochs_come_in_other_orders_and_the_same_seed_in_the_same() -> None:
    first, second = (ids(problems_of_step(POOL, step, 10, seed=1)) for step in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert ids(problems_of_step(POOL, 1, 10, seed=1)) == second
    assert ids(problems_of_step(POOL, 0, 10, seed=2)) != first


def test_a_pool_smaller_than_a_step_is_taken_whole() -> None:
    assert sorted(ids(problems_of_step(POOL[:3], 7, 12, seed=0))) == ["0", "1", "2"]


def group(*verdicts: Verdict | None, problem: Problem = POOL[0]) -> Group:
    attempts = tuple(trajectory(n, verdict=verdict) for n, verdict in enumerate(verdicts))
    return Group(problem=problem, trajectories=attempts)


def test_only_a_problem_solved_in_every_attempt_is_solved() -> None:
    assert is_solved(group(Verdict.RIGHT, Verdict.RIGHT))
    assert not is_solved(group(Verdict.RIGHT, Verdict.WRONG))
    assert not is_solved(group(Verdict.RIGHT, Verdict.UNDECIDED))
    assert not is_solved(group(Verdict.RIGHT, None))


class Scripted:
    """Solves even problems; counts how often it is asked."""

    asked = 0

    async def roll(self, problems: list[Problem], *, attempts: int, seed: int) -> list[Group]:
        self.asked += 1
        return [
            group(*[Verdict.RIGHT] * (attempts - 1), Verdict.WRONG if int(p.id) % 2 else Verdict.RIGHT, problem=p)
            for p in problems
        ]


def stage(attempts: int | None) -> Any:
    return recipe().stage[1].model_copy(update={"data": DataSection(drop_solved_attempts=attempts)})


async def test_a_stage_leaves_out_solved_problems_and_keeps_its_choice(tmp_path: Path) -> None:
    roller: Any = Scripted()
    for _ in range(2):  # the second time, as on resume, the file decides
        pool = await stage_pool(stage(8), POOL, roller, seed=1, run=tmp_path)
        assert ids(pool) == ["1", "3", "5", "7", "9"]
    assert roller.asked == 1
    record = json.loads((tmp_path / "pools" / "stage1.json").read_text())
    assert record == {"attempts": 8, "asked": 10, "solved": ["0", "2", "4", "6", "8"]}


async def test_other_stages_keep_all_problems_and_ask_nobody(tmp_path: Path) -> None:
    roller: Any = Scripted()
    assert await stage_pool(stage(None), POOL, roller, seed=1, run=tmp_path) == POOL
    assert roller.asked == 0 and not (tmp_path / "pools").exists()
