"""The router's decisions, each rule by itself."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from rocstar.sandbox.router.decide import RouterState
from rocstar.sandbox.router.nouns import Call, Decision, GiveUp, HangUp, Node, Policy, Send, Withdraw

POLICY = Policy(batch_size=4, linger_seconds=0.01, silent_seconds=3.0, reconnect_seconds=1.0, rest_seconds=1.0)


def state_with(*nodes: Node, policy: Policy = POLICY) -> RouterState:
    state = RouterState(policy, random.Random(0))
    for node in nodes:
        state.joined(node, [], now=0.0)
    return state


def node(name: str, *, slots: int = 4, capacity: int = 8, label: str = "") -> Node:
    return Node(name, label or name, slots, capacity, heard=0.0)


def submit(state: RouterState, ids: Iterable[int | str], *, now: float = 0.0, patience: float = 60.0) -> None:
    for call_id in ids:
        assert state.submit(Call(str(call_id), now, patience))


def sent(decisions: Iterable[Decision]) -> list[tuple[str, list[str]]]:
    return [(each.node.name, [call.id for call in each.calls]) for each in decisions if isinstance(each, Send)]


def test_an_idle_node_gets_a_lone_call_at_once() -> None:
    state = state_with(node("a"))
    submit(state, [1])
    assert sent(state.decide(0.0)) == [("a", ["1"])]


def test_a_busy_node_gets_calls_when_the_batch_is_full() -> None:
    state = state_with(node("a"))
    submit(state, [0])
    state.decide(0.0)
    submit(state, [1, 2, 3])
    assert state.decide(0.0) == []
    submit(state, [4])
    assert sent(state.decide(0.0)) == [("a", ["1", "2", "3", "4"])]


def test_a_busy_node_gets_calls_when_the_oldest_has_lingered() -> None:
    state = state_with(node("a"))
    submit(state, [0])
    state.decide(0.0)
    submit(state, [1], now=1.0)
    assert state.decide(1.005) == []
    assert state.next_at() == pytest.approx(1.01)
    assert sent(state.decide(1.01)) == [("a", ["1"])]


def test_nothing_is_due_while_no_node_has_room() -> None:
    state = state_with(node("a", capacity=2))
    submit(state, range(5))
    assert sent(state.decide(0.0)) == [("a", ["0", "1"])]
    assert state.decide(100.0) == [] and state.next_at() is None


def test_a_burst_is_spread_over_idle_nodes_before_any_gets_more() -> None:
    state = state_with(node("a"), node("b"), node("c"))
    submit(state, range(6))
    assert sent(state.decide(0.0)) == [("a", ["0", "1"]), ("b", ["2", "3"]), ("c", ["4", "5"])]


def test_the_node_that_has_been_idle_longest_comes_first() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    assert sent(state.decide(0.0)) == [("a", ["1"])]
    state.finished("a", "1", now=0.1)
    submit(state, [2, 3], now=0.1)
    assert [name for name, _ in sent(state.decide(0.1))] == ["b", "a"]


def test_of_two_busy_nodes_the_less_loaded_gets_more() -> None:
    state = state_with(node("small", slots=1, capacity=100), node("big", slots=16, capacity=100))
    submit(state, range(2))
    state.decide(0.0)
    for call_id in range(2, 62):
        submit(state, [call_id], now=1.0)
        state.decide(1.0 + POLICY.linger_seconds)
    held = {name: len(each.held) for name, each in state.nodes.items()}
    assert sum(held.values()) == 62 and held["big"] > 2 * held["small"]


def test_load_of_other_routers_counts() -> None:
    state = state_with(node("mine", capacity=100), node("shared", capacity=100))
    state.reported("shared", slots=4, capacity=100, others=50)
    submit(state, range(3))
    assert {name for name, _ in sent(state.decide(0.0))} == {"mine"}


def test_a_leaving_node_gets_nothing_more() -> None:
    state = state_with(node("a"))
    state.reported("a", slots=4, capacity=0, others=0)
    submit(state, [1])
    assert state.decide(10.0) == []


def test_a_call_that_waits_too_long_is_given_up_as_overload() -> None:
    state = state_with()
    submit(state, [1], patience=5.0)
    submit(state, [2], patience=50.0)
    state.passed(5.0)
    (gone,) = state.decide(5.0)
    assert isinstance(gone, GiveUp) and gone.call.id == "1" and gone.overloaded
    assert "no node took the call within 5 seconds" in gone.reason
    assert list(state.queue) == ["2"]


def test_a_full_queue_takes_no_more() -> None:
    state = state_with(policy=Policy(max_queue=2))
    submit(state, [1, 2])
    assert not state.submit(Call("3", 0.0, 60.0))


def test_a_result_is_delivered_once() -> None:
    state = state_with(node("a"))
    submit(state, [1])
    state.decide(0.0)
    delivered = state.finished("a", "1", now=0.1)
    assert delivered is not None and delivered.id == "1"
    assert state.finished("a", "1", now=0.2) is None


def test_a_fault_of_the_node_sends_the_call_elsewhere_with_the_next_attempt() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    ((first, _),) = sent(state.decide(0.0))
    assert state.finished(first, "1", now=0.1, fault="its slot died") is None
    (send,) = state.decide(0.1)
    assert isinstance(send, Send) and send.node.name != first and send.calls[0].attempt == 2


def test_a_call_lost_too_often_is_given_up_with_the_reason() -> None:
    state = state_with(node("a"))
    submit(state, [1])
    for attempt in range(POLICY.max_attempts):
        state.decide(float(attempt))
        state.finished("a", "1", now=float(attempt), fault="its slot died")
    (gone,) = state.decide(10.0)
    assert isinstance(gone, GiveUp) and not gone.overloaded
    assert gone.reason == "the call was lost 3 times, at last because its slot died"
    assert not state.calls


def test_a_node_that_only_fails_rests() -> None:
    state = state_with(node("a", capacity=100))
    submit(state, range(3))
    state.decide(0.0)
    for call_id in range(3):
        state.finished("a", str(call_id), now=0.0, fault="no slots")
    assert state.decide(0.5) == []
    state.passed(1.0)
    ((name, ids),) = sent(state.decide(1.0))
    assert name == "a" and sorted(ids) == ["0", "1", "2"]


def test_a_broken_connection_is_given_time_to_come_back() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    state.decide(0.0)
    state.disconnected("a", now=1.0)
    state.passed(1.9)
    assert state.decide(1.9) == []
    state.joined(node("a"), ["1"], now=1.95)
    delivered = state.finished("a", "1", now=2.0)
    assert delivered is not None and delivered.attempt == 1


def test_calls_of_a_node_that_stays_away_go_elsewhere() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    state.decide(0.0)
    state.disconnected("a", now=1.0)
    state.passed(2.1)
    (send,) = state.decide(2.1)
    assert isinstance(send, Send) and send.node.name == "b" and send.calls[0].attempt == 2


def test_a_late_result_of_a_lost_node_is_taken_and_the_other_copy_withdrawn() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    state.decide(0.0)
    state.disconnected("a", now=1.0)
    state.passed(2.1)
    state.decide(2.1)
    state.joined(node("a"), ["1"], now=2.5)
    assert state.finished("a", "1", now=2.5) is not None
    (withdraw,) = state.decide(2.5)
    assert isinstance(withdraw, Withdraw) and (withdraw.node.name, withdraw.call_id) == ("b", "1")
    assert state.finished("b", "1", now=2.6) is None


def test_a_call_that_waits_again_is_given_back_to_the_node_that_returned_with_it() -> None:
    state = state_with(node("a"))
    submit(state, [1])
    state.decide(0.0)
    state.disconnected("a", now=1.0)
    state.passed(2.1)
    state.joined(node("a"), ["1"], now=2.5)
    assert state.decide(3.0) == [] and not state.queue


def test_a_call_that_never_arrived_at_its_node_is_sent_again_as_the_same_attempt() -> None:
    state = state_with(node("a"))
    submit(state, [1, 2])
    state.decide(0.0)
    state.disconnected("a", now=1.0)
    state.joined(node("a"), ["2"], now=1.1)
    (send,) = state.decide(2.0)
    assert isinstance(send, Send) and [(call.id, call.attempt) for call in send.calls] == [("1", 1)]


def test_a_restarted_node_frees_the_calls_of_its_former_self_at_once() -> None:
    state = state_with(node("a1", label="a"))
    submit(state, [1])
    state.decide(0.0)
    state.disconnected("a1", now=1.0)
    state.joined(node("a2", label="a"), [], now=1.05)
    assert sent(state.decide(1.05)) == [("a2", ["1"])]


def test_a_silent_node_is_hung_up_and_its_calls_go_elsewhere() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    state.decide(0.0)
    state.heard("b", now=3.0)
    state.passed(3.5)
    hang_up, send = state.decide(3.5)
    assert isinstance(hang_up, HangUp) and hang_up.node.name == "a"
    assert isinstance(send, Send) and send.node.name == "b"


def test_calls_of_a_lost_node_come_before_those_that_wait() -> None:
    state = state_with(node("a", slots=4, capacity=3), node("b", slots=4, capacity=3))
    submit(state, range(9))
    held = dict(sent(state.decide(0.0)))
    state.died("a", now=1.0)
    for call_id in held["b"]:
        state.finished("b", call_id, now=1.0)
    assert sent(state.decide(2.0)) == [("b", held["a"])]


def test_cancelling_withdraws_the_call_from_its_node() -> None:
    state = state_with(node("a", capacity=1))
    submit(state, [1, 2])
    state.decide(0.0)
    state.cancel("2")
    state.cancel("1")
    (withdraw,) = state.decide(0.0)
    assert isinstance(withdraw, Withdraw) and withdraw.call_id == "1"
    assert state.decide(9.0) == []
    state.finished("a", "1", now=0.1)
    submit(state, [3], now=0.1)
    assert sent(state.decide(0.2)) == [("a", ["3"])]


def test_forgotten_deadlines_do_not_pile_up() -> None:
    state = state_with(node("a"))
    for call_id in range(20_000):
        submit(state, [call_id])
        state.decide(0.0)
        state.finished("a", str(call_id), now=0.0)
    assert len(state.deadlines) < 2000
