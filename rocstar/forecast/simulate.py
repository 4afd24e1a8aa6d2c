"""One step's rollouts as a discrete-event simulation: a scheduler, modelled engines, tools that take their time.

The scheduler is the one that a fleet would use, behind the same seam, and sees the same facts. What happens next is the
earliest of: an engine reaches a step boundary that matters, a tool answers, an engine dies. Deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from rocstar.errors import ConfigError
from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.simulated_engine import Job, SimulatedAttempt, SimulatedEngine, simulated_engine
from rocstar.forecast.workload import PlannedAttempt
from rocstar.rollout.scheduler import Ask, Scheduler
from rocstar.types import EngineLoad

TAIL = 0.95  # of the attempts have ended when the tail begins


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one simulated step came to."""

    makespan: float
    """Until the last attempt has ended, seconds."""
    lower_bound: float
    """No schedule ends before it, deaths left aside; seconds."""
    idle_share: Mapping[str, float]
    """By engine: part of the makespan, or of its life, in which the engine computed nothing."""
    tail_share: float
    """Part of the makespan that was left when 95% of the attempts had ended."""
    evictions: int
    produced_tokens: int
    """Sampled, also in turns that a dying engine took with it."""
    recomputed_tokens: int
    """Fed although some engine had held them: after evictions, and where a trajectory changed its engine."""
    recomputed_after_loss: int
    """The same for what a dead engine had held: no policy can avoid it."""
    moves: int
    """Turns asked of another engine than the turn before, deaths left aside."""
    ends: tuple[float, ...]
    """When each attempt had come to its end, in their order; seconds."""

    @property
    def recomputed_share(self) -> float:
        return self.recomputed_tokens / max(1, self.produced_tokens)


def alike(model: EngineModel, count: int) -> dict[str, EngineModel]:
    """`count` engines of this model, by name."""
    return {f"engine{place}": model for place in range(count)}


def simulate(
    attempts: Sequence[PlannedAttempt],
    engines: Mapping[str, EngineModel],
    scheduler: Scheduler,
    *,
    deaths: Mapping[str, float] | None = None,
) -> StepReport:
    """Roll all attempts at once and see what it takes. `deaths`: engine -> when it goes for good, seconds. Raises
    ConfigError for an attempt that does not fit an engine, and where no engine is left."""
    return simulate_steps([attempts], engines, scheduler, deaths=deaths)[0]


def simulate_steps(
    steps: Sequence[Sequence[PlannedAttempt]],
    engines: Mapping[str, EngineModel],
    scheduler: Scheduler,
    *,
    deaths: Mapping[str, float] | None = None,
) -> list[StepReport]:
    """One step after another on the same engines, as in training: the scheduler keeps what it has learned. `deaths`
    happen in the last step, seconds after its beginning. Session ids are `STEP/NUMBER`, both from 0."""
    longest = max(attempt.tokens for attempts in steps for attempt in attempts)
    for model in engines.values():
        if (need := model.in_pages(longest)) >= model.capacity_tokens:
            raise ConfigError(
                f"an attempt needs {need} tokens of KV cache and an engine has {model.capacity_tokens}; give it more"
            )
    alive = {name: simulated_engine(name, model) for name, model in engines.items()}
    found, start = [], 0.0
    for number, attempts in enumerate(steps):
        step = _Step(attempts, alive, scheduler, f"{number}/", start)
        step.run((deaths or {}) if number + 1 == len(steps) else {})
        found.append(step.report(lower_bound(attempts, list(engines.values()))))
        start = step.now
    return found


