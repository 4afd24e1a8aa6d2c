"""Several engines as one: turns survive engines that fail, hang, lie or die, and outages are told in words."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.protocols import Engine, NewestWeights
from rocstar.rollout import fleet as module
from rocstar.rollout.fleet import Fleet
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.rollout.scheduler import Ask
from rocstar.types import Completion, Finish, Sampling, VersionSpan, Weights
from tests.engines.plain import IDS, PROMPT, PlainEngine, ask, written

PATIENCE = 0.2  # seconds: twenty looks


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet looks often, and probes at once."""
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0001)


class Faulty(PlainEngine):
    """Does to each request what `fault` says, for as long as it says something; `dead` refuses everything."""

    def __init__(self, fault: Callable[[str], str | None] = lambda request_id: None, **named: Any) -> None:
        super().__init__(**named)
        self.fault = fault
        self.dead = False

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        self._refuse()
        what = self.fault(request_id)
        if what == "raise":
            raise EngineUnavailable("the card is on fire")
        if what == "hang":
            await asyncio.Event().wait()
        if what == "config":
            raise ConfigError("a request must allow at least one new token")
        made = await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        self._refuse()
        return BENT[what](made, sampling) if what else made

    async def load_weights(self, weights: Weights) -> None:
        self._refuse()
        await super().load_weights(weights)

    def whereabouts(self) -> dict[str, str | int]:
        return {}

    def _refuse(self) -> None:
        if self.dead:
            raise EngineUnavailable("the process ended with SIGKILL")


def bent(**changes: Any) -> Callable[[Completion, Sampling], Completion]:
    return lambda made, sampling: replace(made, **changes)


def with_logprob(value: float) -> Callable[[Completion, Sampling], Completion]:
    return lambda made, sampling: replace(made, logprobs=(value, *made.logprobs[1:]))


BENT: dict[str, Callable[[Completion, Sampling], Completion]] = {
    "nan": with_logprob(math.nan),
    "minus infinity": with_logprob(-math.inf),
    "positive": with_logprob(0.5),
    "one logprob too few": lambda made, sampling: replace(made, logprobs=made.logprobs[1:]),
    "id too large": lambda made, sampling: replace(made, token_ids=(IDS, *made.token_ids[1:])),
    "negative id": lambda made, sampling: replace(made, token_ids=(-1, *made.token_ids[1:])),
    "too long": lambda made, sampling: replace(
        made, token_ids=(1,) * (sampling.max_new_tokens + 1), logprobs=(-1.0,) * (sampling.max_new_tokens + 1)
    ),
    "older version": bent(version_spans=(VersionSpan(6, 5),)),
    "newer version": bent(version_spans=(VersionSpan(8, 5),)),
    "versions in no order": bent(version_spans=(VersionSpan(7, 3), VersionSpan(6, 2))),
    "no version": bent(version_spans=()),
    "too many versions": bent(version_spans=(VersionSpan(7, 6),)),
    "stop without a stop token": bent(finish=Finish.STOP),
    "aborted": bent(finish=Finish.ABORTED),
}


class Told(list[tuple[str, dict[str, Any]]]):
    """Events of a fleet."""

    def __call__(self, event: str, **details: Any) -> None:
        self.append((event, details))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [details for name, details in self if name == event]


@asynccontextmanager
async def opened(told: Told | None = None, patience: float = PATIENCE, **engines: Engine) -> AsyncIterator[Fleet]:
    made = Fleet(
        engines, KvScheduler(), vocab_size=IDS, patience_seconds=patience, tell=Told() if told is None else told
    )
    try:
        yield made
    finally:
        await made.close()


async def trajectory(engine: Engine, number: int, turns: int = 3) -> tuple[int, ...]:
    """What a session of several turns comes to."""
    ids = (number, *PROMPT)
    for turn in range(turns):
        completion = await ask(engine, f"s{number}", turn, ids)
        ids = (*ids, *completion.token_ids, 7)
    await engine.close_session(f"s{number}")
    return ids


def expected(number: int, turns: int = 3) -> tuple[int, ...]:
    ids: tuple[int, ...] = (number, *PROMPT)
    for turn in range(turns):
        ids = (*ids, *written(ids, Sampling(max_new_tokens=5, seed=turn)), 7)
    return ids


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nobody tells when an engine is back
        await asyncio.sleep(0)


