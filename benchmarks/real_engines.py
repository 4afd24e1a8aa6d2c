"""Torch engines that do a planned workload, for schedule_real.py: in processes by the clock, or here by CPU seconds."""

from __future__ import annotations

import asyncio
import heapq
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from rocstar.forecast.fit import Trial
from rocstar.forecast.policies import RoundRobin
from rocstar.forecast.workload import PlannedAttempt
from rocstar.rollout.scheduler import Ask, Scheduler

VOCAB = 512
POSITIONS = 640  # of the longest attempt


class Measured(NamedTuple):
    """One step on real engines."""

    ends: list[float]
    """Of each attempt, seconds."""
    idle: float
    """Mean share of the engines: one minus their CPU seconds over the makespan."""
    evictions: int
    recomputed: int
    """Tokens."""
    driver: float
    """CPU seconds a request of whoever asks the engines; 0 where these do not wait for it."""
    stolen: float
    """Share of the makespan that engines waited for a core; mean."""


class Engines(Protocol):
    async def roll(self, attempts: Sequence[PlannedAttempt], scheduler: Scheduler, count: int) -> Measured:
        """All attempts at once on the first `count` engines."""
        ...

    async def calibrate(self, workloads: Sequence[Sequence[PlannedAttempt]]) -> list[Trial]:
        """What one engine takes for each of the workloads, as many as were done by now."""
        ...

    async def close(self) -> None: ...


def quickstart_model() -> Any:
    import torch
    from decode import Size, random_model

    return random_model(Size(96, 3, 3, 1, 256, VOCAB), torch.float32)


class InProcesses:
    """Each engine in a process of its own, on a core of its own; seconds by the clock."""

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self._engines = engines
        self._steps = 0

    @classmethod
    async def start(cls, count: int, rows: int, kv_tokens: int) -> InProcesses:
        from rocstar.engines.process import EngineSettings, ProcessEngine

        with tempfile.TemporaryDirectory() as folder:
            quickstart_model().save_pretrained(folder)
            settings = EngineSettings(
                folder=folder, rows=rows, positions=POSITIONS, kv_tokens=kv_tokens, vocab_size=VOCAB
            )
            engines = {f"engine{place}": ProcessEngine(settings) for place in range(count)}
            await asyncio.gather(*(engine.restart(None) for engine in engines.values()))
        for engine, core in zip(engines.values(), _cores(count), strict=True):
            for thread in _threads(engine.pid):
                os.sched_setaffinity(thread, {core})
        return cls(engines)

    async def roll(self, attempts: Sequence[PlannedAttempt], scheduler: Scheduler, count: int) -> Measured:
        from rocstar.rollout.fleet import Fleet
        from tests.rollout.played import Dictated, dictated_lengths, play

        used = {name: engine for name, engine in list(self._engines.items())[:count]}
        dictated = {name: Dictated(engine) for name, engine in used.items()}
        for engine in dictated.values():
            engine.lengths = dictated_lengths(attempts)
        fleet = Fleet(dictated, scheduler, vocab_size=VOCAB)
        before, waited, own = [engine.load() for engine in used.values()], self._waited(used), time.process_time()
        cpu = sum(engine.cpu_seconds() for engine in used.values())
        ends = await play(fleet, attempts, vocab_size=VOCAB, clock=time.monotonic)
        driver = (time.process_time() - own) / sum(len(attempt.turns) for attempt in attempts)
        waited, most = self._waited(used) - waited, max(ends) * count
        await fleet.close()
        await asyncio.sleep(0.3)  # until they have said what they have used, and freed all
        after = [engine.load() for engine in used.values()]
        return Measured(
            ends=ends,
            idle=1 - (sum(engine.cpu_seconds() for engine in used.values()) - cpu) / most,
            evictions=sum(new.evictions - old.evictions for new, old in zip(after, before, strict=True)),
            recomputed=sum(
                new.recomputed_tokens - old.recomputed_tokens for new, old in zip(after, before, strict=True)
            ),
            driver=driver if count >= len(os.sched_getaffinity(0)) else 0.0,
            stolen=waited / most,
        )

    async def calibrate(self, workloads: Sequence[Sequence[PlannedAttempt]]) -> list[Trial]:
        """One after another, now."""
        return [Trial(attempts=each, ends=(await self.roll(each, RoundRobin(), 1)).ends) for each in workloads]

    def _waited(self, engines: Mapping[str, Any]) -> float:
        """Seconds that their threads could have run and did not."""
        return sum(_run_delay(thread) for engine in engines.values() for thread in _threads(engine.pid))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))


def _cores(count: int) -> list[int]:
    there = sorted(os.sched_getaffinity(0))
    if len(there) < count:
        raise SystemExit(f"{count} engines need {count} cores, there are {len(there)}")
    return there[:count]


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _run_delay(thread: int) -> float:
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


