"""All attempts of an evaluation, verified. Whoever makes them is a Solver: a Roller over engines of ours, or somebody
else's endpoint (`endpoint.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from rocstar.evaluation.recall import Recall
from rocstar.protocols import TextCodec, Verifier
from rocstar.rollout.collect import verified_groups
from rocstar.rollout.episode import Note
from rocstar.types import Group, Problem, Sampling, Trajectory, seed_for


class Solver(Protocol):
    """Makes attempts at problems, each on its own, and knows who judges them."""

    @property
    def codec(self) -> TextCodec:
        """Turns the token ids of its attempts into text."""
        ...

    @property
    def verifier(self) -> Verifier: ...

    @property
    def note(self) -> Note: ...

    async def attempt(self, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        """One attempt, not yet verified; its randomness follows from `sampling.seed`. A fault of ours ends it as
        ENVIRONMENT_FAILED."""
        ...


async def attempted(
    solver: Solver,
    problems: Sequence[Problem],
    sampling: Sampling,
    *,
    attempts: int,
    recall: Recall,
    done: Callable[[Group], None],
) -> list[Group]:
    """`attempts` at each problem, seeded by (sampling.seed, problem.id, index) as `Roller.roll` does; those that
    `recall` knows are not made again. `done` is called with each group as it is verified."""

    async def one(problem: Problem, index: int, identity: tuple[int | str, ...]) -> Trajectory:
        request = replace(sampling, seed=seed_for(*identity))
        asked = f"attempt/{'/'.join(map(str, identity))}/{sampling.temperature:g}"
        return await recall.attempt(asked, lambda: solver.attempt(problem, index, request))

    return await verified_groups(
        problems, one, solver.verifier, attempts=attempts, seed=sampling.seed, note=solver.note, done=done
    )