async def test_turns_are_shared_among_the_engines_and_sessions_stay_where_they_are() -> None:
    a, b = PlainEngine(), PlainEngine()
    async with opened(a=a, b=b) as fleet:
        assert await asyncio.gather(*(trajectory(fleet, n) for n in range(8))) == [expected(n) for n in range(8)]
        await until(lambda: not a.sessions and not b.sessions)
    assert len(a.seen) == len(b.seen) == 12
    assert not {name.split("/")[0] for name in a.seen} & {name.split("/")[0] for name in b.seen}


async def test_an_engine_that_fails_again_and_again_is_taken_out_and_its_turns_are_done_elsewhere() -> None:
    told, broken = Told(), [True]
    a = Faulty(lambda request_id: "raise" if broken[0] and not request_id.startswith("probe") else None)
    async with opened(told, a=a, b=PlainEngine()) as fleet:
        found = await asyncio.gather(*(trajectory(fleet, n) for n in range(8)))
        assert found == [expected(n) for n in range(8)]
        assert told.of("engine_lost")[0] == {"engine": "a", "reason": "the card is on fire", "turns": 2}
        counts = fleet.take_counts()
        assert counts["engine/lost"] >= 1 and counts["engine/moved_turns"] >= 1
        broken[0] = False
        await until(lambda: fleet.load().capacity_tokens == 2 * a.capacity)
        assert len(told.of("engine_back")) == len(told.of("engine_lost"))
        assert fleet.take_counts()["engine/moved_turns"] == 0


async def test_failures_that_are_not_in_a_row_cost_no_engine() -> None:
    """Each turn fails once."""
    told = Told()
    async with opened(told, a=Faulty(lambda request_id: None if "try" in request_id else "raise")) as fleet:
        assert await trajectory(fleet, 1, turns=4) == expected(1, turns=4)
        assert fleet.take_counts()["engine/repeated_turns"] == 4
    assert not told.of("engine_lost")


@pytest.mark.parametrize("what", [name for name in BENT if name != "aborted"])
async def test_what_no_engine_can_have_sampled_is_never_passed_on(what: str) -> None:
    told, told_once = Told(), set[str]()

    def fault(request_id: str) -> str | None:
        if request_id.startswith("probe") or told_once:
            return None
        told_once.add(request_id)
        return what

    a, b = Faulty(fault, version=6), PlainEngine(version=6)
    async with opened(told, a=a, b=b) as fleet:
        await fleet.load_weights(Weights(version=7, folder="w"))
        assert await asyncio.gather(*(trajectory(fleet, n) for n in range(4))) == [expected(n) for n in range(4)]
    (lost,) = told.of("engine_lost")
    assert lost["engine"] == "a" and lost["reason"].startswith("it returned ")


async def test_a_turn_that_an_engine_ends_of_itself_is_asked_again() -> None:
    once = ["aborted"]
    a = Faulty(lambda request_id: once.pop() if once else None)
    async with opened(a=a) as fleet:
        assert (await ask(fleet)).finish is Finish.LENGTH
    assert list(a.seen) == ["s/0", "s/0/try2"], "the end of one try is not taken for another's"


@pytest.mark.parametrize("lost", [None, "s0/0"])
async def test_an_engine_that_shows_no_progress_or_lost_one_request_is_taken_out(lost: str | None) -> None:
    """lost: the one that never ends; None: none does."""
    told, stuck = Told(), [True]
    a = Faulty(lambda request_id: "hang" if stuck[0] and lost in (None, request_id) else None)
    async with opened(told, a=a, b=PlainEngine()) as fleet:
        assert await asyncio.gather(*(trajectory(fleet, n) for n in range(4))) == [expected(n) for n in range(4)]
        (found,) = told.of("engine_lost")
        assert found["reason"] == f"no progress for 0.2 s with {2 if lost is None else 1} turns to do"
        stuck[0] = False
        await until(lambda: bool(told.of("engine_back")))


