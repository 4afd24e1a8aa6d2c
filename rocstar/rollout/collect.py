"""All attempts at all problems of a step, verified. Nothing is left out here: attempts that ended by a service failure
or without a verdict stay in their group, and the resampler drops them with their reason.

A group is verified in one call when its last sibling ends. Other groups continue meanwhile, so only the step itself
waits for verdicts, and a slow check runs while the engine is busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from rocstar.dialogue.codec import Codec
from rocstar.errors import VerifierUnavailable
from rocstar.protocols import Engine, Verifier
from rocstar.rollout.environment import AttemptLimits, Conversation, EnvironmentFactory, ToolEnvironment
from rocstar.rollout.episode import Note, note_nothing, run_episode
from rocstar.rollout.together import all_or_none
from rocstar.types import Group, Outcome, Problem, Sampling, Stop, Trajectory, seed_for

AS_THE_MODEL_SAYS = Sampling(max_new_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledStep:
    """The attempts of a step."""

    groups: list[Group]
    """Groups to learn from."""
    refilled: int = 0
    """How many of the groups, the last ones, replace groups without a signal (`rollout.refill`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roller:
    """Produces verified attempts with the current engine."""

    engine: Engine
    conversation: Conversation
    verifier: Verifier
    limits: AttemptLimits
    stop_token_ids: tuple[int, ...]
    environment: EnvironmentFactory = ToolEnvironment
    agent: Callable[[Roller, Problem, int, Sampling], Coroutine[Any, Any, Trajectory]] | None = None
    """Makes the attempts in place of the turn loop (`rollout.agent`); the verifier judges those without an outcome."""
    note: Note = note_nothing
    """Called with what each attempt, and each group, waits for."""
    places: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    """Each attempt is made inside this context; an asyncio.Semaphore bounds how many are made at once."""
    ended: Callable[[Trajectory], None] = lambda trajectory: None
    """Called with each attempt when it is made."""

    @property
    def codec(self) -> Codec:
        """Turns the token ids of attempts into text."""
        return self.conversation.codec

    async def roll(
        self,
        problems: Sequence[Problem],
        *,
        attempts: int,
        seed: int,
        sampling: Sampling = AS_THE_MODEL_SAYS,
    ) -> list[Group]:
        """`attempts` trajectories per problem, all at once. An attempt's randomness follows from (seed, problem.id,
        index); for a problem that is listed several times, also from its number among these."""
        return await verified_groups(
            problems,
            lambda problem, index, identity: self.attempt(problem, index, replace(sampling, seed=seed_for(*identity))),
            self.verifier,
            attempts=attempts,
            seed=seed,
            note=self.note,
        )

    async def attempt(self, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        """One attempt, not yet verified; its randomness follows from `sampling.seed`. See `run_episode`."""
        sampling = replace(sampling, stop_token_ids=self.stop_token_ids)
        async with self.places:
            if self.agent:
                made = await self.agent(self, problem, index, sampling)
            else:
                made = await run_episode(
                    self.engine,
                    self.environment(problem, self.conversation, self.limits, sampling.seed),
                    problem,
                    index=index,
                    sampling=sampling,
                    session_id=f"{sampling.seed:x}/{problem.id}/{index}",
                    note=self.note,
                )
        self.ended(made)
        return made


Attempt = Callable[[Problem, int, tuple[int | str, ...]], Coroutine[Any, Any, Trajectory]]
"""(problem, index, identity) -> one attempt, not yet verified; the identity, with the index, is what seeds it."""


async def verified_groups(
    problems: Sequence[Problem],
    attempt: Attempt,
    verifier: Verifier,
    *,
    attempts: int,
    seed: int,
    note: Note,
    done: Callable[[Group], None] = lambda group: None,
) -> list[Group]:
    """`attempts` at each problem, all at once; a group is verified when its last sibling ends, and passed to `done`."""

    async def group(problem: Problem, identity: tuple[int | str, ...]) -> Group:
        finished = await verified_group(problem, attempt, verifier, attempts, identity, note)
        done(finished)
        return finished

    return await all_or_none(
        group(problem, (seed, problem.id, *again)) for problem, again in zip(problems, _repeats(problems), strict=True)
    )


async def verified_group(
    problem: Problem, attempt: Attempt, verifier: Verifier, attempts: int, identity: tuple[int | str, ...], note: Note
) -> Group:
    """`attempts` at a problem, verified when the last of them ends."""
    drawn = await all_or_none(attempt(problem, index, (*identity, index)) for index in range(attempts))
    who = f"group {'/'.join(map(str, identity))}"
    note(who, "the verifier")
    try:
        return Group(problem=problem, trajectories=await verified(verifier, problem, drawn))
    finally:
        note(who, None)


async def verified(verifier: Verifier, problem: Problem, drawn: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """The same attempts with outcomes, all from one call; attempts that already have an outcome keep it."""
    whole = [one for one in drawn if one.stop is not Stop.ENVIRONMENT_FAILED and one.outcome is None]
    found: Sequence[Outcome | VerifierUnavailable]
    try:
        found = await verifier.verify_all([(problem, trajectory) for trajectory in whole])
    except VerifierUnavailable as error:
        found = [error] * len(whole)
    outcomes = {trajectory.index: outcome for trajectory, outcome in zip(whole, found, strict=True)}
    return tuple(_with(one, outcomes.get(one.index, one.outcome)) for one in drawn)


def _repeats(problems: Sequence[Problem]) -> list[tuple[str, ...]]:
    """Suffixes that distinguish problems with the same id: nothing for the first, `again1` for the second."""
    counts: Counter[str] = Counter()
    found: list[tuple[str, ...]] = []
    for problem in problems:
        before = counts[problem.id]
        found.append((f"again{before}",) if before else ())
        counts[problem.id] += 1
    return found


def _with(trajectory: Trajectory, outcome: Outcome | VerifierUnavailable | None) -> Trajectory:
    """With an outcome; an outage of the verifier ends the attempt as ENVIRONMENT_FAILED and is never an outcome."""
    if isinstance(outcome, VerifierUnavailable):
        return replace(trajectory, stop=Stop.ENVIRONMENT_FAILED, fault=str(outcome))
    return replace(trajectory, outcome=outcome)
