"""The watch: what counts as a move, what a report says, that a stall is told whatever hangs, and that a slow step is
not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rocstar.config.sections import RunSection
from rocstar.errors import RunHalted, VerifierUnavailable
from rocstar.rollout.collect import Roller
from rocstar.sandbox.client import dispatch
from rocstar.sandbox.daemon import worker
from rocstar.support.watch import LIMITS, RUN, Stall, Watch, Watching, all_stacks
from rocstar.types import EngineLoad, Group, Outcome, Problem, Trajectory, Verdict
from tests.faulty import Fault, FaultKind, FaultyEngine
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, Waiting, conversation, program, roller
from tests.scripted import Clock, ScriptedEngine, ScriptedVerifier

RUN_CODE = program("print(2+3)")
SOON = RunSection(stall_seconds=0.2, stall_learning_seconds=60.0, stall_policy="warn")
HALT = SOON.model_copy(update={"stall_policy": "halt"})
LOAD = EngineLoad(capacity_tokens=100, used_tokens=40, running=0, waiting=2, produced_tokens=7)


@dataclass
class Told:
    """Who is told of stalls."""

    stalls: list[Stall] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    heard: threading.Event = field(default_factory=threading.Event)

    def __call__(self, stall: Stall, stacks: str) -> None:
        self.stalls.append(stall)
        self.stacks.append(stacks)
        self.heard.set()

    async def of_one(self) -> Stall:
        while not self.stalls:  # noqa: ASYNC110 - the thread that tells knows no event of this loop
            await asyncio.sleep(0.01)
        return self.stalls[0]


# -- what counts as a move -------------------------------------------------------------------------------------------


def test_stillness_grows_until_somebody_notes_something() -> None:
    watch = Watch()
    watch.note("a", "an engine")
    assert [watch.look(1.0) for _ in range(3)] == [0.0, 1.0, 2.0]
    watch.note("a", "a tool")
    assert [watch.look(1.0) for _ in range(2)] == [0.0, 1.0]


@pytest.mark.parametrize("moved", ["produced_tokens", "recomputed_tokens", "policy_version"])
def test_an_engine_that_does_something_moves(moved: str) -> None:
    watch, loads = Watch(), iter([LOAD, LOAD, replace(LOAD, **{moved: 8}), replace(LOAD, **{moved: 8})])  # type: ignore[arg-type]
    watch.load = lambda: next(loads)
    assert [watch.look(1.0) for _ in range(4)] == [0.0, 1.0, 0.0, 1.0]


def test_an_engine_that_only_queues_or_cannot_say_does_not_move() -> None:
    watch, loads = Watch(), iter([LOAD, replace(LOAD, waiting=9, used_tokens=41)])
    watch.load = lambda: next(loads)  # and then raises StopIteration
    assert [watch.look(1.0) for _ in range(4)] == [0.0, 1.0, 0.0, 1.0]


def test_a_long_learning_step_has_its_own_patience() -> None:
    watch, run = Watch(), RunSection(stall_seconds=300, stall_learning_seconds=3600, stall_policy="warn")
    watch.note(RUN, "learning")
    assert watch.patience(run) == 3600
    watch.note("a", "an engine")
    assert watch.patience(run) == 300
    watch.note("a", None)
    assert watch.patience(run) == 3600


def test_the_report_says_who_waits_for_what_since_when() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.note(RUN, "rollout")
    for n in range(5):
        clock.now = float(n)
        watch.note(f"p/{n}", "an engine")
    watch.note("q/0", "a tool")
    watch.note("q/1", "a tool")
    watch.note("q/1", None)
    clock.now, watch.load = 100.0, lambda: LOAD
    watch.look(1.0)
    watch.look(90.0)
    assert watch.stall().counts == {"an engine": 5, "a tool": 1}
    assert watch.stall().report().splitlines() == [
        "nothing has moved for 90 s in rollout: 5 wait for an engine, 1 wait for a tool",
        "  5 wait for an engine, the longest for 100 s: p/0, p/1, p/2 and 2 more",
        "  1 wait for a tool, the longest for 96 s: q/0",
        "  engine: 0 requests decode and 2 wait, 40 of 100 tokens of cache in use, 7 tokens written, policy version 0",
    ]


def test_what_a_run_does_is_told_with_what_its_attempts_wait_for() -> None:
    clock = Clock()
    watch = Watch(clock)
    assert watch.doing() == ""
    watch.note(RUN, "rollout")
    for who, what in (("p/0", "an engine"), ("p/1", "an engine"), ("p/2", "a tool")):
        watch.note(who, what)
    clock.now = 12.0
    assert watch.doing() == "rollout for 12 s: 2 wait for an engine, 1 waits for a tool"


# -- real rollouts ---------------------------------------------------------------------------------------------------


class Hangs(ScriptedVerifier):
    """A verifier that never answers."""

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        await asyncio.Event().wait()
        return []


def watched(watch: Watch, faults: Sequence[Fault] = (), **more: Any) -> Roller:
    engine = FaultyEngine(ScriptedEngine(CODEC, [RUN_CODE, ANSWER]), faults)
    watch.load = engine.load
    return roller(engine, note=watch.note, **more)


async def rolled(made: Roller, attempts: int = 4) -> list[Group]:
    return await made.roll([PROBLEM], attempts=attempts, seed=1)


@pytest.mark.parametrize(
    ("faults", "more", "counts", "place"),
    [
        ([Fault(kind=FaultKind.LOST, first=5)], {}, {"an engine": 1}, "FaultyEngine.generate"),
        ([], {"verifier": Hangs(lambda problem, trajectory: Verdict.RIGHT)}, {"the verifier": 1}, "Hangs.verify_all"),
    ],
)
async def test_a_request_that_the_engine_lost_and_a_verifier_that_hangs_are_told_and_their_neighbours_are_not(
    faults: list[Fault], more: dict[str, Any], counts: dict[str, int], place: str
) -> None:
    watch, told = Watch(), Told()
    made = watched(watch, faults, **more)
    with Watching(watch, SOON, told):
        rollout = asyncio.create_task(rolled(made))
        stall = await told.of_one()
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)
    assert stall.counts == counts and place in told.stacks[0]
    assert not watch.stall().waiting


async def test_a_blocked_event_loop_is_told_with_the_place_that_blocks_it() -> None:
    watch, told = Watch(), Told()

    def block_the_loop() -> None:
        assert told.heard.wait(60)

    with Watching(watch, SOON, told):
        watch.note("a", "the verifier")
        block_the_loop()
    assert told.stalls[0].counts == {"the verifier": 1}
    assert "block_the_loop" in told.stacks[0]


async def test_a_stall_that_lasts_is_told_again_ever_more_rarely() -> None:
    watch, told = Watch(), Told()
    with Watching(watch, SOON, told):
        watch.note("a", "an engine")
        while len(told.stalls) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    waited = [stall.seconds for stall in told.stalls[:3]]
    assert waited[1] >= 2 * waited[0] and waited[2] >= 2 * waited[1]


@pytest.mark.parametrize(("seconds", "reports"), [(0.0, 1), (1.5 * HALT.stall_seconds / LIMITS, 2)])
async def test_a_run_that_is_to_halt_ends_once_no_program_may_still_run_and_gives_everything_back(
    seconds: float, reports: int
) -> None:
    assert LIMITS == dispatch.MAX_ATTEMPTS * (1 + worker.MOST_WAITS)
    watch, told, tool = Watch(timeout_seconds=seconds), Told(), Waiting()
    said = r"halted because nothing has moved for .* s: 4 wait for a tool; run it again"
    with pytest.raises(RunHalted, match=said), Watching(watch, HALT, told):
        await rolled(watched(watch, talk=conversation(tool)))
    assert tool.cancelled and not watch.stall().waiting and len(told.stalls) == reports


async def test_a_cancellation_that_is_not_ours_stays_one() -> None:
    async def wait() -> None:
        with Watching(Watch(), SOON, Told()):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_report_that_cannot_be_kept_comes_through(capsys: pytest.CaptureFixture[str]) -> None:
    failed = threading.Event()

    def fail(stall: Stall, stacks: str) -> None:
        failed.set()
        raise OSError("disk full")

    watch = Watch()
    with Watching(watch, SOON, fail):
        watch.note("a", "an engine")
        assert await asyncio.to_thread(failed.wait, 60)
    assert "1 wait for an engine" in capsys.readouterr().err


# -- dumps of stacks -------------------------------------------------------------------------------------------------


async def outer(go: asyncio.Event) -> None:
    await inner(go)


async def inner(go: asyncio.Event) -> None:
    await go.wait()


async def test_tasks_that_stand_in_the_same_place_are_shown_once_down_to_what_they_wait_for_outermost_first() -> None:
    go = asyncio.Event()
    tasks = [asyncio.create_task(outer(go), name=f"attempt {n}") for n in range(5)]
    await asyncio.sleep(0)
    head, *places = all_stacks(asyncio.get_running_loop()).partition("\n\n")[0].splitlines()
    assert head == "5 tasks (attempt 0, attempt 1, attempt 2, ...)"
    assert [place.rsplit(" in ", 1)[1] for place in places] == ["outer", "inner", "Event.wait"]
    go.set()
    await asyncio.gather(*tasks)


async def test_threads_are_shown_by_name_with_where_they_stand() -> None:
    go = threading.Event()

    def wait_for_the_writer() -> None:
        go.wait()

    thread = threading.Thread(target=wait_for_the_writer, name="the writer")
    thread.start()
    text = all_stacks(asyncio.get_running_loop())
    go.set()
    thread.join()
    assert "thread the writer\n" in text and "wait_for_the_writer" in text


NEVER_BACK = """
import asyncio, time
from rocstar.config.sections import RunSection
from rocstar.support import watch