class ByCpuSeconds:
    """Decoders of the torch engine in this process, each with a clock that its own CPU seconds move; tools take their
    time on the same clocks. CPU seconds of the same work differ by a third with what runs beside, so they are counted
    in steps of a reference decoder, which takes one now and then. Workloads for the fit are done step by step between
    the steps of the others, on a decoder of their own: a decoder that steps alone finds its weights in the nearest
    cache and takes a tenth less. Left out: processes, event loops, threads."""

    def __init__(self, rows: int, pages: int) -> None:
        self._rows, self._pages, self._reference = rows, pages, _Reference(rows, pages)
        self._calibration: _Calibration | None = None

    @classmethod
    async def start(cls, count: int, rows: int, kv_tokens: int) -> ByCpuSeconds:
        from rocstar.engines.memory import kv_pages

        return cls(rows, kv_pages(kv_tokens, rows, POSITIONS))

    async def roll(self, attempts: Sequence[PlannedAttempt], scheduler: Scheduler, count: int) -> Measured:
        members = {
            f"engine{place}": _Member(_decoder(self._rows, self._pages), self._reference) for place in range(count)
        }
        run = _CpuRun(attempts, scheduler, members)
        while not run.over:
            run.advance()
            if self._calibration is not None:
                self._calibration.beside()
        makespan = max(run.ends.values())
        return Measured(
            ends=[run.ends[number] for number in range(len(attempts))],
            idle=1 - sum(member.busy for member in members.values()) / makespan / count,
            evictions=sum(member.decoder.load().evictions for member in members.values()),
            recomputed=sum(member.decoder.recomputed_tokens for member in members.values()),
            driver=0.0,
            stolen=0.0,
        )

    async def calibrate(self, workloads: Sequence[Sequence[PlannedAttempt]]) -> list[Trial]:
        """Begun at the first call; those that have ended since the last."""
        if self._calibration is None:
            decoder = _decoder(self._rows, self._pages)
            self._calibration = _Calibration(workloads, lambda: _Member(decoder, self._reference))
        return self._calibration.taken()

    async def close(self) -> None:
        pass


def _decoder(rows: int, pages: int) -> Any:
    from rocstar.engines.torch_decoder import PagedDecoder

    decoder = PagedDecoder(quickstart_model(), rows=rows, positions=POSITIONS, pages=pages, vocab_size=VOCAB)
    decoder.submit(_work("warm", "warm", tuple(range(64)), 8))
    while not decoder.step():
        pass
    decoder.close_session("warm")
    return decoder


def _work(request: str, session: str, ids: tuple[int, ...], tokens: int, owner: int = 0) -> Any:
    from rocstar.engines.torch_table import Work
    from rocstar.types import Sampling

    sampling = Sampling(max_new_tokens=tokens, seed=owner)
    return Work(request_id=request, session_id=session, token_ids=ids, sampling=sampling, owner=owner)


