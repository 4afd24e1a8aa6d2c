"""An engine as the simulator sees it: a batch that advances one token a step, a KV cache, and a cost for both.

All running requests sample one token a step, so between two events nothing has to be simulated: `steps` counts the
steps so far, a request knows at which count it finishes, and the seconds of k steps have a closed form. Requests come
in at step boundaries; what they have to be fed shares a step with the decoding ones, `chunk_tokens` at most.

The cache holds a group's prompt once, and a trajectory's own tokens while it runs and while its tool runs. When the
next step does not fit, caches of trajectories that wait for a tool go first, then the requests that came last.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace

from rocstar.rollout.workload import PlannedAttempt
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
    chunk_tokens: int = 8192
    """Most tokens fed in one step."""
    most_running: int = 1 << 30
    """Requests that run at once."""
    watermark: float = 0.01
    """Share of the cache that has to stay free when a request is admitted beside others (vLLM's default)."""
    evicted_share: float = 0.0
    """Of the running requests, given up when the next step does not fit; at least one. 0 is vLLM's rule, 0.5 what the
    paper says of SGLang (3.2)."""

    def slower(self, factor: float) -> EngineModel:
        """The same engine, every step of it `factor` times as long."""
        return replace(
            self,
            step_seconds=self.step_seconds * factor,
            seconds_per_cached_token=self.seconds_per_cached_token * factor,
            seconds_per_sequence=self.seconds_per_sequence * factor,
            seconds_per_prefill_token=self.seconds_per_prefill_token * factor,
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
    """Steps until `wake`."""
    _full: bool = False
    """Something was evicted and nothing has finished since: nobody is admitted."""

    def load(self, now: float) -> EngineLoad:
        tokens = self._steps_by(now) * len(self.running)
        return EngineLoad(
            capacity_tokens=self.model.capacity_tokens,
            used_tokens=self.held_tokens + tokens,
            running=len(self.running) + len(self.feeding),
            waiting=len(self.waiting),
            produced_tokens=self.produced + tokens,
            recomputed_tokens=self.recomputed,
            evictions=self.evictions,
        )

    def submit(self, job: Job, now: float) -> None:
        """Those whose cache is here go first: they hold memory already."""
        if job.attempt.session_id in self.idle:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)
        if self.wake == math.inf:
            self.clock = now
        elif not self.feeding:  # stop at the next boundary
            steps = min(self._planned, self._steps_by(now) + 1)
            self._planned, self.wake = steps, self.clock + self._seconds(steps)

    def close(self, attempt: SimulatedAttempt) -> None:
        """Free what is cached for an attempt that waits for its tool, or has ended."""
        if (held := self.idle.pop(attempt.session_id, None)) is not None:
            self._free(attempt, held[1])

    def settle(self) -> list[Job]:
        """Carry out the planned steps; the completions that have ended."""
        decoding = len(self.running)
        self.busy_seconds += self.wake - self.clock
        self.clock, self.wake = self.wake, math.inf
        self.steps += self._planned
        grown = decoding * self._planned
        self.held_tokens += grown
        self.read_tokens += grown
        self.produced += grown
        if self.feeding:
            self._feed()
        return self._finished()

    def proceed(self) -> None:
        """Admit who fits and plan the steps until something happens, from a step boundary on."""
        if self.wake != math.inf:
            return
        self._admit()
        while self._room() < len(self.running):
            self._relieve()
        if self.feeding:
            self._planned = 1
        elif self.running:
            until_full = self._room() // len(self.running)
            self._planned = min(self._next_finish() - self.steps, until_full)
        else:
            return
        self.wake = self.clock + self._seconds(self._planned)

    # Time

    def _seconds(self, steps: int) -> float:
        """Of `steps` steps from the last boundary, while nobody comes or goes."""
        model, decoding = self.model, len(self.running)
        fixed = model.step_seconds + model.seconds_per_sequence * decoding
        read = steps * self.read_tokens + decoding * steps * (steps - 1) / 2
        fed = min(model.chunk_tokens, sum(job.to_feed for job in self.feeding)) if self.feeding else 0
        return steps * fixed + model.seconds_per_cached_token * read + model.seconds_per_prefill_token * fed

    def _steps_by(self, now: float) -> int:
        """Whole steps done at `now` of those planned: the inverse of `_seconds`."""
        if self.feeding or self.wake == math.inf or now <= self.clock:
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
        while self.feeding and budget:
            job = self.feeding[0]
            fed = min(budget, job.to_feed)
            job.to_feed -= fed
            budget -= fed
            if job.to_feed:
                return
            self.feeding.popleft()
            self._start(job)

    def _start(self, job: Job) -> None:
        job.finish_step = self.steps + job.left
        self._order += 1
        heapq.heappush(self._finishing, (job.finish_step, self._order, job))
        self.running[job] = None
        self.read_tokens += job.context

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
            del self.running[job]
            tokens = job.context + job.left
            self.read_tokens -= tokens
            job.attempt.computed = tokens
            self.idle[job.attempt.session_id] = (job.attempt, tokens - job.attempt.plan.prompt_tokens)
            self._full = False
            ended.append(job)
        return ended

    # Memory

    def _room(self) -> int:
        return self.model.capacity_tokens - self.held_tokens

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.feeding) < self.model.most_running:
            job = self.waiting[0]
            cached = self.idle.get(job.attempt.session_id)
            if cached is None and self._full and (self.running or self.feeding):
                return
            plan = job.attempt.plan
            own = job.context - plan.prompt_tokens - (cached[1] if cached else 0)
            need = own if cached or plan.group in self.prompts else own + plan.prompt_tokens
            growing = len(self.running) + len(self.feeding)
            spare = growing + 1 + int(self.model.watermark * self.model.capacity_tokens) if growing else 1
            if need + spare > self._room():
                if self.running or self.feeding or not self._drop_idle(keep=job.attempt.session_id):
                    return
                continue
            self.waiting.popleft()
            self._take(job, need)

    def _take(self, job: Job, need: int) -> None:
        attempt = job.attempt
        if self.idle.pop(attempt.session_id, None) is None:
            self.prompts[attempt.plan.group] = self.prompts.get(attempt.plan.group, 0) + 1
        again = max(0, attempt.computed - (job.context - need))
        if attempt.lost:
            self.recomputed_after_loss += again
        else:
            self.recomputed += again
        attempt.lost = False
        attempt.computed = max(attempt.computed, job.context)
        self.held_tokens += need
        job.to_feed = need
        self.feeding.append(job)

    def _relieve(self) -> None:
        if self._drop_idle():
            return
        share = max(1, int(len(self.running) * self.model.evicted_share))
        latest = [*self.running, *self.feeding][-share:]
        if len(self.running) + len(self.feeding) == 1:
            raise AssertionError(
                f"{self.name}: one request outgrew the whole cache; simulate() refuses such a workload"
            )
        for job in reversed(latest):
            self._evict(job)
        self._full = True

    def _evict(self, job: Job) -> None:
        tokens = job.tokens(self.steps)
        if job.finish_step < 0:
            self.feeding.remove(job)
        else:
            del self.running[job]
            self.read_tokens -= tokens
            job.left = job.finish_step - self.steps
            job.attempt.computed = tokens
        job.context, job.finish_step, job.to_feed = tokens, -1, 0
        self._free(job.attempt, tokens - job.attempt.plan.prompt_tokens)
        self.waiting.appendleft(job)
        self.evictions += 1

    def _drop_idle(self, keep: str = "") -> bool:
        """Give up the cache of the trajectory that has waited longest for its tool."""
        for session, (attempt, _) in self.idle.items():
            if session != keep:
                self.close(attempt)
                self.evictions += 1
                return True
        return False

    def _free(self, attempt: SimulatedAttempt, own_tokens: int) -> None:
        group = attempt.plan.group
        self.held_tokens -= own_tokens
        self.prompts[group] -= 1
        if not self.prompts[group]:
            del self.prompts[group]
            self.held_tokens -= attempt.plan.prompt_tokens