async def main():
    found = watch.Watch()
    found.note("a", "a tool")
    run = RunSection(stall_seconds=0.1, stall_learning_seconds=60, stall_policy="halt")
    with watch.Watching(found, run, lambda stall, stacks: None, break_off=lambda: print("broken off", flush=True)):
        time.sleep(600)

watch.UNWIND_SECONDS = 0.2
asyncio.run(main())
"""


NEVER_LETS_GO = """
import asyncio, re
from rocstar.config.sections import RunSection
from rocstar.support import watch

async def main():
    found = watch.Watch()
    found.note("a", "a tool")
    run = RunSection(stall_seconds=0.4, stall_learning_seconds=60, stall_policy="warn")
    with watch.Watching(found, run, lambda stall, stacks: None):
        await asyncio.sleep(0.2)
        re.match("(a+)+$", "a" * 60 + "b")

watch.LOOK_SECONDS = 0.1
asyncio.run(main())
"""


def test_a_call_that_keeps_the_interpreter_to_itself_is_shown() -> None:
    hung = subprocess.Popen([sys.executable, "-c", NEVER_LETS_GO], stderr=subprocess.PIPE, text=True)
    assert hung.stderr is not None
    told = [hung.stderr.readline() for _ in range(12)]
    hung.kill()
    hung.communicate()
    assert any("in match" in line for line in told), told


def test_a_run_that_is_to_halt_and_does_not_come_back_is_ended_with_the_report() -> None:
    ended = subprocess.run([sys.executable, "-c", NEVER_BACK], capture_output=True, text=True, timeout=400)
    assert (ended.returncode, ended.stdout) == (1, "broken off\n")
    assert "1 wait for a tool" in ended.stderr and "Traceback" not in ended.stderr
