"""The queue in front of the sandbox, with a scripted sandbox: who starts when, and that everybody gets one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.sandbox.service.admission import Policy
from rocstar.sandbox.wire import ProgramOutcome, Request, Response, SandboxDown
from tests.sandbox_service.support import ScriptedSandbox, admission, request, settle


async def test_calls_start_in_the_order_they_came_and_no_more_than_may_run() -> None:
    sandbox = ScriptedSandbox()
    queue = admission(sandbox)
    tickets = [queue.submit(request(name), 60) for name in "abcd"]
    await settle()
    assert (sandbox.started, queue.waiting) == (["a", "b"], 2)
    sandbox.answer("b")
    await settle()
    assert sandbox.started == ["a", "b", "c"]
    assert tickets[1].future.result().outcome == "ok"


async def test_an_old_program_makes_room_for_a_young_one_while_there_are_slots() -> None:
    sandbox = ScriptedSandbox()
    queue = admission(sandbox, slots=3, runnable=1, young_seconds=0.01)
    for name in "abcde":
        queue.submit(request(name), 60)
    await asyncio.sleep(0.3)
    assert sandbox.started == ["a", "b", "c"]
    sandbox.answer("a")
    await settle()
    assert sandbox.started == ["a", "b", "c", "d"]


async def test_a_call_whose_patience_ends_is_overloaded_and_never_runs() -> None:
    sandbox = ScriptedSandbox()
    queue = admission(sandbox, slots=1)
    queue.submit(request("long"), 60)
    late = await queue.submit(request("late"), 0.01).future
    assert late.outcome == "overloaded"
    assert "come again in 1 s" in late.message
    sandbox.answer("long")
    await settle()
    assert (sandbox.started, queue.waiting, queue.running) == (["long"], 0, 0)


async def test_cancelling_who_waits_for_an_outcome_frees_its_place_or_its_slot() -> None:
    sandbox = ScriptedSandbox()
    queue = admission(sandbox, slots=1)
    waiters = [asyncio.create_task(queue.outcome_for(queue.submit(request(name), 60))) for name in "abc"]
    await settle()
    assert (sandbox.started, queue.waiting) == (["a"], 2)
    for waiter in waiters[:2]:
        waiter.cancel()
    await settle()
    assert (sandbox.cancelled, sandbox.started) == (["a"], ["a", "c"])
    sandbox.answer("c")
    assert (await waiters[2]).outcome == "ok"
    assert (queue.waiting, queue.running) == (0, 0)


async def test_a_turn_may_be_for_something_else_than_a_plain_call() -> None:
    queue = admission(ScriptedSandbox())

    async def turn() -> Response:
        return Response(id="mine", outcome=ProgramOutcome.OK, stdout="turn")

    assert (await queue.submit(request("a"), 60, run=turn).future).stdout == "turn"


async def test_a_full_queue_refuses_at_once() -> None:
    queue = admission(ScriptedSandbox(), slots=1, max_queue=1)
    queue.submit(request("runs"), 60)
    queue.submit(request("waits"), 60)
    refused = queue.submit(request("refused"), 60)
    assert refused.future.result().outcome == "overloaded"


async def test_a_cancelled_call_frees_its_place_or_its_slot() -> None:
    sandbox = ScriptedSandbox()
    queue = admission(sandbox, slots=1)
    running, waiting, last = (queue.submit(request(name), 60) for name in "abc")
    await settle()
    queue.cancel(waiting)
    queue.cancel(running)
    await settle()
    assert (sandbox.cancelled, sandbox.started) == (["a"], ["a", "c"])
    assert [ticket.future.result().outcome for ticket in (running, waiting)] == ["cancelled", "cancelled"]
    sandbox.answer("c")
    assert (await last.future).outcome == "ok"
    assert (queue.waiting, queue.running, queue.young) == (0, 0, 0)


async def test_a_call_cancelled_before_its_first_step_gives_its_slot_back() -> None:
    queue = admission(ScriptedSandbox(), slots=1)
    queue.cancel(queue.submit(request("a"), 60))
    await settle()
    assert (queue.running, queue.young) == (0, 0)


async def test_a_sandbox_that_is_down_is_our_fault_and_the_next_call_is_tried() -> None:
    class Down:
        async def run(self, request: Request) -> Response:
            raise SandboxDown("the host died")

    queue = admission(Down(), slots=1)  # type: ignore[arg-type]
    answers = await asyncio.gather(*(queue.submit(request(name), 60).future for name in "ab"))
    assert [(answer.outcome, answer.message) for answer in answers] == [("internal", "the host died")] * 2


def test_what_may_start_is_bounded_by_slots_and_by_young_programs() -> None:
    policy = Policy(slots=3, runnable=2, young_seconds=0.1, max_queue=9)
    assert policy.may_start(running=0, young=0)
    assert not policy.may_start(running=2, young=2)
    assert policy.may_start(running=2, young=1)
    assert not policy.may_start(running=3, young=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["submit", "answer", "cancel"]), st.integers(0, 9)), max_size=60))
def test_every_call_gets_exactly_one_answer_whatever_happens(events: Sequence[tuple[str, int]]) -> None:
    asyncio.run(replay(events))


async def replay(events: Sequence[tuple[str, int]]) -> None:
    sandbox = ScriptedSandbox()
    queue = admission(sandbox, slots=2, runnable=2, max_queue=5)
    tickets = []
    for number, (event, choice) in enumerate(events):
        open_calls = [name for name, call in sandbox.calls.items() if not call.done()]
        if event == "submit":
            tickets.append(queue.submit(request(str(number)), 60))
        elif event == "answer" and open_calls:
            sandbox.answer(open_calls[choice % len(open_calls)])
        elif event == "cancel" and tickets:
            queue.cancel(tickets[choice % len(tickets)])
        await settle()
        assert queue.running <= 2
        assert queue.waiting == sum(ticket.task is None and not ticket.future.done() for ticket in tickets)
    while not all(ticket.future.done() for ticket in tickets):
        for name, call in list(sandbox.calls.items()):
            if not call.done():
                sandbox.answer(name)
        await settle()
    assert len(sandbox.started) == len(set(sandbox.started))
    assert (queue.waiting, queue.running, queue.young) == (0, 0, 0)
