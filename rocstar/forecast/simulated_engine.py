"""An engine of the simulator: a batch that advances one token a step, a KV cache, and a cost for both.

All running requests sample one token a step, so between two events nothing has to be simulated: `steps` counts the
steps so far, a request knows at which count it finishes, and the seconds of k steps have a closed form. Requests come
in at step boundaries; what they have to be fed shares a step with the decoding ones, `chunk_tokens` at most. The step
that feeds the last of it samples the first token.

The cache holds a group's prompt once, and a trajectory's own tokens while it runs and while its tool runs, in whole
pages. Who is served and who gives way when the next step does not fit is one of two sets of rules, at the end.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.workload import PlannedAttempt
from rocstar.types import EngineLoad


@dataclass(slots=True, eq=False)
class SimulatedAttempt:
    """How far one attempt has come."""

    session_id: str
    plan: PlannedAttempt
    tokens: int
    """Prompt and response so far, without those of a completion under way."""
    turn: int = 0
    computed: int = 0
    """Tokens that some engine has had in its cache."""
    engine: str | None = None
    """The engine that its last turn was asked of."""
    lost: bool = False
    """Its engine died; what is fed again next is not the policy's fault."""


@dataclass(slots=True, eq=False)
class Job:
    """One completion on an engine."""

    attempt: SimulatedAttempt
    context: int
    """Tokens to continue; after an eviction with what it had sampled."""
    left: int
    """Tokens still to sample when it starts to decode."""
    to_feed: int = 0
    finish_step: int = -1
    """Count of steps at which it has ended; -1 while it does not decode."""

    def tokens(self, step: int) -> int:
        return self.context if self.finish_step < 0 else self.context + self.left - (self.finish_step - step)


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """The batch and the cache, with the rules of vLLM at the end."""

    name: str
    model: EngineModel
    clock: float = 0.0
    """Time of the last step boundary, seconds."""
    wake: float = math.inf
    """When the planned steps end, seconds; inf while there is nothing to do."""
    steps: int = 0
    held_tokens: int = 0
    read_tokens: int = 0
    """Sum of the contexts of those that decode."""
    produced: int = 0
    recomputed: int = 0
    recomputed_after_loss: int = 0
    evictions: int = 0
    busy_seconds: float = 0.0
    running: dict[Job, None] = field(default_factory=dict)
    """In order of arrival."""
    feeding: deque[Job] = field(default_factory=deque)
    waiting: deque[Job] = field(default_factory=deque)
    idle: dict[str, tuple[SimulatedAttempt, int]] = field(default_factory=dict)
    """Session id -> attempt that waits for its tool, own tokens cached; longest wait first."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Group -> trajectories here that share its prompt."""
    _finishing: list[tuple[int, int, Job]] = field(default_factory=list)
    _order: int = 0
    _planned: int = 0
    """Steps until `wake`; 0 while its patience with a trajectory's tool runs."""
    _begun: int = 0
    """Requests since the last step boundary."""
    _phases: list[int] = field(default_factory=list)
    """[page_tokens] how many of the decoding requests fill a page at step counts with this remainder."""
    _active_until: float = 0.0
    _idle_tokens: int = 0
    """Own tokens of `idle`, in whole pages."""
    _full: bool = False
    """A sequence was evicted and none has finished since: sequences without a cache are not admitted."""

    def __post_init__(self) -> None:
        self._phases = [0] * self.model.page_tokens

    def load(self, now: float) -> EngineLoad:
        steps = self._steps_by(now)
        return EngineLoad(
            capacity_tokens=self.model.capacity_tokens,
            used_tokens=self._counted_tokens() + self._growth(steps),
            running=self._busy(),
            waiting=len(self.waiting),
            produced_tokens=self.produced + steps * len(self.running),
            recomputed_tokens=self.recomputed,
            evictions=self.evictions,
            keeps_idle=self.model.oldest_first,
        )

    def submit(self, job: Job, now: float) -> None:
        self._enqueue(job)
        if self.wake == math.inf or not self._planned:
            self.clock, self.wake = now, math.inf
        elif not self.feeding:  # stop at the next boundary
            steps = min(self._planned, self._steps_by(now) + 1)
            self._planned, self.wake = steps, self.clock + self._seconds(steps)

    def close(self, attempt: SimulatedAttempt) -> None:
        """Free what is cached for an attempt that waits for its tool, or has ended."""
        self._drop(attempt.session_id)

    def settle(self) -> list[Job]:
        """Carry out the planned steps; the completions that have ended."""
        paused, self._begun = not self._planned, 0
        if paused:
            self.clock, self.wake = self.wake, math.inf
            return []
        decoding = len(self.running)
        self.busy_seconds += self.wake - self.clock
        self.clock, self.wake = self.wake, math.inf
        self._active_until = self.clock
        self.held_tokens += self._growth(self._planned)
        self.steps += self._planned
        self.read_tokens += decoding * self._planned
        self.produced += decoding * self._planned
        if self.feeding:
            self._feed()
        return self._finished()

    def proceed(self) -> None:
        """Admit who fits and plan the steps until something happens, from a step boundary on."""
        if self.wake != math.inf:
            return
        self._admit()
        while self._room() < self._growth(1) + len(self.feeding) * self.model.page_tokens:
            if self._busy() == 1 and not self.idle:
                raise AssertionError(
                    f"{self.name}: one request outgrew the whole cache; simulate() refuses such a workload"
                )
            self._relieve()
        if self.feeding:
            self._planned = 1
        elif self.running:
            while self._finishing[0][2].finish_step != self._finishing[0][0]:
                heapq.heappop(self._finishing)  # evicted since
            self._planned = min(self._finishing[0][0] - self.steps, self._steps_until_full())
        elif self.waiting:
            self._planned, self.wake = 0, self._active_until + self.model.patience_seconds
            return
        else:
            return
        self.wake = self.clock + self._seconds(self._planned)

    # Time

    def _seconds(self, steps: int) -> float:
        """Seconds of `steps` steps from the last boundary, while no request begins or ends."""
        model, decoding = self.model, len(self.running)
        fixed = model.step_seconds + model.seconds_per_sequence * decoding
        read = steps * self.read_tokens + decoding * steps * (steps - 1) / 2
        return steps * fixed + model.seconds_per_cached_token * read + (self._feeding_seconds() if self.feeding else 0)

    def _feeding_seconds(self) -> float:
        """Added by what the next step feeds, and by the first tokens that it samples."""
        model, budget = self.model, self.model.chunk_tokens
        seconds = model.seconds_per_request * self._begun
        for job in self.feeding:
            if job.to_feed > budget:
                return seconds + model.seconds_per_prefill_token * budget
            budget -= job.to_feed
            seconds += model.seconds_per_prefill_token * job.to_feed
            seconds += model.seconds_per_sequence + model.seconds_per_cached_token * job.context
        return seconds

    def _steps_by(self, now: float) -> int:
        """Whole steps done at `now` of those planned: the inverse of `_seconds`."""
        if self.feeding or self.wake == math.inf or not self._planned or now <= self.clock:
            return 0
        model, decoding = self.model, len(self.running)
        square = model.seconds_per_cached_token * decoding / 2
        first = model.step_seconds + model.seconds_per_sequence * decoding
        linear = first + model.seconds_per_cached_token * self.read_tokens - square
        passed = now - self.clock
        root = math.sqrt(linear * linear + 4 * square * passed)
        return min(self._planned, int(2 * passed / (linear + root) + 1e-9))

    # Work

    def _feed(self) -> None:
        budget = self.model.chunk_tokens
        while self.feeding and (budget or not self.feeding[0].to_feed):
            job = self.feeding[0]
            fed = min(budget, job.to_feed)
            again = min(fed, max(0, job.attempt.computed - (job.context - job.to_feed)))  # some engine had them cached
            if job.attempt.lost:
                self.recomputed_after_loss += again
            else:
                self.recomputed += again
            job.to_feed -= fed
            budget -= fed
            if job.to_feed:
                return
            self.feeding.popleft()
            self._start(job)

    def _start(self, job: Job) -> None:
        """All is fed, and its first token sampled."""
        job.attempt.computed, job.attempt.lost = max(job.attempt.computed, job.context), False
        job.finish_step = self.steps + job.left - 1
        self._order += 1
        heapq.heappush(self._finishing, (job.finish_step, self._order, job))
        self.running[job] = None
        self.read_tokens += job.context + 1
        self.produced += 1
        own = self._own_tokens(job)
        self.held_tokens += self.model.in_pages(own) - self.model.in_pages(own - 1)
        self._phases[(self.steps - own) % self.model.page_tokens] += 1

    def _stop(self, job: Job) -> int:
        """It decodes no more; the tokens that it has."""
        del self.running[job]
        tokens = job.tokens(self.steps)
        self.read_tokens -= tokens
        self._phases[(self.steps - self._own_tokens(job)) % self.model.page_tokens] -= 1
        job.attempt.computed = tokens
        return tokens

    def _finished(self) -> list[Job]:
        ended: list[Job] = []
        while self._finishing and self._finishing[0][0] <= self.steps:
            finish_step, _, job = heapq.heappop(self._finishing)
            if job.finish_step != finish_step or job not in self.running:
                continue
            own = self._own_tokens(job)
            self._stop(job)
            self._full = False
            if self.model.prefix_cache:
                self.idle[job.attempt.session_id] = (job.attempt, own)
                self._idle_tokens += self.model.in_pages(own)
            else:
                self._free(job.attempt, own)
            ended.append(job)
        return ended

    # Memory

    def _room(self) -> int:
        return self.model.capacity_tokens - self.held_tokens

    def _own_tokens(self, job: Job) -> int:
        """Its tokens in pages that no sibling shares."""
        return job.tokens(self.steps) - self.model.shared_tokens(job.attempt.plan.prompt_tokens)

    def _growth(self, steps: int) -> int:
        """Tokens of the cache that those who decode take in so many steps."""
        page = self.model.page_tokens
        rounds, rest = divmod(steps, page)
        pages = rounds * len(self.running) + sum(self._phases[(self.steps + step) % page] for step in range(rest))
        return pages * page

    def _steps_until_full(self) -> int:
        page = self.model.page_tokens
        steps = self._room() // (page * len(self.running)) * page
        room = self._room() - self._growth(steps)
        while (taken := self._phases[(self.steps + steps) % page] * page) <= room:
            room -= taken
            steps += 1
        return steps

    # Who is served

    def _admit(self) -> None:
        while self.waiting and self._busy() < self.model.most_running:
            job = self.waiting[0]
            if not self._may_enter(job):
                if self._waits_for_others(job):
                    return
                continue
            self.waiting.popleft()
            self._take(job)

    def _fits(self, job: Job, freed: int = 0) -> bool:
        """Whether the cache has room for it, and for another page of each request here that may need one; with `freed`
        tokens more."""
        pages = self._growing() + (0 if self._begins_as_sibling(job) else 1)
        spare = pages * self.model.page_tokens + int(self.model.watermark * self.model.capacity_tokens)
        return self._need(job) + (spare if self._busy() else 1) <= self._room() + freed

    def _busy(self) -> int:
        return len(self.running) + len(self.feeding)

    def _growing(self) -> int:
        """Requests here that may need another page."""
        if not self.model.told_lengths:
            return self._busy()
        ends = ((self._own_tokens(job), self._own_tokens(job) + self._left(job)) for job in self.running)
        return len(self.feeding) + sum(end > self.model.in_pages(now) for now, end in ends)

    def _left(self, job: Job) -> int:
        """Tokens still to sample of one that decodes."""
        return job.finish_step - self.steps

    def _begins_as_sibling(self, job: Job) -> bool:
        """The page that it needs for itself is then the one that it writes its first token to."""
        plan = job.attempt.plan
        return (
            self.model.page_tokens > 1
            and job.context == plan.prompt_tokens
            and self._owner(job.attempt) in self.prompts
        )

    def _waits_for_others(self, job: Job) -> bool:
        """Whether it waits for other requests or for a tool. False where it need not: a cache was given up for it."""
        if self.running or self.feeding or self.clock < self._active_until + self.model.patience_seconds:
            return True
        return not self._drop_idle(keep=job.attempt.session_id)

    def _need(self, job: Job) -> int:
        """Tokens of the cache beyond what is here of it."""
        attempt, model = job.attempt, self.model
        if (cached := self.idle.get(attempt.session_id)) is not None:
            return model.in_pages(self._own_tokens(job)) - model.in_pages(cached[1])
        shared = 0 if self._owner(attempt) in self.prompts else model.shared_tokens(attempt.plan.prompt_tokens)
        return model.in_pages(self._own_tokens(job)) + shared

    def _take(self, job: Job) -> None:
        attempt = job.attempt
        self.held_tokens += self._need(job)
        job.to_feed = job.context - self._cached(job)
        if (cached := self.idle.pop(attempt.session_id, None)) is None:
            self.prompts[self._owner(attempt)] = self.prompts.get(self._owner(attempt), 0) + 1
        else:
            self._idle_tokens -= self.model.in_pages(cached[1])
        self.feeding.append(job)
        self._begun += 1

    def _cached(self, job: Job) -> int:
        """How many of its tokens are in the cache."""
        plan = job.attempt.plan
        if (cached := self.idle.get(job.attempt.session_id)) is not None:
            return self.model.shared_tokens(plan.prompt_tokens) + cached[1]
        return plan.prompt_tokens if self._owner(job.attempt) in self.prompts else 0

    def _owner(self, attempt: SimulatedAttempt) -> str:
        """Whose prompt it holds: its group's, or where nothing is cached across requests its own."""
        return attempt.plan.group if self.model.prefix_cache else attempt.session_id

    # Who gives way

    def _evict(self, job: Job) -> None:
        own = self._own_tokens(job)
        if job.finish_step < 0:
            self.feeding.remove(job)
            job.attempt.computed = max(job.attempt.computed, job.context - job.to_feed)
        else:
            job.context, job.left = self._stop(job), self._left(job)
        job.finish_step, job.to_feed = -1, 0
        self._free(job.attempt, own)
        self._enqueue_again(job)
        self.evictions += 1

    def _drop_idle(self, keep: str = "") -> bool:
        """Give up the cache of a trajectory whose tool runs; False where there is none but `keep`."""
        found = self._idle_victim(session for session in self.idle if session != keep)
        if found is None:
            return False
        self._drop(found)
        self.evictions += 1
        return True

    def _drop(self, session: str) -> None:
        if (held := self.idle.pop(session, None)) is not None:
            self._idle_tokens -= self.model.in_pages(held[1])
            self._free(*held)

    def _free(self, attempt: SimulatedAttempt, own_tokens: int) -> None:
        owner = self._owner(attempt)
        self.held_tokens -= self.model.in_pages(own_tokens)
        self.prompts[owner] -= 1
        if not self.prompts[owner]:
            del self.prompts[owner]
            self.held_tokens -= self.model.shared_tokens(attempt.plan.prompt_tokens)

    # The rules of vLLM, in which AgedEngine differs: requests are served in order of arrival; caches of trajectories
    # that wait for a tool give way first, also to a request that comes, then the latest requests

    def _counted_tokens(self) -> int:
        """Tokens of the cache that the engine says are used."""
        return self.held_tokens - self._idle_tokens

    def _enqueue(self, job: Job) -> None:
        self.waiting.append(job)

    def _enqueue_again(self, job: Job) -> None:
        self.waiting.appendleft(job)

    def _may_enter(self, job: Job) -> bool:
        session = job.attempt.session_id
        if self._full and self._busy() and session not in self.idle:
            return False
        others = self._idle_tokens - self.model.in_pages(self.idle[session][1] if session in self.idle else 0)
        if not self._fits(job, others):
            return False
        while not self._fits(job):
            self._drop_idle(keep=session)
        return True

    def _idle_victim(self, sessions: Iterable[str]) -> str | None:
        """Which of these loses its cache: the one that has waited longest for its tool."""
        return next(iter(sessions), None)

    def _relieve(self) -> None:
        """Give something up, since the next step does not fit."""
        if not self._drop_idle():
            share = max(1, int(len(self.running) * self.model.evicted_share))
            for job in reversed([*self.running, *self.feeding][-share:]):
                self._evict(job)
            self._full = True


