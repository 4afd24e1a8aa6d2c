"""The client's decisions: single ones by example, and random histories of nodes that die, refuse and come back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rocstar.sandbox.call import Call, ServiceOutcome, SessionLost
from rocstar.sandbox.client.dispatch import (
    CELL_PAUSE,
    FIRST_PAUSE,
    MAX_ATTEMPTS,
    MAX_PAUSE,
    SCAN_SECONDS,
    Dispatch,
    Entry,
    GiveUp,
    NodeFacts,
    Open,
    Send,
)

LONG = 1000.0


class Bench:
    """A dispatch with nodes that are up, and a clock."""

    def __init__(self, *slots: int) -> None:
        self.dispatch: Dispatch[NodeFacts] = Dispatch(random.Random(1).random)
        self.now = 100.0
        self.numbers = 0
        self.nodes = [NodeFacts(label=f"n{number}") for number in range(len(slots))]
        for node in self.nodes:
            self.dispatch.nodes.append(node)
        self.dispatch.decide(self.now)
        for node, size in zip(self.nodes, slots, strict=True):
            self.dispatch.came_up(node, size, self.now)

    def entry(self, **values: Any) -> Entry[NodeFacts]:
        self.numbers += 1
        flags = {name: values.pop(name) for name in ("again", "waits") if name in values}
        return Entry(self.numbers, Call(id="", code="", **{"patience_seconds": LONG, **values}), **flags)

    def sent(self, **values: Any) -> tuple[Entry[NodeFacts], NodeFacts]:
        entry = self.entry(**values)
        node = self.dispatch.submit(entry, self.now)
        assert node is not None
        return entry, node

    def decide(self, seconds: float = 0.0) -> list[Any]:
        self.now += seconds
        return self.dispatch.decide(self.now)

    def fails(self, entry: Entry[NodeFacts], node: NodeFacts, *, overloaded: bool) -> bool:
        assert self.dispatch.answered(node, entry.number) is entry
        return self.dispatch.failed(node, entry, self.now, overloaded=overloaded)


def test_calls_are_shared_out_by_the_number_of_slots() -> None:
    bench = Bench(1, 1, 4)
    for _ in range(600):
        bench.sent()
    small, other, large = (len(node.held) for node in bench.nodes)
    assert abs(small - other) < 40 and abs(large - 2 * (small + other)) < 60


def test_a_call_that_its_node_failed_is_sent_to_another() -> None:
    bench = Bench(1, 1)
    for _ in range(20):  # also where that one has more to do
        entry, first = bench.sent()
        assert bench.fails(entry, first, overloaded=False)
        assert bench.decide() == [Send(entry, next(node for node in bench.nodes if node is not first))]


def test_a_node_without_room_is_left_alone_for_a_growing_time() -> None:
    bench = Bench(1, 1)
    rests = []
    for _ in range(10):
        entry, node = next(one for one in iter(bench.sent, None) if one[1] is bench.nodes[0])
        assert bench.fails(entry, node, overloaded=True)
        assert bench.decide() == [Send(entry, bench.nodes[1])], "elsewhere at once"
        assert {bench.sent()[1].label for _ in range(20)} == {"n1"}
        rests.append(node.paused_until - bench.now)
        bench.decide(rests[-1])
    assert rests == pytest.approx([min(MAX_PAUSE, FIRST_PAUSE * 2**n) for n in range(10)])


def test_one_that_does_not_wait_is_overloaded_where_all_are_full_and_an_answer_makes_room() -> None:
    bench = Bench(1, 1)
    entry, first = bench.sent(waits=False)
    assert bench.fails(entry, first, overloaded=True)
    ((_, second),) = bench.decide()
    assert not bench.fails(entry, second, overloaded=True), "no third node"
    assert bench.sent(waits=False)[1] in bench.nodes, "it may have room for another caller"
    assert bench.dispatch.submit(patient := bench.entry(), bench.now) is None
    assert bench.dispatch.has_room(first, bench.now) and bench.decide() == [Send(patient, first)]
    assert not bench.dispatch.has_room(first, bench.now) and bench.sent(waits=False)[1] is first


def test_a_call_waits_for_room_until_its_patience_is_over_and_is_then_given_up() -> None:
    bench = Bench(1)
    entry, node = bench.sent(patience_seconds=1.0)
    assert bench.fails(entry, node, overloaded=True)
    assert bench.decide() == []
    assert bench.decide(FIRST_PAUSE) == [Send(entry, node)]
    assert bench.fails(entry, node, overloaded=True)
    bench.dispatch.died(node, "it died", bench.now)
    node.tries = 100
    ended = [each.answer for each in bench.decide(1.0 + SCAN_SECONDS) if isinstance(each, GiveUp)]
    assert [answer.outcome for answer in ended] == [ServiceOutcome.OVERLOADED]


def test_a_refusal_after_a_calls_patience_is_its_answer() -> None:
    bench = Bench(1, 1)
    entry, node = bench.sent(patience_seconds=1.0)
    bench.now += 2.0
    assert not bench.fails(entry, node, overloaded=True)
    assert node.paused_until == 0.0, "a patience that is over is no full queue"


def test_a_first_cell_without_room_tries_another_node_and_keeps_no_plain_call_back() -> None:
    bench = Bench(1, 1)
    entry, node = bench.sent(session="s", cell=1)
    assert bench.fails(entry, node, overloaded=True)
    assert {bench.sent()[1].label for _ in range(30)} == {"n0", "n1"}
    sends = [each for each in bench.decide(CELL_PAUSE) if isinstance(each, Send)]
    assert [send.entry for send in sends] == [entry] and sends[0].node is not node
    assert bench.sent(session="s", cell=2)[1] is sends[0].node


def test_a_later_cell_without_room_waits_for_its_own_node() -> None:
    bench = Bench(1, 1)
    _, home = bench.sent(session="s", cell=1)
    entry, _ = bench.sent(session="s", cell=2)
    assert bench.fails(entry, home, overloaded=True)
    assert bench.decide(CELL_PAUSE) == [Send(entry, home)]
    assert not bench.fails(entry, home, overloaded=False), "one that failed is not sent again"


def test_a_node_that_died_is_opened_again_after_a_growing_pause() -> None:
    bench = Bench(1)
    (node,) = bench.nodes
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE):
        bench.dispatch.died(node, "it died", bench.now)
        assert bench.decide() == []
        assert bench.dispatch.next_at() == pytest.approx(bench.now + pause)
        assert bench.decide(pause) == [Open(node)]
        assert bench.decide(60.0) == [], "until it came up or died"
        bench.now -= 60.0


def test_calls_wait_for_a_node_that_starts_and_not_for_one_that_failed_to() -> None:
    bench = Bench()
    node = NodeFacts(label="n0", tries=2)
    bench.dispatch.nodes.append(node)
    entry = bench.entry()
    assert bench.dispatch.submit(entry, bench.now) is None
    assert bench.decide() == [Open(node)]
    bench.dispatch.died(node, "no such module", bench.now)
    assert bench.decide(FIRST_PAUSE) == [Open(node)]
    bench.dispatch.died(node, "no such module", bench.now)
    (given_up,) = bench.decide()
    assert given_up.entry is entry and str(given_up.answer) == "no such module"
    bench.decide(MAX_PAUSE)
    bench.dispatch.came_up(node, 1, bench.now)
    assert bench.sent()[1] is node, "it is used when it comes up after all"


class Histories(RuleBasedStateMachine):
    """Nothing lost, nothing answered twice, sessions stay where they are, nobody is sent to a node that is not up."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.submitted: dict[int, Entry[NodeFacts]] = {}
        self.ended: list[int] = []
        self.lost: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.opening: list[NodeFacts] = []
        self.homes: dict[str, NodeFacts] = {}
        self.with_room: list[NodeFacts] = []

    @property
    def dispatch(self) -> Dispatch[NodeFacts]:
        return self.bench.dispatch

    @initialize(count=st.integers(1, 3), tries=st.sampled_from([1, 100]))
    def nodes(self, count: int, tries: int) -> None:
        for number in range(count):
            self.dispatch.nodes.append(NodeFacts(label=f"n{number}", tries=tries))
        self.carry_out()

    def carry_out(self, seconds: float = 0.0) -> None:
        for decision in self.bench.decide(seconds):
            if isinstance(decision, Send):
                self.take(decision.entry, decision.node)
            elif isinstance(decision, GiveUp):
                self.end(decision.entry)
                if isinstance(decision.answer, SessionLost):
                    self.lost.add(decision.entry.number)
            else:
                self.opening.append(decision.node)

    def take(self, entry: Entry[NodeFacts], node: NodeFacts) -> None:
        assert node.up and node.held[entry.number] is entry
        assert node.paused_until <= self.bench.now or not entry.waits or entry.call.session or node in self.with_room
        ready = [each for each in self.dispatch.nodes if each.up and each.paused_until <= self.bench.now]
        assert node is not entry.avoid or len(ready) < 2 or entry.call.session, "elsewhere, where there is another"
        if session := entry.call.session:
            assert self.homes.setdefault(session, node) is node, "a session's node was changed while it was up"

    def end(self, entry: Entry[NodeFacts]) -> None:
        self.ended.append(entry.number)
        assert entry.attempt <= (MAX_ATTEMPTS if entry.again and not entry.call.session else 1)

    @rule(
        count=st.integers(1, 6),
        patience=st.sampled_from([1.0, LONG]),
        session=st.sampled_from(["", "", "s", "t"]),
        again=st.sampled_from([True, True, False]),
        waits=st.sampled_from([True, True, False]),
    )
    def submit(self, count: int, patience: float, session: str, again: bool, waits: bool) -> None:
        for _ in range(count):
            asked = {"patience_seconds": patience, "session": session, "cell": int(session != "")}
            entry = self.bench.entry(**asked, again=again, waits=waits)
            self.submitted[entry.number] = entry
            node = self.dispatch.submit(entry, self.bench.now)
            if node is not None:
                self.take(entry, node)
        self.carry_out()

    @rule(choice=st.randoms(use_true_random=False), how=st.sampled_from(["ok", "ok", "internal", "overloaded"]))
    def a_node_answers(self, choice: random.Random, how: str) -> None:
        held = [(node, number) for node in self.dispatch.nodes for number in node.held]
        if not held:
            return
        node, number = choice.choice(held)
        entry = self.dispatch.answered(node, number)
        assert entry is not None and self.dispatch.answered(node, number) is None
        if how == "overloaded" and entry.call.session:
            self.homes.pop(entry.call.session, None)
        if how == "ok" or not self.dispatch.failed(node, entry, self.bench.now, overloaded=how == "overloaded"):
            self.end(entry)
        if how == "ok" and self.dispatch.has_room(node, self.bench.now):
            self.with_room.append(node)
        self.carry_out()
        self.with_room.clear()

    @rule(choice=st.randoms(use_true_random=False))
    def a_call_is_cancelled(self, choice: random.Random) -> None:
        alive = [entry for number, entry in self.submitted.items() if number not in self.ended]
        if alive:
            entry = choice.choice(alive)
            self.dispatch.cancel(entry)
            self.ended.append(entry.number)

    @rule(choice=st.randoms(use_true_random=False))
    def a_node_dies(self, choice: random.Random) -> None:
        up = [node for node in self.dispatch.nodes if node.up]
        if up:
            node = choice.choice(up)
            cells = {entry.number for entry in node.held.values() if entry.call.session}
            self.dispatch.died(node, "it died", self.bench.now)
            self.homes = {session: home for session, home in self.homes.items() if home is not node}
            self.carry_out()
            assert cells <= self.lost and all(self.submitted[number].call.session for number in self.lost)

    @rule(well=st.booleans())
    def a_node_opens(self, well: bool) -> None:
        if self.opening:
            node = self.opening.pop()
            if well:
                self.dispatch.came_up(node, 1, self.bench.now)
            else:
                self.dispatch.died(node, "it did not start", self.bench.now)
            self.carry_out()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.carry_out(seconds)

    @invariant()
    def every_call_is_in_one_place_or_ended_once(self) -> None:
        held = [number for node in self.dispatch.nodes for number in node.held]
        everywhere = [*held, *self.dispatch.waiting, *self.ended]
        assert sorted(everywhere) == sorted(self.submitted)

    @invariant()
    def whoever_waits_is_looked_at_again(self) -> None:
        assert not self.dispatch.waiting or self.dispatch.next_at() is not None

    @rule()
    def with_nodes_that_work_all_calls_end(self) -> None:
        for _ in range(40):
            while self.opening:
                self.dispatch.came_up(self.opening.pop(), 1, self.bench.now)
            for node in self.dispatch.nodes:
                for number in list(node.held):
                    entry = self.dispatch.answered(node, number)
                    assert entry is not None
                    self.end(entry)
            self.carry_out(0.5)
        assert not self.dispatch.waiting and not any(node.held for node in self.dispatch.nodes)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