class _Reference:
    """A decoder that does the same all the time. What its steps take, over what the first took, is how slow the machine
    is just now."""

    SESSIONS, TOKENS = 7, 256  # decoded at once, as many as fit a small cache at the mean of schedule_real.py
    EVERY = 8  # steps of others for one of its own
    LATELY = 5  # steps whose median counts

    def __init__(self, rows: int, pages: int) -> None:
        self._decoder = _decoder(max(rows, self.SESSIONS), max(pages, 2 * self.SESSIONS * self.TOKENS))
        self._begun = self._others = 0
        self._usual = median([self._step() for _ in range(self.TOKENS // 2)])
        self._taken = deque([self._usual], maxlen=self.LATELY)

    def slowness(self) -> float:
        self._others += 1
        if self._others % self.EVERY == 0:
            self._taken.append(self._step())
        return median(self._taken) / self._usual

    def _step(self) -> float:
        """CPU seconds."""
        if not self._decoder.active:
            for _ in range(self.SESSIONS):
                self._begun += 1
                self._decoder.submit(_work(f"{self._begun}", f"{self._begun}", tuple(range(32)), self.TOKENS))
                self._decoder.close_session(f"{self._begun - self.SESSIONS}")
            self._decoder.step()
        started = time.thread_time()
        self._decoder.step()
        return time.thread_time() - started


class _Member:
    """One decoder and its clock."""

    def __init__(self, decoder: Any, reference: _Reference) -> None:
        self.decoder, self._reference = decoder, reference
        self.clock = self.busy = self.active_until = 0.0

    def timed(self, work: Callable[[], Any]) -> Any:
        started = time.thread_time()
        found = work()
        taken = (time.thread_time() - started) / self._reference.slowness()
        self.clock += taken
        self.busy += taken
        return found

    def next(self) -> float | None:
        """When it can do something; None while it has nothing to do."""
        from rocstar.engines.torch_engine import PATIENCE_SECONDS

        if self.decoder.active:
            return self.clock
        return max(self.clock, self.active_until + PATIENCE_SECONDS) if self.decoder.waiting else None

    def advance(self) -> list[Any]:
        if not self.decoder.active:
            self.clock = self.next() or self.clock
            self.decoder.evict()
            return []
        ended = self.timed(self.decoder.step)
        self.active_until = self.clock
        return list(ended)

    def load(self) -> Any:
        return self.decoder.load()


class _CpuRun:
    """One step of ByCpuSeconds: whoever's clock is behind goes on first."""

    def __init__(self, attempts: Sequence[PlannedAttempt], scheduler: Scheduler, members: dict[str, _Member]) -> None:
        from tests.rollout.played import _random_ids

        self._attempts, self._scheduler, self._members = attempts, scheduler, members
        self._draw = _random_ids
        self._ids = [_random_ids(f"{each.group}/prompt", each.prompt_tokens, VOCAB) for each in attempts]
        self._turn = [0] * len(attempts)
        self._home: dict[int, str] = {}
        self._asks = [(0.0, number) for number in range(len(attempts))]
        self.ends: dict[int, float] = {}

    @property
    def over(self) -> bool:
        return len(self.ends) == len(self._attempts)

    def advance(self) -> None:
        """What happens next: a step of one engine, or tools that answer."""
        times = [(when, name) for name, member in self._members.items() if (when := member.next()) is not None]
        now, name = min(times, default=(float("inf"), ""))
        if self._asks and self._asks[0][0] <= now:
            self._ask_all(self._asks[0][0])
            return
        member = self._members[name]
        for work, completion in member.advance():
            self._answered(work.owner, completion, member.clock)
        self._assign(member.clock)

    def _ask_all(self, now: float) -> None:
        while self._asks and self._asks[0][0] <= now:
            number = heapq.heappop(self._asks)[1]
            plan, ids = self._attempts[number], self._ids[number]
            ask = Ask(
                request_id=f"0/{number}/{self._turn[number]}",
                session_id=f"0/{number}",
                group=plan.group,
                prompt_tokens=plan.prompt_tokens,
                tokens=len(ids),
                limit=plan.limit + plan.prompt_tokens - len(ids),
            )
            self._scheduler.ask(ask, now)
        self._assign(now)

    def _assign(self, now: float) -> None:
        loads = {name: member.load() for name, member in self._members.items()}
        for request, name in self._scheduler.assign(loads, now):
            number, member = int(request.split("/")[1]), self._members[name]
            if (home := self._home.get(number, name)) != name:
                self._members[home].decoder.close_session(f"0/{number}")
            self._home[number] = name
            tokens = self._attempts[number].turns[self._turn[number]].sampled_tokens
            work = _work(request, f"0/{number}", tuple(self._ids[number]), tokens, number)
            member.clock = max(member.clock, now)
            member.timed(lambda member=member, work=work: member.decoder.submit(work))

    def _answered(self, number: int, completion: Any, now: float) -> None:
        plan, turn = self._attempts[number], self._turn[number]
        self._scheduler.answered(f"0/{number}/{turn}", len(completion.token_ids), now)
        reply = self._draw(f"0/{number}/{turn}", plan.turns[turn].reply_tokens, VOCAB)
        self._ids[number] += [*completion.token_ids, *reply]
        self._turn[number] += 1
        if turn + 1 < len(plan.turns):
            heapq.heappush(self._asks, (now + plan.turns[turn].tool_seconds, number))
            return
        self._members[self._home[number]].decoder.close_session(f"0/{number}")
        self._scheduler.close(f"0/{number}", now)
        self.ends[number] = now


class _Calibration:
    """One decoder that does the workloads for the fit in turns, a step now and then."""

    EVERY = 4  # steps of others for one of its own

    def __init__(self, workloads: Sequence[Sequence[PlannedAttempt]], member: Callable[[], _Member]) -> None:
        self._workloads, self._member = cycle(workloads), member
        self._others = 0
        self._trials: list[Trial] = []
        self._begin()

    def _begin(self) -> None:
        self._attempts = next(self._workloads)
        self._run = _CpuRun(self._attempts, RoundRobin(), {"engine0": self._member()})

    def beside(self) -> None:
        """To be called after each step of the others."""
        self._others += 1
        if self._others % self.EVERY:
            return
        self._run.advance()
        if self._run.over:
            ends = [self._run.ends[number] for number in range(len(self._attempts))]
            self._trials.append(Trial(attempts=self._attempts, ends=ends))
            self._begin()

    def taken(self) -> list[Trial]:
        """Trials that have ended since the last call."""
        found, self._trials = self._trials, []
        return found