class AgedEngine(SimulatedEngine):
    """The rules of rocstar's torch engine: trajectories are served in the order in which they came to the engine, and
    the newest gives way, whatever it does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ages: dict[str, int] = {}
        """Session id -> number in the order in which they came."""
        self._came = count()

    def close(self, attempt: SimulatedAttempt) -> None:
        self._ages.pop(attempt.session_id, None)
        super().close(attempt)

    def _counted_tokens(self) -> int:
        return self.held_tokens

    def _age(self, job: Job) -> int:
        return self._ages[job.attempt.session_id]

    def _enqueue(self, job: Job) -> None:
        if job.attempt.session_id not in self._ages:
            self._ages[job.attempt.session_id] = next(self._came)
        insort(self.waiting, job, key=self._age)

    def _enqueue_again(self, job: Job) -> None:
        self._enqueue(job)

    def _may_enter(self, job: Job) -> bool:
        return job.attempt.session_id in self.idle or self._fits(job)

    def _idle_victim(self, sessions: Iterable[str]) -> str | None:
        return max(sessions, key=self._ages.__getitem__, default=None)

    def _relieve(self) -> None:
        newest = max([*self.running, *self.feeding], key=self._age)
        if any(self._ages[session] > self._age(newest) for session in self.idle):
            self._drop_idle()
        else:
            self._evict(newest)


def simulated_engine(name: str, model: EngineModel) -> SimulatedEngine:
    return AgedEngine(name, model) if model.oldest_first else SimulatedEngine(name, model)
