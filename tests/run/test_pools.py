"""Which problems a stage and a step take."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from rocstar.config.sections import DataSection
from rocstar.errors import DataError, RunHalted
from rocstar.evaluation.metrics import is_solved
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.run.pools import problems_of_step, refilled, stage_pool
from rocstar.types import Group, Problem, Sampling, Trajectory, Verdict, VersionSpan
from tests.record.examples import recipe, run, trajectory

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


def test_epochs_come_in_other_orders_and_the_same_seed_in_the_same() -> None:
    first, second = (ids(problems_of_step(POOL, step, 10, seed=1)) for step in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert ids(problems_of_step(POOL, 1, 10, seed=1)) == second
    assert ids(problems_of_step(POOL, 0, 10, seed=2)) != first


def group(*verdicts: Verdict | None, problem: Problem = POOL[0]) -> Group:
    attempts = tuple(trajectory(n, verdict=verdict) for n, verdict in enumerate(verdicts))
    return Group(problem=problem, trajectories=attempts)


def test_only_a_problem_solved_in_every_attempt_is_solved() -> None:
    assert is_solved(group(Verdict.RIGHT, Verdict.RIGHT))
    assert not is_solved(group(Verdict.RIGHT, Verdict.WRONG))
    assert not is_solved(group(Verdict.RIGHT, Verdict.UNDECIDED))
    assert not is_solved(group(Verdict.RIGHT, None))


class Scripted:
    """Solves even problems; notes what it is asked. `faulty` ids end by a fault of ours."""

    def __init__(self, *faulty: str) -> None:
        self.asked: list[tuple[str, int]] = []
        self.faulty = faulty
        self.most = self.under_way = 0

    async def roll(self, problems: list[Problem], *, attempts: int, seed: int, sampling: Sampling) -> list[Group]:
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5), "those of the stage"
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.asked += [(problem.id, attempts) for problem in problems]
        await asyncio.sleep(0)
        self.under_way -= 1
        return [group(*[Verdict.RIGHT] * (attempts - 1), self.last(p), problem=p) for p in problems]

    def last(self, problem: Problem) -> Verdict | None:
        if problem.id in self.faulty:
            return None
        return Verdict.WRONG if int(problem.id) % 2 else Verdict.RIGHT


def stage(attempts: int | None, **data: int) -> Any:
    changes = {"problems_per_step": 2, "attempts_per_problem": 16, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    rollout = recipe().stage[1].rollout.model_copy(update=changes)  # type: ignore[union-attr]
    section = DataSection(drop_solved_attempts=attempts, **data)
    return recipe().stage[1].model_copy(update={"data": section, "rollout": rollout})


async def pool_of(
    folder: RunFolder, roller: Any, attempts: int | None = 8, *, version: int = 5, budget: float = 0.05, **data: int
) -> list[str]:
    made = stage(attempts, **data)
    return ids(await stage_pool(made, POOL, roller, seed=1, run=folder, version=version, fault_budget=budget))


async def test_a_stage_leaves_out_solved_problems_and_keeps_its_choice(tmp_path: Path) -> None:
    roller, folder = Scripted(), run(tmp_path)
    for _ in range(2):  # the second time, as on resume, the record decides
        assert await pool_of(folder, roller) == ["1", "3", "5", "7", "9"]
    assert sorted(roller.asked) == [(problem.id, 8) for problem in POOL]
    assert roller.most == 2 * 16 // 8, "no more attempts are under way than in a step"
    record = json.loads((folder.path / "pools" / "stage1.json").read_text())
    assert (record["attempts"], record["asked"], record["solved"], record["policy_version"]) == (8, 10, 5, 5)
    assert record["right_of_attempts"] == {"7/8": 5, "8/8": 5}


async def test_a_stage_may_ask_a_few_problems_alone(tmp_path: Path) -> None:
    roller, folder = Scripted(), run(tmp_path)
    chosen = await pool_of(folder, roller, drop_solved_problems=4)
    asked = sorted({name for name, _ in roller.asked}, key=int)
    assert len(asked) == 4 and chosen == [name for name in asked if int(name) % 2]
    assert await pool_of(folder, roller, drop_solved_problems=4) == chosen
    assert await pool_of(run(tmp_path / "all"), Scripted(), drop_solved_problems=99) == ["1", "3", "5", "7", "9"]


async def test_a_killed_choice_asks_only_for_the_rest(tmp_path: Path) -> None:
    folder, first, second = run(tmp_path), Scripted(), Scripted()
    await pool_of(folder, first)
    record = folder.pool("stage1")
    record.unlink()
    journal = record.with_suffix(".jsonl")
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:6]) + '{"id": "torn')
    known = {json.loads(line)["id"] for line in journal.read_text().splitlines()[:6]}
    assert await pool_of(folder, second) == ["1", "3", "5", "7", "9"]
    assert {name for name, _ in second.asked} == {problem.id for problem in POOL} - known


async def test_faults_of_ours_are_no_proof_of_anything_and_are_asked_again(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with pytest.raises(RunHalted, match=r"3 of 10 problems ended by failures outside the model"):
        await pool_of(folder, Scripted("0", "1", "2"), budget=0.2)
    again = Scripted()
    assert await pool_of(folder, again) == ["1", "3", "5", "7", "9"]
    assert sorted(again.asked) == [("0", 8), ("1", 8), ("2", 8)]
    forgiven = run(tmp_path, "forgiven")
    assert await pool_of(forgiven, Scripted("0"), budget=0.2) == ["0", "1", "3", "5", "7", "9"]


async def test_recorded_attempts_of_young_enough_weights_count(tmp_path: Path) -> None:
    """Two right ones at problem 0 by version 4, one wrong one at problem 2 by version 4, two right ones at problem 4 by
    version 3."""
    folder = run(tmp_path)
    write_recorded(folder, 1, 3, {"4": [Verdict.RIGHT, Verdict.RIGHT]})
    write_recorded(folder, 2, 4, {"0": [Verdict.RIGHT, Verdict.RIGHT], "2": [Verdict.RIGHT, Verdict.WRONG]})
    roller = Scripted()
    assert await pool_of(folder, roller, drop_solved_age=1) == ["1", "2", "3", "5", "7", "9"]
    assert {name: n for name, n in roller.asked if n < 8} == {"0": 6}
    assert "2" not in {name for name, _ in roller.asked}, "one failure decides"


async def test_attempts_made_ahead_are_as_old_as_what_wrote_them(tmp_path: Path) -> None:
    folder = run(tmp_path)
    write_recorded(folder, 1, 4, {"0": [Verdict.RIGHT, Verdict.RIGHT]}, wrote=1)
    write_recorded(folder, 2, 5, {"2": [Verdict.RIGHT, Verdict.RIGHT]}, wrote=4)
    roller = Scripted()
    await pool_of(folder, roller, drop_solved_age=1)
    assert {name: n for name, n in roller.asked if n < 8} == {"2": 6}


def write_recorded(
    folder: RunFolder, step: int, version: int, verdicts: dict[str, list[Verdict]], wrote: int | None = None
) -> None:
    """wrote: the version whose tokens each attempt begins with; `version` wrote the rest, and learnt from them."""

    def made(index: int, verdict: Verdict) -> Trajectory:
        found = trajectory(index, verdict=verdict)
        first, *others = found.turns
        spans = (VersionSpan(version if wrote is None else wrote, 1), VersionSpan(version, 1))
        begun = replace(first, completion=replace(first.completion, version_spans=spans))
        return replace(found, turns=(begun, *others))

    records = [
        AttemptRecord(problem=POOL[int(name)], trajectory=made(n, verdict), policy_version=version)
        for name, found in verdicts.items()
        for n, verdict in enumerate(found)
    ]
    write_attempts(folder.rollout_file(step), step, records, None)


async def test_other_stages_keep_all_problems_and_ask_nobody(tmp_path: Path) -> None:
    folder, roller = run(tmp_path), Scripted()
    assert await pool_of(folder, roller, None) == ids(POOL)
    assert not roller.asked and not folder.pool("stage1").parent.exists()


async def test_a_row_that_lacks_something_is_refused_with_its_line(tmp_path: Path) -> None:
    folder = run(tmp_path)
    journal = folder.pool("stage1").with_suffix(".jsonl")
    journal.parent.mkdir()
    journal.write_text('{"id": "1", "attempts": 8, "right": 8, "reused": 0}\n{"id": "2", "attempts": 8}\n')
    with pytest.raises(DataError, match='line 2 has no "right"'):
        await pool_of(folder, Scripted())


async def refill(teaching: str, *, rounds: int, seed: int = 1, pool: list[Problem] = POOL) -> list[list[str]]:
    """The problems of a step that begins with 0, 1 and 2, and of each further round. teaching: problems that do."""
    asked: list[list[str]] = []

    async def roll(problems: list[Problem]) -> list[Group]:
        asked.append(ids(problems))
        return [group(Verdict.RIGHT, problem=problem) for problem in problems]

    groups = await refilled(
        await roll(pool[:3]), pool, roll, lambda one: one.problem.id in teaching, rounds=rounds, seed=seed
    )
    assert [one.problem.id for one in groups] == [problem for some in asked for problem in some]
    return asked


async def test_as_many_problems_are_asked_as_have_taught_nothing() -> None:
    assert await refill("012", rounds=9) == [["0", "1", "2"]]
    first, further = await refill("03456789", rounds=9)
    assert len(further) == 2 and not {*first} & {*further}
    assert await refill("03456789", rounds=9) == [first, further]
    assert len({tuple((await refill("03456789", rounds=9, seed=seed))[1]) for seed in range(9)}) > 1
    assert await refill("0", rounds=0) == [first]


async def test_rounds_end_with_their_number_or_with_the_pool() -> None:
    assert [len(some) for some in await refill("0", rounds=2)] == [3, 2, 2]
    assert [len(some) for some in await refill("0", rounds=9)] == [3, 2, 2, 2, 1]
    assert [len(some) for some in await refill("", rounds=9, pool=POOL[:4])] == [3, 1]
    flat = [problem for some in await refill("0", rounds=9) for problem in some]
    assert sorted(flat) == ids(POOL)