async def test_a_load_names_the_requests_whose_engine_stands_still() -> None:
    """Of those that wait for an engine, all where none that has work goes on."""
    a, b = Faulty(lambda request_id: "hang", capacity=20), PlainEngine(pause=0.001, capacity=20)
    async with opened(patience=60, a=a, b=b) as fleet:
        turns = [asyncio.ensure_future(ask(fleet, f"s{number}", tokens=500)) for number in range(2)]
        await until(lambda: len(fleet.load().standing) == 1)
        still = fleet.load().standing
        assert not still.intersection(b.seen)
        turns.append(asyncio.ensure_future(ask(fleet, "s2", tokens=500)))
        await until(lambda: fleet.load().waiting > 0)
        await until(lambda: fleet.load().standing == still)
        b.awake.clear()  # it stands still, too
        await until(lambda: fleet.load().standing == {"s0/0", "s1/0", "s2/0"})
        for turn in turns:
            turn.cancel()


async def test_a_slow_engine_is_not_taken_for_one_that_hangs() -> None:
    told = Told()
    async with opened(told, a=PlainEngine(pause=0.05)) as fleet:
        assert len((await ask(fleet, tokens=12)).token_ids) == 12  # three times the patience
    assert not told


async def test_a_turn_that_breaks_every_engine_is_given_up_in_words() -> None:
    def fault(request_id: str) -> str | None:
        return "raise" if request_id.startswith("poison") else None

    a, b = Faulty(fault), Faulty(fault)
    async with opened(a=a, b=b) as fleet:
        others = [asyncio.create_task(trajectory(fleet, n)) for n in range(4)]
        with pytest.raises(EngineUnavailable, match=r"10 tries failed; the last on .: the card is on fire"):
            await ask(fleet, "poison")
        assert await asyncio.gather(*others) == [expected(n) for n in range(4)]
    assert sum(name.startswith("poison") for name in (*a.seen, *b.seen)) == 0


async def test_a_request_that_makes_no_sense_is_told_to_whoever_asked_and_costs_no_engine() -> None:
    told = Told()
    async with opened(told, a=Faulty(lambda request_id: "config")) as fleet:
        with pytest.raises(ConfigError, match="at least one"):
            await ask(fleet)
    assert not told


