"""An engine as the simulator sees it: a batch that advances one token a step, a KV cache, and a cost for both.

All running requests sample one token a step, so between two events nothing has to be simulated: `steps` counts the
steps so far, a request knows at which count it finishes, and the seconds of k steps have a closed form. Requests come
in at step boundaries; what they have to be fed shares a step with the decoding ones, `chunk_tokens` at most. The step
that feeds the last of it samples the first token.

The cache holds a group's prompt once, and a trajectory's own tokens while it runs and while its tool runs, in whole
pages. Who is served and who gives way when the next step does not fit is one of two rules (`oldest_first`).
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field, replace

from rocstar.errors import ConfigError
from rocstar.forecast.workload import PlannedAttempt
from rocstar.types import EngineLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Sizes and costs of one engine."""

    capacity_tokens: int
    """Of KV cache."""
    step_seconds: float
    """Of a decode step, whatever is in it: reading the weights."""
    seconds_per_cached_token: float
    """Added to a step by each token in the caches that it reads."""
    seconds_per_sequence: float
    """Added to a step by each running request."""
    seconds_per_prefill_token: float
    """Added to a step by each token that is fed, first or again."""
    seconds_per_request: float = 0.0
    """Added by each request that begins, also after an eviction: hearing of it, answering it."""
    chunk_tokens: int = 8192
    """Most tokens fed in one step."""
    most_running: int = 1 << 30
    """Requests that run at once."""
    watermark: float = 0.0
    """Share of the cache that has to stay free when a request is admitted beside others (0 is vLLM's default)."""
    evicted_share: float = 0.0
    """Of the running requests, given up when the next step does not fit; at least one. 0 is vLLM's rule, 0.5 what the
    paper says of SGLang (3.2). Not where `oldest_first`."""
    page_tokens: int = 1
    """The cache is given out in pages of so many tokens; a page with a prompt's end is not shared."""
    told_lengths: bool = False
    """Where lengths are dictated the engine is told how long a turn will be, and keeps no page free for who is on its
    last one."""
    patience_seconds: float = 0.0
    """With nothing to compute, until the cache of a trajectory that waits for its tool goes to a request that waits."""
    oldest_first: bool = False
    """False: requests whose cache is there go first, then in order of arrival; caches of trajectories that wait for a
    tool give way first, then the latest requests (vLLM). True: trajectories are served in the order in which they came
    to the engine, and the newest gives way, whatever it does (rocstar's torch engine)."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.oldest_first and self.evicted_share:
            raise ConfigError(
                f"evicted_share {self.evicted_share} is no rule of an engine whose newest trajectory gives way alone; "
                "leave it at 0"
            )

    def slower(self, factor: float) -> EngineModel:
        """The same engine, every step of it `factor` times as long."""
        return replace(
            self,
            step_seconds=self.step_seconds * factor,
            seconds_per_cached_token=self.seconds_per_cached_token * factor,
            seconds_per_sequence=self.seconds_per_sequence * factor,
            seconds_per_prefill_token=self.seconds_per_prefill_token * factor,
            seconds_per_request=self.seconds_per_request * factor,
        )

    def shared_tokens(self, prompt_tokens: int) -> int:
        """Of a prompt, in pages that siblings hold together."""
        whole = prompt_tokens if self.page_tokens == 1 else prompt_tokens - 1
        return whole // self.page_tokens * self.page_tokens

    def in_pages(self, tokens: int) -> int:
        """Tokens of the cache that so many of one trajectory take."""
        return -(-tokens // self.page_tokens) * self.page_tokens


def torch_engine(*, capacity_tokens: int, most_running: int) -> EngineModel:
    """Sizes and rules of rocstar's torch engine; what it costs is to be measured."""
    return EngineModel(
        capacity_tokens=capacity_tokens,
        step_seconds=0.0,
        seconds_per_cached_token=0.0,
        seconds_per_sequence=0.0,
        seconds_per_prefill_token=0.0,
        chunk_tokens=256,
        most_running=most_running,
        page_tokens=16,
        patience_seconds=1.0,
        oldest_first=True,
    )