def lower_bound(attempts: Sequence[PlannedAttempt], engines: Sequence[EngineModel]) -> float:
    """Seconds that no schedule can beat: all the work shared out perfectly over engines that are always full, or the
    longest attempt alone on the fastest engine.

    Reading caches, sampling and feeding cost the same on whichever engine and in whichever batch. A step cannot read
    more own tokens than the cache holds, which bounds the number of steps from below."""
    prompts = sum({attempt.group: attempt.prompt_tokens for attempt in attempts}.values())
    reads = sum(_reads(attempt) for attempt in attempts)
    own = sum(_reads(attempt) - attempt.prompt_tokens * attempt.sampled_tokens for attempt in attempts)
    sampled = sum(attempt.sampled_tokens for attempt in attempts)
    fed = prompts + sum(turn.reply_tokens for attempt in attempts for turn in attempt.turns)
    requests = sum(len(attempt.turns) for attempt in attempts)

    def whole(model: EngineModel) -> float:
        """All the work on one engine, seconds."""
        seconds = reads * model.seconds_per_cached_token + sampled * model.seconds_per_sequence
        seconds += fed * model.seconds_per_prefill_token + requests * model.seconds_per_request
        return seconds + own / model.capacity_tokens * model.step_seconds

    longest = sorted(attempts, key=attrgetter("sampled_tokens"))[-32:]  # the few that can take longest alone
    alone = [whole(model) for model in engines]
    shared = 1.0 / sum(1.0 / seconds for seconds in alone) if all(alone) else 0.0
    return max(shared, max(min(_alone(attempt, model) for model in engines) for attempt in longest))


def _alone(attempt: PlannedAttempt, model: EngineModel) -> float:
    step = model.step_seconds + model.seconds_per_sequence
    waits = sum(turn.tool_seconds + model.seconds_per_request for turn in attempt.turns)
    return step * attempt.sampled_tokens + model.seconds_per_cached_token * _reads(attempt) + waits


def _reads(attempt: PlannedAttempt) -> int:
    """Cached tokens read over all its decode steps."""
    context, reads = attempt.prompt_tokens, 0
    for turn in attempt.turns:
        reads += turn.sampled_tokens * context + turn.sampled_tokens * (turn.sampled_tokens - 1) // 2
        context += turn.sampled_tokens + turn.reply_tokens
    return reads


class _Loads(Mapping[str, EngineLoad]):
    """Load facts of the engines that are up, made when one is read."""

    def __init__(self, engines: Mapping[str, SimulatedEngine], now: float) -> None:
        self.engines, self.now = engines, now

    def __getitem__(self, name: str) -> EngineLoad:
        return self.engines[name].load(self.now)

    def __iter__(self) -> Iterator[str]:
        return iter(self.engines)

    def __len__(self) -> int:
        return len(self.engines)

    def __contains__(self, name: object) -> bool:
        return name in self.engines


