"""The fleet's records of trajectories, turns and engines, and its checks of completions.

The fleet takes out an engine whose completions are impossible, before anything is learnt from them. Not here: the fleet
itself (fleet.py)."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rocstar.protocols import Engine
from rocstar.rollout.scheduler import Ask
from rocstar.types import Completion, Finish, Sampling

ROUNDING = 1e-3  # nats by which the logprob of a certain token may exceed 0 in bfloat16


@dataclass(eq=False, slots=True, kw_only=True)
class FleetSession:
    """One trajectory, between its first turn and `close_session`."""

    group: str
    prompt_tokens: int
    turns: deque[FleetTurn] = field(default_factory=deque)
    """Turns under way, in order; the scheduler is asked for the first only."""
    engines: set[str] = field(default_factory=set)
    """Names of the engines that may cache some of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class FleetTurn:
    ask: Ask
    token_ids: tuple[int, ...]
    sampling: Sampling
    session: FleetSession
    answer: asyncio.Future[Completion]
    tries: int = 0
    """How often it was started on an engine."""
    member: FleetMember | None = None
    """The engine that works on it; None while it waits."""
    task: asyncio.Task[None] | None = None
    previous: str | None = None
    """The engine it was taken from."""

    @property
    def request_id(self) -> str:
        """The id sent to engines: a different one for each try, so that the end of one is not taken for another's."""
        return self.ask.request_id if self.tries <= 1 else f"{self.ask.request_id}/try{self.tries}"


@dataclass(eq=False, slots=True, kw_only=True)
class FleetMember:
    """One engine, as the fleet knows it."""

    name: str
    engine: Engine
    version: int
    """The version of weights it last reported."""
    up: bool = True
    reason: str = ""
    """Why it was taken out, or why the last probe failed."""
    turns: set[FleetTurn] = field(default_factory=set)
    failures: int = 0
    """Failed turns in a row."""
    answered: int = 0
    """Turns that it has ended."""
    seen: tuple[int, ...] = ()
    """What `progress` returned at the last look."""
    looks: int = 0
    """Looks in a row at which nothing had changed."""
    probes: int = 0
    """Probes since it last took new weights; the pause before the next grows with them."""
    tries: int = 0
    """Probes since it was taken out."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is restarted, and while it is put to sleep."""
    lost_at: float = 0.0
    """When it was last taken out; seconds of `time.monotonic`."""

    def progress(self) -> tuple[int, ...]:
        load = self.engine.load()
        return self.answered, load.used_tokens, load.produced_tokens, load.recomputed_tokens


def complaint(
    completion: Completion, sampling: Sampling, *, vocab_size: int | None, versions: tuple[int, int]
) -> str | None:
    """Describes the first impossible thing in a completion; None if there is none. `versions`: the oldest and the
    newest policy version that may have written a token. vocab_size: ids are below it; None if unknown."""
    return next(_complaints(completion, sampling, vocab_size, versions), None)


def _complaints(
    completion: Completion, sampling: Sampling, vocab_size: int | None, versions: tuple[int, int]
) -> Iterator[str]:
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) != len(logprobs):
        yield f"{len(ids)} tokens with {len(logprobs)} logprobs"
    if len(ids) > sampling.max_new_tokens:
        yield f"{len(ids)} tokens where {sampling.max_new_tokens} were allowed"
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        yield f"token ids from {min(ids)} to {max(ids)}, of {vocab_size} there are"
    wrong = next((value for value in logprobs if not math.isfinite(value) or value > ROUNDING), None)
    if wrong is not None:
        yield f"a logprob of {wrong}"
    if completion.finish is Finish.STOP and (not ids or ids[-1] not in sampling.stop_token_ids):
        yield "an end at a stop token that is not one"
    wrote = [span.version for span in completion.version_spans]
    if sum(span.tokens for span in completion.version_spans) != len(ids):
        yield f"{len(ids)} tokens, of which {sum(span.tokens for span in completion.version_spans)} have a version"
    if wrote != sorted(wrote) or any(not versions[0] <= version <= versions[1] for version in wrote):
        requested = " to ".join(map(str, dict.fromkeys(versions)))
        yield f"tokens of policy version {', '.join(map(str, wrote))} where {requested} was requested"
