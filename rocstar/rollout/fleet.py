"""Several engines behind one Engine: runs turns where a scheduler assigns them, and tracks which engines are healthy.

    generate -> Ask -> Scheduler.assign -> the turn runs on that engine -> its completion

This is the one place where a turn is tried again. When an engine fails, hangs or returns something impossible, its
turns restart on another one, from the same token ids and seeds: deterministic engines return the same tokens. A failed
engine is *taken out* and probed from time to time, with the newest weights, until it is *back*.

Not here: assigning turns (scheduler.py), checking completions (turns.py), starting and closing engines (their creator
does that).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rocstar.errors import ConfigError, EngineUnavailable, Unavailable
from rocstar.protocols import Engine, RestartableEngine, SleepingEngine
from rocstar.rollout.scheduler import Ask, Scheduler
from rocstar.rollout.turns import FleetMember, FleetSession, FleetTurn, complaint
from rocstar.types import Completion, EngineLoad, Finish, Sampling, Weights, without_tokens

FAILURES = 3  # in a row, before an engine is taken out: one may be the request's fault, hardly three
TRIES = 10  # of one turn; so many failures are not chance: the turn itself must break engines
TICK_SECONDS = 1.0  # between two looks at the engines; much shorter than any patience, much longer than a look takes
LATE_SECONDS = 1.5  # since the last look: what happened before a time that is so long ago may not have been looked at
FIRST_PAUSE = 0.5  # seconds before the first probe of an engine that was taken out; doubles with each
LONGEST_PAUSE = 15.0
DOUBLINGS = 10
PROBE = Sampling(max_new_tokens=1)
PROBE_IDS = (0,)  # an id that every tokenizer has


Tell = Callable[..., None]
"""Records an event of a run, its name and details (`record.tracker.RunTracker.event`)."""


class Fleet:
    """Engine over named engines. `patience_seconds`: an engine that has turns and makes no progress for so long is
    taken out, and so is one that takes longer to load new weights; turns that no engine takes for so long end with
    EngineUnavailable. vocab_size: ids are below it; None if unknown.

    Patience is counted in looks, not by the clock: while a learner keeps the event loop busy there are no looks."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        scheduler: Scheduler,
        *,
        vocab_size: int | None = None,
        patience_seconds: float = 120.0,
        tell: Tell = lambda *_, **__: None,
    ) -> None:
        self._members = {
            name: FleetMember(name=name, engine=engine, version=engine.load().policy_version)
            for name, engine in engines.items()
        }
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._patience = patience_seconds
        self._tell = tell
        self._sessions: dict[str, FleetSession] = {}
        self._turns: dict[str, FleetTurn] = {}
        self._weights: Weights | None = None
        self._version = max((member.version for member in self._members.values()), default=0)
        self._idle_looks = self._lost = 0
        self._looked = 0.0
        self._assigning = False
        self._watching = False
        self._back = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._before = self.load()

    # -- the Engine protocol ------------------------------------------------------------------------------------------

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        """Raises EngineUnavailable when no engine could do it, ConfigError for an invalid request."""
        turn = self._turn(tuple(token_ids), sampling, request_id, session_id)
        self._turns[request_id] = turn
        turn.session.turns.append(turn)
        if turn.session.turns[0] is turn:
            self._ask(turn)
        if not self._watching:
            self._watching, self._looked = True, time.monotonic()
            self._start(self._watch())
        try:
            return await turn.answer
        except asyncio.CancelledError:
            self._end(turn)
            raise

    def load(self) -> EngineLoad:
        """Capacity and use are sums over the engines that are up; counters of work done are sums over all engines."""
        loads = [(member.up, member.engine.load()) for member in self._members.values()]
        up = [load for is_up, load in loads if is_up]
        running = sum(len(member.turns) for member in self._members.values())
        return EngineLoad(
            capacity_tokens=sum(load.capacity_tokens for load in up),
            used_tokens=sum(load.used_tokens for load in up),
            running=sum(load.running for load in up),
            waiting=sum(load.waiting for load in up) + len(self._turns) - running,
            policy_version=self._version,
            produced_tokens=sum(load.produced_tokens for _, load in loads),
            recomputed_tokens=sum(load.recomputed_tokens for _, load in loads),
            evictions=sum(load.evictions for _, load in loads),
            lost=self._lost,
            standing=self._standing(),
        )

    async def load_weights(self, weights: Weights) -> None:
        """Load the weights on all engines at once. An engine that fails is taken out and gets them before it is back.
        Raises EngineUnavailable when no engine has them within the patience."""
        self._weights, self._version = weights, weights.version
        self._awake.set()
        up = [member for member in self._members.values() if member.up]
        taken = await asyncio.gather(*(self._give(member, weights) for member in up or self._members.values()))
        if not any(taken):
            try:
                async with asyncio.timeout(self._patience):
                    await self._back.wait()
            except TimeoutError:
                error = f"no engine took weights {weights.version}: {self._reasons()}"
                raise EngineUnavailable(error) from None
        self._weights = replace(weights, tensors=None) if weights.folder else None

    @property
    def is_whole(self) -> bool:
        """Whether all engines are up."""
        return all(member.up for member in self._members.values())

    def keep(self, weights: Weights) -> None:
        """Set the newest weights, for engines that come back, without loading them now."""
        self._weights = weights

    async def sleep(self) -> None:
        """Leave the GPUs to learners until `load_weights`; turns wait for that. An engine that does not sleep is
        stopped and taken out; for one that is being restarted this waits."""
        self._awake.clear()
        await asyncio.gather(*(self._send_to_sleep(member) for member in self._members.values()))

    async def close_session(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        turns, session.turns = list(session.turns), deque()
        for turn in turns:
            self._settle(turn, without_tokens(Finish.ABORTED))
        self._scheduler.close(session_id, time.monotonic())
        for name in session.engines:
            self._start(_close_session(self._members[name].engine, session_id))
        self._assign_soon()

    # -- counts -------------------------------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, float]:
        """`engine/*` metrics: what happened since the last call."""
        now, counts = self.load(), self._counts
        before, self._before, self._counts = self._before, now, Counter()
        return {
            "engine/lost": float(now.lost - before.lost),
            "engine/back": float(counts["back"]),
            "engine/moved_turns": float(counts["moved"]),
            "engine/repeated_turns": float(counts["repeated"]),
            "engine/recomputed_tokens": float(now.recomputed_tokens - before.recomputed_tokens),
            "engine/evictions": float(now.evictions - before.evictions),
        }

    async def close(self) -> None:
        """End turns under way with EngineUnavailable. The engines are not closed."""
        self._end_all(EngineUnavailable("the fleet was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- turns --------------------------------------------------------------------------------------------------------

    def _turn(self, token_ids: tuple[int, ...], sampling: Sampling, request_id: str, session_id: str) -> FleetTurn:
        session = self._sessions.get(session_id)
        if session is None:
            session = FleetSession(group=f"{hash(token_ids):x}", prompt_tokens=len(token_ids))
            self._sessions[session_id] = session
        ask = Ask(
            request_id=request_id,
            session_id=session_id,
            group=session.group,
            prompt_tokens=session.prompt_tokens,
            tokens=len(token_ids),
            limit=sampling.max_new_tokens,
        )
        answer = asyncio.get_running_loop().create_future()
        return FleetTurn(ask=ask, token_ids=token_ids, sampling=sampling, session=session, answer=answer)

    def _ask(self, turn: FleetTurn) -> None:
        self._scheduler.ask(turn.ask, time.monotonic())
        self._assign_soon()

    def _assign_soon(self) -> None:
        """Assign once for everything that happens in one pass of the event loop."""
        if not self._assigning:
            self._assigning = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._assigning = False
        try:
            self._begin_assigned()
        except Exception as bug:  # nobody awaits this call, so whoever waits for a turn is told
            self._end_all(bug)

    def _end_all(self, error: BaseException) -> None:
        for turn in list(self._turns.values()):
            self._settle(turn, error)

    def _begin_assigned(self) -> None:
        loads = {name: member.engine.load() for name, member in self._members.items() if member.up}
        now = time.monotonic()
        for request_id, name in (self._scheduler.assign(loads, now) if loads else {}).items():
            turn = self._turns.get(request_id)
            if turn is None or turn.member is not None:  # it ended before it began
                self._scheduler.answered(request_id, 0, now)
                self._assign_soon()
            else:
                self._begin(turn, self._members[name])

    def _begin(self, turn: FleetTurn, member: FleetMember) -> None:
        turn.tries += 1
        turn.member = member
        if not member.turns:  # earlier work is not progress on this turn
            member.seen, member.looks = member.progress(), 0
        member.turns.add(turn)
        turn.session.engines.add(member.name)
        if turn.previous is not None:
            moved = turn.previous != member.name
            self._counts["moved" if moved else "repeated"] += 1
        turn.task = self._start(self._run(turn, member, member.version))

    async def _run(self, turn: FleetTurn, member: FleetMember, version: int) -> None:
        """One try of a turn on an engine whose weights were of `version` when it began."""
        found: Completion | Exception
        try:
            found = await member.engine.generate(
                turn.token_ids, turn.sampling, request_id=turn.request_id, session_id=turn.ask.session_id
            )
        except Exception as error:
            found = error
        if turn.task is not asyncio.current_task():
            return  # the turn was taken from this engine, which answered anyway
        if isinstance(found, Completion):
            self._judge(turn, member, found, (version, self._version))
        elif isinstance(found, EngineUnavailable):
            self._fail(turn, member, str(found))
        else:  # an invalid request, or a bug: the caller must get the exception
            self._settle(turn, found)

    def _judge(self, turn: FleetTurn, member: FleetMember, completion: Completion, versions: tuple[int, int]) -> None:
        wrong = complaint(completion, turn.sampling, vocab_size=self._vocab_size, versions=versions)
        if wrong:
            self._take_out(member, f"it returned {wrong}")
        elif completion.finish is Finish.ABORTED:
            self._fail(turn, member, "it aborted a turn that was not aborted here")
        else:
            member.failures = 0
            member.answered += 1
            self._settle(turn, completion)

    def _fail(self, turn: FleetTurn, member: FleetMember, reason: str) -> None:
        """Handle the failure of an engine to do a turn."""
        member.failures += 1
        if member.failures >= FAILURES:
            self._take_out(member, reason)
            return
        self._scheduler.answered(turn.ask.request_id, 0, time.monotonic())
        if self._repeatable(turn, reason):
            self._ask(turn)

    def _repeatable(self, turn: FleetTurn, reason: str) -> bool:
        """Take a turn from its engine; False when that was its last try."""
        assert turn.member is not None
        turn.member.turns.discard(turn)
        turn.previous, turn.member, turn.task = turn.member.name, None, None
        if turn.tries >= TRIES:
            self._settle(turn, EngineUnavailable(f"{TRIES} tries failed; the last on {turn.previous}: {reason}"))
        return not turn.answer.done()

    def _settle(self, turn: FleetTurn, result: Completion | BaseException) -> None:
        self._end(turn, len(result.token_ids) if isinstance(result, Completion) else 0)
        if turn.answer.done():
            return
        if isinstance(result, Completion):
            turn.answer.set_result(result)
        else:
            turn.answer.set_exception(result)

    def _end(self, turn: FleetTurn, tokens: int = 0) -> None:
        """Forget a turn, whatever its state, and submit the next turn of its session."""
        self._turns.pop(turn.ask.request_id, None)
        if turn.member is not None:
            turn.member.turns.discard(turn)
            self._scheduler.answered(turn.ask.request_id, tokens, time.monotonic())
            _stop(turn)
            turn.member = turn.task = None
        if turn in turn.session.turns:
            was_first = turn.session.turns[0] is turn
            turn.session.turns.remove(turn)
            if was_first and turn.session.turns:
                self._ask(turn.session.turns[0])
        self._assign_soon()

    # -- health -------------------------------------------------------------------------------------------------------

    def _take_out(self, member: FleetMember, reason: str) -> None:
        if not member.up:
            return
        member.up, member.reason, member.failures, member.looks = False, reason, 0, 0
        member.lost_at, member.tries = time.monotonic(), 0
        self._back.clear()
        turns = list(member.turns)
        self._lost += 1
        self._tell("engine_lost", engine=member.name, reason=reason, turns=len(turns))
        self._scheduler.lose(member.name, time.monotonic())
        for turn in turns:
            _stop(turn)
            self._repeatable(turn, reason)
        self._start(self._revive(member))
        self._assign_soon()

    async def _revive(self, member: FleetMember) -> None:
        """Produces an engine that is up again; waits between probes; ends when one succeeds."""
        while not member.up:
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** min(member.probes, DOUBLINGS), LONGEST_PAUSE))
            await self._awake.wait()
            member.probes += 1
            member.tries += 1
            if member.up:  # loading new weights has shown that it is healthy
                return
            try:
                async with member.starting:
                    if not self._awake.is_set():
                        continue
                    await self._probe(member)
            except (Unavailable, ConfigError) as error:
                member.reason = str(error)
                self._tell("engine_still_out", engine=member.name, reason=member.reason, tries=member.tries)
            else:
                self._bring_back(member)

    async def _probe(self, member: FleetMember) -> None:
        """Restart the engine if it can be restarted, load the newest weights, and sample a token with them. Raises
        EngineUnavailable."""
        engine, version = member.engine, None
        if isinstance(engine, RestartableEngine):
            await engine.restart(lambda: self._weights)
        while version != self._version:  # new weights may come at any time, which is not the engine's failure
            version = await self._bring_up_to_date(engine)
            name = f"probe/{member.name}/{time.monotonic_ns()}"
            completion = await self._within(
                engine.generate(PROBE_IDS, PROBE, request_id=name, session_id=name), "did not answer a probe"
            )
            await engine.close_session(name)
            wrong = complaint(completion, PROBE, vocab_size=self._vocab_size, versions=(version, self._version))
            if wrong:
                raise EngineUnavailable(f"it answered a probe with {wrong}")

    async def _bring_up_to_date(self, engine: Engine) -> int:
        """Load the newest weights on an engine unless it has them; returns their version. Raises EngineUnavailable."""
        while (version := engine.load().policy_version) != self._version:
            if self._weights is None:
                raise EngineUnavailable(f"it has weights {version} of {self._version}")
            await self._load(engine, self._weights)
        return version

    def _bring_back(self, member: FleetMember) -> None:
        if member.up:
            return
        member.up, member.reason, member.version, self._idle_looks = True, "", self._version, 0
        self._counts["back"] += 1
        seconds = round(time.monotonic() - member.lost_at, 3)
        self._tell("engine_back", engine=member.name, seconds=seconds, **whereabouts(member.engine))
        self._back.set()
        self._assign_soon()

    async def _give(self, member: FleetMember, weights: Weights) -> bool:
        """Whether the engine has the weights now; it is taken out otherwise."""
        try:
            await self._load(member.engine, weights)
        except EngineUnavailable as error:
            self._take_out(member, str(error))
            return False
        member.probes, member.version = 0, weights.version
        self._bring_back(member)
        return True

    async def _load(self, engine: Engine, weights: Weights) -> None:
        """Raises EngineUnavailable unless the engine reports their version."""
        await self._within(engine.load_weights(weights), "took no weights")
        if (found := engine.load().policy_version) != weights.version:
            raise EngineUnavailable(f"it reports weights {found} after it was given {weights.version}")

    async def _send_to_sleep(self, member: FleetMember) -> None:
        async with member.starting:
            try:
                if isinstance(member.engine, SleepingEngine):
                    await self._within(member.engine.sleep(), "did not sleep")
            except EngineUnavailable as error:
                self._take_out(member, str(error))

    async def _within(self, work: Coroutine[Any, Any, Any], failing: str) -> Any:
        """Await work within the patience. Raises EngineUnavailable."""
        try:
            async with asyncio.timeout(self._patience):
                return await work
        except TimeoutError:
            raise EngineUnavailable(f"it {failing} for {self._patience:g} s") from None

    async def _watch(self) -> None:
        """Consumes the engines' loads while turns are under way; takes out what shows no progress; ends with the last
        turn."""
        try:
            while self._turns:
                await asyncio.sleep(TICK_SECONDS)
                await self._awake.wait()
                self._looked = time.monotonic()
                for member in [member for member in self._members.values() if member.up]:
                    progress, before = member.progress(), member.seen
                    member.seen = progress
                    member.looks = member.looks + 1 if member.turns and progress == before else 0
                    if member.looks * TICK_SECONDS >= self._patience:
                        turns = f"{len(member.turns)} turns to do"
                        self._take_out(member, f"no progress for {self._patience:g} s with {turns}")
                self._look_at_waiting()
                self._assign_soon()
        finally:
            self._watching = False

    def _standing(self) -> frozenset[str]:
        is_late = time.monotonic() - self._looked > LATE_SECONDS
        at_work = {member for member in self._members.values() if member.up and member.turns}
        standing = {member for member in at_work if is_late or member.progress() == member.seen}
        if not standing:
            return frozenset()  # the usual case, kept cheap: every request of an agent reads the load
        return frozenset(
            request_id
            for request_id, turn in self._turns.items()
            if (turn.member in standing if turn.member else standing == at_work)
        )

    def _look_at_waiting(self) -> None:
        """End all turns, with the reasons, when no engine has taken any for too long. A scheduler may reserve room on
        an engine for a trajectory whose tool runs, so that time does not count as an outage."""
        up = [member for member in self._members.values() if member.up]
        at_tools = any(not session.turns for session in self._sessions.values())
        idle = not any(member.turns for member in up) and not (up and at_tools)
        self._idle_looks = self._idle_looks + 1 if idle else 0
        if self._idle_looks * TICK_SECONDS >= self._patience:
            error = f"no engine took any of {len(self._turns)} turns for {self._patience:g} s: {self._reasons()}"
            self._end_all(EngineUnavailable(error))

    def _reasons(self) -> str:
        reasons = (f"{member.name}: {member.reason or 'is up'}" for member in self._members.values())
        return "; ".join(reasons)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()):
            self._end_all(bug)


def whereabouts(engine: Engine) -> dict[str, str | int]:
    """Nothing for an engine inside this process."""
    return engine.whereabouts() if isinstance(engine, RestartableEngine) else {}


def _stop(turn: FleetTurn) -> None:
    """Cancel the turn's task, unless this is called from it."""
    if turn.task is not None and turn.task is not asyncio.current_task():
        turn.task.cancel()


async def _close_session(engine: Engine, session_id: str) -> None:
    with suppress(Unavailable):
        await engine.close_session(session_id)