@dataclass(slots=True, eq=False)
class SimulatedAttempt:
    """How far one attempt has come."""

    session_id: str
    plan: PlannedAttempt
    tokens: int
    """Of prompt and response so far, those of a completion under way excluded."""
    turn: int = 0
    computed: int = 0
    """Tokens that some engine has had in its cache."""
    engine: str | None = None
    """Where it was last asked."""
    lost: bool = False
    """Its engine went; what is fed again next is the engine's fault."""


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
    age: int = 0
    """Its trajectory's number in the order in which they came to the engine."""

    def tokens(self, step: int) -> int:
        return self.context if self.finish_step < 0 else self.context + self.left - (self.finish_step - step)


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    name: str
    model: EngineModel
    clock: float = 0.0
    """Of the last step boundary, seconds."""
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
    requests: int = 0
    """That began."""
    busy_seconds: float = 0.0
    running: dict[Job, None] = field(default_factory=dict)
    """In order of arrival."""
    feeding: deque[Job] = field(default_factory=deque)
    waiting: deque[Job] = field(default_factory=deque)
    ages: dict[str, int] = field(default_factory=dict)
    """Session id -> number in the order in which they came."""
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
    """Of those that decode, how many will fill a page at the count of steps that leaves this remainder."""
    _active_until: float = 0.0
    _full: bool = False
    """Something was evicted and nothing has finished since: nobody is admitted."""

    def __post_init__(self) -> None:
        self._phases = [0] * self.model.page_tokens

    def load(self, now: float) -> EngineLoad:
        steps = self._steps_by(now)
        return EngineLoad(
            capacity_tokens=self.model.capacity_tokens,
            used_tokens=self.held_tokens + self._growth(steps),
            running=len(self.running) + len(self.feeding),
            waiting=len(self.waiting),
            produced_tokens=self.produced + steps * len(self.running),
            recomputed_tokens=self.recomputed,
            evictions=self.evictions,
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
        self.ages.pop(attempt.session_id, None)
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
            self._relieve()
        if self.feeding:
            self._planned = 1
        elif self.running:
            self._planned = min(self._next_finish() - self.steps, self._steps_until_full())
        elif self.waiting:
            self._planned, self.wake = 0, self._active_until + self.model.patience_seconds
            return
        else:
            return
        self.wake = self.clock + self._seconds(self._planned)

    # Time

    def _seconds(self, steps: int) -> float:
        """Of `steps` steps from the last boundary, while nobody comes or goes."""
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
            self._count_again(job, fed)
            job.to_feed -= fed
            budget -= fed
            if job.to_feed:
                return
            self.feeding.popleft()
            self._start(job)

    def _count_again(self, job: Job, fed: int) -> None:
        """Of the next `fed` tokens, those that some engine had cached."""
        again = min(fed, max(0, job.attempt.computed - (job.context - job.to_feed)))
        if job.attempt.lost:
            self.recomputed_after_loss += again
        else:
            self.recomputed += again

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

    def _next_finish(self) -> int:
        while self._finishing[0][2].finish_step != self._finishing[0][0]:
            heapq.heappop(self._finishing)  # evicted since
        return self._finishing[0][0]

    def _finished(self) -> list[Job]:
        ended: list[Job] = []
        while self._finishing and self._finishing[0][0] <= self.steps:
            finish_step, _, job = heapq.heappop(self._finishing)
            if job.finish_step != finish_step or job not in self.running:
                continue
            own = self._own_tokens(job)
            self._stop(job)
            self.idle[job.attempt.session_id] = (job.attempt, own)
            self._full = False
            ended.append(job)
        return ended

    # Memory

    def _room(self) -> int:
        return self.model.capacity_tokens - self.held_tokens

    def _own_tokens(self, job: Job) -> int:
        """In pages that no sibling shares."""
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

    def _enqueue(self, job: Job) -> None:
        """By age; or those whose cache is here first, since they hold memory already."""
        session = job.attempt.session_id
        if self.model.oldest_first:
            job.age = self.ages.setdefault(session, self._next_age())
            insort(self.waiting, job, key=lambda waiting: waiting.age)
        elif session in self.idle:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)

    def _next_age(self) -> int:
        self._order += 1
        return self._order

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.feeding) < self.model.most_running:
            job = self.waiting[0]
            if not self._fits(job):
                if self._waits_for_others(job):
                    return
                continue
            self.waiting.popleft()
            self._take(job)

    def _fits(self, job: Job) -> bool:
        cached, growing = job.attempt.session_id in self.idle, len(self.running) + len(self.feeding)
        if cached and self.model.oldest_first:
            return True
        if not cached and self._full and growing:
            return False
        pages = self._growing() + (0 if self._begins_as_sibling(job) else 1)
        spare = pages * self.model.page_tokens + int(self.model.watermark * self.model.capacity_tokens)
        return self._need(job) + (spare if growing else 1) <= self._room()

    def _growing(self) -> int:
        """Requests here that may need another page."""
        if not self.model.told_lengths:
            return len(self.running) + len(self.feeding)
        ends = ((self._own_tokens(job), self._own_tokens(job) + self._left(job)) for job in self.running)
        return len(self.feeding) + sum(end > self.model.in_pages(now) for now, end in ends)

    def _left(self, job: Job) -> int:
        """Tokens still to sample of one that decodes."""
        return job.finish_step - self.steps

    def _begins_as_sibling(self, job: Job) -> bool:
        """The page that it needs for itself is then the one that it writes its first token to."""
        plan = job.attempt.plan
        return self.model.page_tokens > 1 and job.context == plan.prompt_tokens and plan.group in self.prompts

    def _waits_for_others(self, job: Job) -> bool:
        """False where nobody is left to wait for, and a cache was given up for it."""
        if self.running or self.feeding or self.clock < self._active_until + self.model.patience_seconds:
            return True
        return not self._drop_idle(keep=job.attempt.session_id)

    def _need(self, job: Job) -> int:
        """Tokens of the cache beyond what is here of it."""
        attempt, model = job.attempt, self.model
        if (cached := self.idle.get(attempt.session_id)) is not None:
            return model.in_pages(self._own_tokens(job)) - model.in_pages(cached[1])
        shared = 0 if attempt.plan.group in self.prompts else model.shared_tokens(attempt.plan.prompt_tokens)
        return model.in_pages(self._own_tokens(job)) + shared

    def _take(self, job: Job) -> None:
        attempt = job.attempt
        self.held_tokens += self._need(job)
        job.to_feed = job.context - self._cached(job)
        if self.idle.pop(attempt.session_id, None) is None:
            self.prompts[attempt.plan.group] = self.prompts.get(attempt.plan.group, 0) + 1
        self.feeding.append(job)
        self.requests += 1
        self._begun += 1

    def _cached(self, job: Job) -> int:
        """Of its tokens, those in the cache."""
        plan = job.attempt.plan
        if (cached := self.idle.get(job.attempt.session_id)) is not None:
            return self.model.shared_tokens(plan.prompt_tokens) + cached[1]
        return plan.prompt_tokens if plan.group in self.prompts else 0

    # Who gives way

    def _relieve(self) -> None:
        if len(self.running) + len(self.feeding) == 1 and not self.idle:
            raise AssertionError(
                f"{self.name}: one request outgrew the whole cache; simulate() refuses such a workload"
            )
        if self.model.oldest_first:
            self._relieve_of_newest()
        elif not self._drop_idle():
            share = max(1, int(len(self.running) * self.model.evicted_share))
            for job in reversed([*self.running, *self.feeding][-share:]):
                self._evict(job)
            self._full = True

    def _relieve_of_newest(self) -> None:
        job = max([*self.running, *self.feeding], key=lambda busy: busy.age)
        if any(self.ages[session] > job.age for session in self.idle):
            self._drop_idle()
        else:
            self._evict(job)

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

    def _enqueue_again(self, job: Job) -> None:
        if self.model.oldest_first:
            self._enqueue(job)
        else:
            self.waiting.appendleft(job)

    def _drop_idle(self, keep: str = "") -> bool:
        """Give up the cache of the trajectory that has waited longest for its tool, or that is the newest."""
        sessions = (session for session in self.idle if session != keep)
        found = (
            max(sessions, key=self.ages.__getitem__, default=None) if self.model.oldest_first else next(sessions, None)
        )
        if found is None:
            return False
        self._drop(found)
        self.evictions += 1
        return True

    def _drop(self, session: str) -> None:
        if (held := self.idle.pop(session, None)) is not None:
            self._free(*held)

    def _free(self, attempt: SimulatedAttempt, own_tokens: int) -> None:
        group = attempt.plan.group
        self.held_tokens -= self.model.in_pages(own_tokens)
        self.prompts[group] -= 1
        if not self.prompts[group]:
            del self.prompts[group]
            self.held_tokens -= self.model.shared_tokens(attempt.plan.prompt_tokens)