@pytest.mark.parametrize("place", ["assign", "watch"])
async def test_a_bug_of_the_fleets_own_work_is_told_to_whoever_waits(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """They waited for ever, beside a traceback."""

    def breaks(*given: Any) -> None:
        raise ZeroDivisionError(place)

    broken = {"assign": (KvScheduler, "assign"), "watch": (Fleet, "_look_at_waiting")}
    monkeypatch.setattr(*broken[place], breaks)
    async with opened(a=Faulty(lambda request_id: "hang")) as fleet:
        with pytest.raises(ZeroDivisionError, match=place):
            await ask(fleet)


async def test_without_any_engine_turns_end_in_words_and_go_on_when_one_is_back() -> None:
    a, b = Faulty(), Faulty()
    a.dead = b.dead = True
    async with opened(a=a, b=b) as fleet:
        found = await asyncio.gather(*(ask(fleet, f"s{n}") for n in range(3)), return_exceptions=True)
        sentence = "no engine took any of 3 turns for 0.2 s: a: the process ended with SIGKILL; b: the process ended"
        assert [str(error)[: len(sentence)] for error in found] == [sentence] * 3
        assert all(isinstance(error, EngineUnavailable) for error in found)
        b.dead = False
        await until(lambda: fleet.load().capacity_tokens > 0)
        assert len((await ask(fleet, "later")).token_ids) == 5


class Stubborn(KvScheduler):
    """Gives no engine to the sessions that it does not like."""

    def ask(self, ask: Ask, now: float) -> None:
        if ask.session_id != "never":
            super().ask(ask, now)


async def test_a_turn_that_gets_no_engine_waits_for_tools_of_others_and_not_for_ever() -> None:
    fleet = Fleet({"a": PlainEngine()}, Stubborn(), patience_seconds=PATIENCE)
    await ask(fleet, "at its tool")
    waiting = asyncio.create_task(ask(fleet, "never"))
    await asyncio.sleep(2 * PATIENCE)
    assert not waiting.done()
    await fleet.close_session("at its tool")
    with pytest.raises(EngineUnavailable, match=r"no engine took any of 1 turns for 0.2 s: a: is up"):
        await waiting
    await fleet.close()


async def test_an_engine_that_dies_over_new_weights_is_taken_out_and_has_them_when_it_is_back() -> None:
    """As they are kept: where they were sent, others lie in a folder for whoever was lost."""
    told, a, b = Told(), Faulty(), PlainEngine()
    a.dead = True
    async with opened(told, a=a, b=b) as fleet:
        assert fleet.is_whole
        await fleet.load_weights(Weights(version=3, folder="sent"))
        assert not fleet.is_whole and fleet.load().capacity_tokens == a.capacity
        fleet.keep(Weights(version=3, folder="written"))
        a.dead = False
        await until(lambda: bool(told.of("engine_back")))
        assert fleet.is_whole and a.version == 3 and (a.folder, b.folder) == ("written", "sent")
        found = await asyncio.gather(*(trajectory(fleet, n) for n in range(4)))
        assert found == [expected(n) for n in range(4)] and len(a.seen) > 1


async def test_while_learners_have_the_gpus_nothing_is_written_or_begun() -> None:
    """An engine that does not sleep is taken out, and begun anew when it is the engines' turn again."""

    class Restless(Faulty):
        begun: ClassVar[list[str]] = []
        restarting = asyncio.Event()

        async def sleep(self) -> None:
            if self.dead:
                raise EngineUnavailable("vLLM answered /sleep with 500")
            self.begun.append("asleep")

        async def restart(self, newest: NewestWeights | None) -> None:
            self.begun.append("restarting")
            await self.restarting.wait()
            self.begun.append("restarted")
            self.dead = False

    told, a, b = Told(), Restless(), PlainEngine()
    a.dead = True
    async with opened(told, patience=60, a=a, b=b) as fleet:
        await fleet.sleep()
        (lost,) = told.of("engine_lost")
        assert lost["reason"] == "vLLM answered /sleep with 500"
        turn = asyncio.create_task(ask(fleet))
        await asyncio.sleep(0.05)
        assert not turn.done() and not a.begun and not told.of("engine_still_out")
        await fleet.load_weights(Weights(version=3, folder="w"))
        assert (await turn).version_spans == ((3, 5),)
        await until(lambda: a.begun == ["restarting"])
        asleep = asyncio.create_task(fleet.sleep())
        await until(lambda: not b.awake.is_set())
        await asyncio.sleep(0.01)
        assert not asleep.done(), "an engine that is being begun takes memory"
        a.restarting.set()
        await asleep
        assert a.begun == ["restarting", "restarted", "asleep"] and told.of("engine_back")


async def test_why_an_engine_does_not_come_back_is_told_at_each_try() -> None:
    class Slow(Faulty):
        """Needs three tries to be begun anew."""

        begun = 0

        async def restart(self, newest: NewestWeights | None) -> None:
            self.begun += 1
            if self.begun < 3:
                raise EngineUnavailable(f"start {self.begun} failed")
            self.dead = False
            weights = newest() if newest else None
            assert weights is not None
            await self.load_weights(weights)

        def whereabouts(self) -> dict[str, str | int]:
            return {"pid": 10 + self.begun}

    told, a = Told(), Slow()
    a.dead = True
    async with opened(told, a=a, b=PlainEngine()) as fleet:
        await fleet.load_weights(Weights(version=3, folder="w"))
        await until(lambda: bool(told.of("engine_back")))
    assert told.of("engine_still_out") == [
        {"engine": "a", "reason": f"start {tries} failed", "tries": tries} for tries in (1, 2)
    ]
    (back,) = told.of("engine_back")
    assert back["seconds"] >= 0 and (back["engine"], back["pid"]) == ("a", 13) and a.version == 3


async def test_weights_that_come_while_an_engine_is_tried_cost_it_no_second_start() -> None:
    class Overtaken(Faulty):
        """Newer weights go to the others while it answers its first probe."""

        begun = 0

        async def restart(self, newest: NewestWeights | None) -> None:
            self.begun += 1
            self.dead = False

        async def generate(self, *given: Any, **named: Any) -> Completion:
            made = await super().generate(*given, **named)
            if len(self.seen) == 1:
                await fleet.load_weights(Weights(version=4, folder="w"))
            return made

    told, a = Told(), Overtaken()
    a.dead = True
    async with opened(told, a=a, b=PlainEngine()) as fleet:
        await fleet.load_weights(Weights(version=3, folder="w"))
        await until(lambda: bool(told.of("engine_back")))
        assert not told.of("engine_still_out")
    assert (a.begun, a.version) == (1, 4)


class Deaf(PlainEngine):
    async def load_weights(self, weights: Weights) -> None:
        """Nothing."""


class Stuck(PlainEngine):
    async def load_weights(self, weights: Weights) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("engine", "reason"),
    [(Deaf, "it reports weights 0 after it was given 3"), (Stuck, "it took no weights for 0.2 s")],
)
async def test_an_engine_that_keeps_its_old_weights_or_hangs_over_new_ones_is_taken_out(
    engine: type[PlainEngine], reason: str
) -> None:
    told = Told()
    async with opened(told, a=engine(), b=PlainEngine()) as fleet:
        await fleet.load_weights(Weights(version=3, folder="w"))
    assert told.of("engine_lost")[0]["reason"] == reason