class _Step:
    """The state of one simulated step, and the loop that moves it."""

    def __init__(
        self,
        attempts: Sequence[PlannedAttempt],
        engines: dict[str, SimulatedEngine],
        scheduler: Scheduler,
        name: str,
        start: float,
    ) -> None:
        self.scheduler, self.start, self.now = scheduler, start, start
        self.attempts = [
            SimulatedAttempt(session_id=f"{name}{index}", plan=plan, tokens=plan.prompt_tokens)
            for index, plan in enumerate(attempts)
        ]
        self.engines = engines
        self.all_engines = dict(engines)
        self.before = {name: replace(engine) for name, engine in engines.items()}
        """Their counters at the start."""
        self.lifetime: dict[str, float] = {}
        self.asked: dict[str, SimulatedAttempt] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.ends: dict[str, float] = {}
        """Session id -> seconds since the start."""
        self.moves = 0
        self.changed: dict[str, None] = {}
        self.scheduled: dict[str, float] = {}

    def run(self, deaths: Mapping[str, float]) -> None:
        for engine, when in deaths.items():
            self._at(self.start + when, lambda engine=engine: self._die(engine))  # type: ignore[misc]
        for attempt in self.attempts:
            self._ask(attempt)
        self._decide()
        while len(self.ends) < len(self.attempts):
            if not self.events:
                raise ConfigError(f"{len(self.attempts) - len(self.ends)} attempts wait and no engine takes them")
            self.now, _, event = heapq.heappop(self.events)
            event()
            while self.events and self.events[0][0] == self.now:
                heapq.heappop(self.events)[2]()
            self._decide()

    def report(self, bound: float) -> StepReport:
        ends = sorted(self.ends.values())
        makespan, tail = ends[-1], ends[max(0, math.ceil(TAIL * len(ends)) - 1)]
        return StepReport(
            makespan=makespan,
            lower_bound=bound,
            idle_share={name: self._idle_share(name, makespan) for name in self.all_engines},
            tail_share=1.0 - tail / makespan,
            evictions=self._since(lambda engine: engine.evictions),
            produced_tokens=self._since(lambda engine: engine.produced),
            recomputed_tokens=self._since(lambda engine: engine.recomputed),
            recomputed_after_loss=self._since(lambda engine: engine.recomputed_after_loss),
            moves=self.moves,
            ends=tuple(self.ends[attempt.session_id] for attempt in self.attempts),
        )

    def _since(self, counter: Callable[[SimulatedEngine], int]) -> int:
        return sum(counter(engine) - counter(self.before[name]) for name, engine in self.all_engines.items())

    def _idle_share(self, name: str, makespan: float) -> float:
        life = min(makespan, self.lifetime.get(name, makespan))
        busy = self.all_engines[name].busy_seconds - self.before[name].busy_seconds
        return max(0.0, 1.0 - busy / life) if life else 0.0

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, event))

    # Events

    def _ask(self, attempt: SimulatedAttempt) -> None:
        request = f"{attempt.session_id}/{attempt.turn}"
        self.asked[request] = attempt
        ask = Ask(
            request_id=request,
            session_id=attempt.session_id,
            group=attempt.plan.group,
            prompt_tokens=attempt.plan.prompt_tokens,
            tokens=attempt.tokens,
            limit=attempt.plan.limit + attempt.plan.prompt_tokens - attempt.tokens,
        )
        self.scheduler.ask(ask, self.now)

    def _decide(self) -> None:
        """Let the scheduler assign, then let the engines that something happened to go on."""
        assigned = self.scheduler.assign(_Loads(self.engines, self.now), self.now)
        for request, name in assigned.items():
            self._submit(self.asked.pop(request), name)
        for name in self.changed:
            if (engine := self.engines.get(name)) is not None:
                engine.proceed()
                if engine.wake != math.inf and self.scheduled.get(name) != engine.wake:
                    self.scheduled[name] = engine.wake
                    self._at(engine.wake, partial(self._settle, engine))
        self.changed.clear()

    def _submit(self, attempt: SimulatedAttempt, name: str) -> None:
        if attempt.engine not in (None, name):
            self.moves += not attempt.lost
            if attempt.engine in self.engines:
                self.engines[attempt.engine].close(attempt)
        attempt.engine = name
        left = attempt.plan.turns[attempt.turn].sampled_tokens
        self.engines[name].submit(Job(attempt, attempt.tokens, left), self.now)
        self.changed[name] = None

    def _settle(self, engine: SimulatedEngine) -> None:
        if engine.wake != self.now or engine.name not in self.engines:
            return  # planned anew since, or gone
        del self.scheduled[engine.name]
        self.changed[engine.name] = None
        for job in engine.settle():
            self._answered(engine, job.attempt)

    def _answered(self, engine: SimulatedEngine, attempt: SimulatedAttempt) -> None:
        turn = attempt.plan.turns[attempt.turn]
        request = f"{attempt.session_id}/{attempt.turn}"
        self.scheduler.answered(request, turn.sampled_tokens, self.now)
        attempt.tokens += turn.sampled_tokens + turn.reply_tokens
        attempt.turn += 1
        if attempt.turn < len(attempt.plan.turns):
            self._at(self.now + turn.tool_seconds, lambda: self._ask(attempt))
            return
        engine.close(attempt)
        self.scheduler.close(attempt.session_id, self.now)
        self.ends[attempt.session_id] = self.now - self.start

    def _die(self, name: str) -> None:
        """What it decoded is asked again from its last turn; what it cached is fed again elsewhere."""
        engine = self.engines.pop(name)
        self.lifetime[name] = self.now - self.start
        self.changed.pop(name, None)
        if engine.wake != math.inf:
            engine.busy_seconds += self.now - engine.clock
        for attempt in self.attempts:
            if attempt.engine == name and attempt.turn < len(attempt.plan.turns):
                attempt.lost = True
        for job in [*engine.running, *engine.feeding, *engine.waiting]:
            attempt = job.attempt
            attempt.computed = attempt.tokens  # of a turn asked again its samples are new tokens
            self.asked[f"{attempt.session_id}/{attempt.turn}"] = attempt
        self.scheduler.lose(name, self.now)
