"""All attempts at all problems of a step, verified. Nothing is left out here: attempts that ended by a fault of ours
or without a verdict stay in their group, and the resampler drops them with their reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rocstar.errors import VerifierUnavailable
from rocstar.protocols import Engine, Verifier
from rocstar.rollout.environment import Conversation, Limits, ToolEnvironment
from rocstar.rollout.episode import run_episode
from rocstar.types import Group, Problem, Sampling, Stop, Trajectory, seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Roller:
    """Produces verified attempts with the current engine."""

    engine: Engine
    conversation: Conversation
    verifier: Verifier
    limits: Limits
    stop_token_ids: tuple[int, ...]

    async def roll(
        self,
        problems: Sequence[Problem],
        *,
        attempts: int,
        seed: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        done: Callable[[Trajectory], None] | None = None,
    ) -> list[Group]:
        """`attempts` trajectories per problem, all at once; an attempt's randomness follows from
        (seed, problem.id, index). `done` is told of each as it ends."""
        sampling = Sampling(
            max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, stop_token_ids=self.stop_token_ids
        )

        async def one(problem: Problem, index: int) -> Trajectory:
            trajectory = await self._attempt(problem, index, replace(sampling, seed=seed_for(seed, problem.id, index)))
            if done:
                done(trajectory)
            return trajectory

        tasks = [asyncio.create_task(one(p, index)) for p in problems for index in range(attempts)]
        try:
            drawn = await asyncio.gather(*tasks)  # not a TaskGroup: the caller wants the plain exception
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            Group(problem=problem, trajectories=tuple(drawn[place * attempts : (place + 1) * attempts]))
            for place, problem in enumerate(problems)
        ]

    async def _attempt(self, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        environment = ToolEnvironment(problem, self.conversation, self.limits, sampling.seed)
        trajectory = await run_episode(
            self.engine,
            environment,
            problem,
            index=index,
            sampling=sampling,
            session_id=f"{sampling.seed:x}/{problem.id}/{index}",
        )
        if trajectory.stop is Stop.ENVIRONMENT_FAILED:
            return trajectory
        try:
            return replace(trajectory, outcome=await self.verifier.verify(problem, trajectory))
        except VerifierUnavailable as error:
            return replace(trajectory, stop=Stop.ENVIRONMENT_FAILED, fault=f"VerifierUnavailable: {error}")
