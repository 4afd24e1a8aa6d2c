"""Which problems a stage learns from, and which of them a step takes.

Stage 3 of the paper keeps only problems that the latest policy does not solve in all of 8 attempts (§4.3). The choice
is made once, when the stage begins. The result of each problem is written to `pools/<stage>.jsonl` at once: a killed
run asks only the rest, and memory holds only the attempts under way."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rocstar.config.sections import RolloutStage
from rocstar.errors import RunHalted
from rocstar.evaluation.metrics import is_right
from rocstar.parts.build import sampling_of
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal, read_journal
from rocstar.record.rollouts import Tally, recorded_tallies
from rocstar.rollout.collect import Roller
from rocstar.rollout.together import all_or_none
from rocstar.types import Group, Problem, Stop, seed_for

NEEDS = {"id": str, "attempts": int, "right": int, "reused": int}
"""Fields of a row of a pool's journal."""


async def stage_pool(
    stage: RolloutStage,
    problems: Sequence[Problem],
    roller: Roller,
    *,
    seed: int,
    run: RunFolder,
    version: int,
    fault_budget: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """The stage's problems, in order. version: of the policy; decides which recorded attempts count
    (`data.drop_solved_age`). progress: called with (problems asked, all problems). Raises RunHalted when a larger share
    of problems than `fault_budget` could not be asked, and OSError when a result cannot be written."""
    attempts = stage.data.drop_solved_attempts
    if attempts is None:
        return list(problems)
    problems = _drawn(problems, stage.data.drop_solved_problems, seed_for(seed, "drawn", stage.name))
    record = run.pool(stage.name)
    journal = record.with_suffix(".jsonl")
    record.parent.mkdir(exist_ok=True)
    if not record.exists():
        recorded = recorded_tallies(run, version - stage.data.drop_solved_age)
        at_once = stage.rollout.problems_per_step * stage.rollout.attempts_per_problem // attempts
        known = {row["id"] for row in read_journal(journal, NEEDS)}
        left = [problem for problem in problems if problem.id not in known]
        numbers = itertools.count(len(problems) - len(left) + 1)

        def count() -> None:
            progress(next(numbers), len(problems))

        with Journal(journal) as found:
            seeded = seed_for(seed, "pool", stage.name)
            ask = partial(roller.roll, seed=seeded, sampling=sampling_of(stage.rollout))
            await _ask(left, ask, found, recorded, attempts, max(1, at_once), count)
        rows = read_journal(journal, NEEDS)
        unasked = len(problems) - len({row["id"] for row in rows})
        if unasked > fault_budget * len(problems):
            raise RunHalted(
                f"stage {stage.name}: the attempts at {unasked} of {len(problems)} problems ended by failures outside "
                f"the model, run.fault_budget allows {fault_budget:.0%}; what was found is kept, and a resumed run "
                "asks for the rest"
            )
        write_json(record, _summary(problems, rows, attempts=attempts, version=version))
    return _unsolved(problems, read_journal(journal, NEEDS))


def _drawn(problems: Sequence[Problem], count: int | None, seed: int) -> Sequence[Problem]:
    """At most `count` of them, in order."""
    if count is None or count >= len(problems):
        return problems
    return [problems[place] for place in sorted(random.Random(seed).sample(range(len(problems)), count))]


async def _ask(
    problems: Sequence[Problem],
    roll: Callable[..., Awaitable[Sequence[Group]]],
    found: Journal,
    recorded: Mapping[str, Tally],
    attempts: int,
    at_once: int,
    count: Callable[[], None],
) -> None:
    """Write a row for each problem when its attempts end; none after a service failure. `count` is called for each
    ended problem."""
    room = asyncio.Semaphore(at_once)

    async def ask(problem: Problem) -> None:
        before = recorded.get(problem.id, Tally())
        more = max(0, attempts - before.attempts) if before.right == before.attempts else 0  # one failure decides
        right = 0
        if more:
            async with room:
                (group,) = await roll([problem], attempts=more)
            count()
            if any(attempt.stop is Stop.ENVIRONMENT_FAILED for attempt in group.trajectories):
                return
            right = sum(map(is_right, group.trajectories))
        else:
            count()
        found.append(
            {
                "id": problem.id,
                "attempts": before.attempts + more,
                "right": before.right + right,
                "reused": before.attempts,
            }
        )

    await all_or_none(ask(problem) for problem in problems)


def _summary(
    problems: Sequence[Problem], rows: Sequence[Mapping[str, Any]], *, attempts: int, version: int
) -> dict[str, Any]:
    unsolved = _unsolved(problems, rows)
    solved_of = Counter(f"{row['right']}/{row['attempts']}" for row in rows)
    return {
        "attempts": attempts,
        "policy_version": version,
        "asked": len(problems),
        "solved": len(problems) - len(unsolved),
        "right_of_attempts": dict(sorted(solved_of.items())),
    }


def _unsolved(problems: Sequence[Problem], rows: Sequence[Mapping[str, Any]]) -> list[Problem]:
    solved = {row["id"] for row in rows if row["right"] == row["attempts"]}
    return [problem for problem in problems if problem.id not in solved]


def problems_of_step(pool: Sequence[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """`count` different problems for one step of a stage (0 is the first), from epochs in seeded orders; the whole pool
    if it has no more. An epoch drops a remainder shorter than a step; the next one reorders all."""
    count = min(count, len(pool))
    epoch, place = divmod(step, len(pool) // count)
    order = list(pool)
    random.Random(seed_for(seed, "order", epoch)).shuffle(order)
    return order[place * count : (place + 1) * count]


async def refilled(
    groups: Sequence[Group],
    pool: Sequence[Problem],
    roll: Callable[[Sequence[Problem]], Awaitable[Sequence[Group]]],
    teaches: Callable[[Group], bool],
    *,
    rounds: int,
    seed: int,
) -> list[Group]:
    """A step's groups, followed by those that `roll` makes to replace groups without a signal, then to replace
    replacements without one, in a limited number of rounds. Problems come from the pool without those the step has had,
    by (seed, round), so other steps keep theirs; an exhausted pool ends it."""
    all_groups = newest = list(groups)
    for number in range(rounds):
        there = {group.problem.id for group in all_groups}
        left = [problem for problem in pool if problem.id not in there]
        idle = sum(not teaches(group) for group in newest)
        further = random.Random(seed_for(seed, "refill", number)).sample(left, min(idle, len(left)))
        if not further:
            break
        newest = list(await roll(further))
        all_groups = all_groups + newest
    return all_groups
