"""Callers share the time of slots."""

from __future__ import annotations

import heapq
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rocstar.sandbox.call import Call
from rocstar.sandbox.daemon.turns import Callers, Line, Queued

SECONDS = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5)


def queued(callers: Callers, name: int, order: int) -> Queued:
    return Queued(name, order, callers.come(name), Call(id="", code=""), 0)


@given(lengths=st.lists(SECONDS, min_size=2, max_size=4), slots=st.integers(1, 5))
def test_no_caller_who_waits_is_more_than_his_running_calls_behind_another(
    lengths: list[list[float]], slots: int
) -> None:
    callers, line, now = Callers(), Line(), 0.0
    for order in range(200):
        line.push(queued(callers, order % len(lengths), order))
    running: list[tuple[float, int, Queued]] = []
    had, longest = Counter[int](), max(map(max, lengths))
    for _ in range(100):
        while len(running) < slots:
            call = line.first(now)
            assert call is not None
            line.take(call)
            callers.start(call.caller, now)
            seconds = lengths[call.number][had[call.number] % len(lengths[call.number])]
            had[call.number] += 1
            heapq.heappush(running, (now + seconds, call.order, call))
        now, _, call = heapq.heappop(running)
        call.caller.change_running(-1, now)
        used = [caller.used(now) for caller in callers._all.values()]
        if all(had[name] < 200 // len(lengths) for name in range(len(lengths))):
            assert max(used) - min(used) <= slots * longest + 1e-6


def test_calls_of_one_caller_come_in_the_order_of_arrival_and_answered_ones_never() -> None:
    callers, line = Callers(), Line()
    calls = [queued(callers, 0, order) for order in range(5)]
    for call in reversed(calls):
        line.push(call)
    calls[1].answered = calls[4].answered = True
    taken = []
    while (call := line.first(0.0)) is not None:
        line.take(call)
        taken.append(call.order)
    assert taken == [0, 2, 3]


def test_nobody_saves_up_time_that_he_left_to_others() -> None:
    callers = Callers()
    early, busy = queued(callers, 1, 0), queued(callers, 2, 1)
    early.caller.calls -= 1  # answered
    callers.start(busy.caller, 0.0)
    busy.caller.change_running(-1, 100.0)
    callers.start(busy.caller, 100.0)
    assert callers.come(1).used(100.0) == 100.0
    assert callers.come(3).used(100.0) == 100.0
