"""Which problems a stage learns from, and which of them a step takes.

Stage 3 of the paper keeps only problems that the latest policy does not solve in all of 8 attempts (§4.3). The choice
is made once, when the stage begins, and kept in the run folder."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from rocstar.config import RlStage
from rocstar.rollout.collect import Roller
from rocstar.runs.atomic import write_json
from rocstar.types import Group, Problem, Verdict, seed_for


async def stage_pool(
    stage: RlStage, problems: Sequence[Problem], roller: Roller, *, seed: int, run: Path
) -> list[Problem]:
    """The stage's problems. Raises OSError when the choice cannot be written."""
    attempts = stage.data.drop_solved_attempts
    if attempts is None:
        return list(problems)
    record = run / "pools" / f"{stage.name}.json"
    if not record.exists():
        groups = await roller.roll(problems, attempts=attempts, seed=seed_for(seed, "pool", stage.name))
        solved = {group.problem.id for group in groups if is_solved(group)}
        record.parent.mkdir(exist_ok=True)
        write_json(record, {"attempts": attempts, "asked": len(problems), "solved": sorted(solved)})
    mastered = set(json.loads(record.read_text())["solved"])
    return [problem for problem in problems if problem.id not in mastered]


def is_solved(group: Group) -> bool:
    """Every attempt is RIGHT; a fault or a missing verdict is no proof of mastery."""
    return all(t.outcome is not None and t.outcome.verdict is Verdict.RIGHT for t in group.trajectories)


def problems_of_step(pool: Sequence[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """`count` different problems for one step of a stage (0 is the first), from epochs in seeded orders; all of the
    pool when it has no more. Rests shorter than a step are left to the next epoch's order."""
    count = min(count, len(pool))
    epoch, place = divmod(step, len(pool) // count)
    order = list(pool)
    random.Random(seed_for(seed, "order", epoch)).shuffle(order)
    return order[place * count : (place + 1) * count]