async def test_new_weights_that_no_engine_takes_are_an_outage_unless_one_comes_back() -> None:
    a = Faulty()
    a.dead = True
    async with opened(a=a) as fleet:
        with pytest.raises(EngineUnavailable, match="no engine took weights 3: a: the process ended with SIGKILL"):
            await fleet.load_weights(Weights(version=3, folder="w"))
        asyncio.get_running_loop().call_later(PATIENCE / 4, setattr, a, "dead", False)
        await fleet.load_weights(Weights(version=4, folder="w"))
        assert a.version == fleet.load().policy_version == 4


async def test_weights_in_memory_are_not_read_after_the_call() -> None:
    """The learner changes them in place; an engine that missed them waits for the next."""
    a, given = Faulty(), Weights(version=3, tensors={"w": object()})
    a.dead = True
    async with opened(a=a, b=PlainEngine()) as fleet:
        await fleet.load_weights(given)
        a.dead = False
        for _ in range(100):
            await asyncio.sleep(0)
        assert a.version == 0 and fleet.load().capacity_tokens == a.capacity


async def test_two_turns_of_a_session_are_done_one_after_the_other() -> None:
    a = PlainEngine(pause=0.001)
    async with opened(a=a) as fleet:
        both = [asyncio.create_task(ask(fleet, turn=turn)) for turn in range(2)]
        await until(lambda: bool(a.running))
        assert list(a.running) == ["s/0"]
        assert [len((await turn).token_ids) for turn in both] == [5, 5]


async def test_a_turn_whose_session_was_closed_is_not_begun_again_when_its_engine_dies() -> None:
    a = Faulty(lambda request_id: "hang")
    async with opened(a=a, b=PlainEngine()) as fleet:
        turn = asyncio.create_task(ask(fleet))
        await asyncio.sleep(0.01)
        await fleet.close_session("s")
        assert (await turn).finish is Finish.ABORTED


async def test_closing_the_fleet_answers_who_waits() -> None:
    async with opened(a=PlainEngine(pause=0.01)) as fleet:
        turn = asyncio.create_task(ask(fleet, tokens=1000))
        await until(lambda: fleet.load().running == 1)
    with pytest.raises(EngineUnavailable, match="closed"):
        await turn


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_dies_whenever_every_trajectory_comes_to_the_same(seed: int) -> None:
    asyncio.run(_with_deaths(random.Random(seed)))


async def _with_deaths(draw: random.Random) -> None:
    """Three engines, of which one at a time dies, comes back, raises or lies, at random moments."""
    names, told = "abc", Told()
    engines = {name: Faulty() for name in names}

    async def trouble() -> None:
        while True:
            engine = engines[draw.choice(names)]
            engine.fault = lambda request_id: draw.choice([None, None, None, "raise", "nan", "aborted"])
            engine.dead = draw.random() < 0.5
            for _ in range(draw.randrange(30)):
                await asyncio.sleep(0)
            engine.dead, engine.fault = False, lambda request_id: None

    async with opened(told, patience=30.0, **engines) as fleet:
        troubling = asyncio.create_task(trouble())
        count, turns = draw.randrange(1, 12), draw.randrange(1, 4)
        found = await asyncio.gather(*(trajectory(fleet, n, turns) for n in range(count)), return_exceptions=True)
        troubling.cancel()
        for number, one in enumerate(found):
            # Where ten engines die under one turn it is given up, and says so.
            assert one == expected(number, turns) or str(one).startswith("10 tries failed"), one
        assert fleet.load().running == 0 and fleet.load().waiting == 0
