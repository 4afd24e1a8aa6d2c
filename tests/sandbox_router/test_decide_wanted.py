"""The router's decisions about calls that want one node: a session lives there."""

from __future__ import annotations

from rocstar.sandbox.router.decide import RouterState
from rocstar.sandbox.router.nouns import Call, GiveUp, Policy
from tests.sandbox_router.test_decide import node, sent, state_with, submit


def want(state: RouterState, name: str, *ids: str, now: float = 0.0, patience: float = 60.0) -> None:
    for call_id in ids:
        assert state.submit(Call(call_id, now, patience, wants=name))


def test_it_goes_to_its_node_at_once_although_another_is_idle() -> None:
    state = state_with(node("a"), node("b"))
    submit(state, [1])
    assert sent(state.decide(0.0)) == [("a", ["1"])]
    want(state, "a", "2")
    assert sent(state.decide(0.0)) == [("a", ["2"])]


def test_it_waits_for_room_there_and_then_goes_before_the_queue() -> None:
    state = state_with(node("a", capacity=1))
    submit(state, [1])
    state.decide(0.0)
    submit(state, [2])
    want(state, "a", "3", "4")
    assert sent(state.decide(5.0)) == []
    state.finished("a", "1", now=5.0)
    assert sent(state.decide(5.0)) == [("a", ["3"])]
    state.finished("a", "3", now=5.0)
    assert sent(state.decide(5.0)) == [("a", ["4"])]
    state.finished("a", "4", now=5.0)
    assert sent(state.decide(5.0)) == [("a", ["2"])]


def test_many_travel_together_within_a_batch_and_the_nodes_room() -> None:
    state = state_with(node("a", capacity=6))
    want(state, "a", *"123456789")
    assert sent(state.decide(0.0)) == [("a", ["1", "2", "3", "4"]), ("a", ["5", "6"])]


def test_a_node_that_is_unknown_gone_or_leaving_leaves_it_to_the_others() -> None:
    state = state_with(node("a", capacity=1), node("b"))
    want(state, "never heard of", "1")
    assert len(sent(state.decide(0.0))) == 1
    want(state, "a", "2", "3")
    state.decide(0.0)
    state.died("a", now=0.0)
    assert {name for name, _ in sent(state.decide(1.0))} == {"b"}
    leaving = state_with(node("a", capacity=1), node("b"))
    want(leaving, "a", "1", "2")
    assert sent(leaving.decide(0.0)) == [("a", ["1"])]
    leaving.reported("a", slots=1, capacity=0, others=0)
    want(leaving, "a", "3")
    assert sent(leaving.decide(1.0)) == [("b", ["2", "3"])]


def test_while_its_node_may_come_back_it_waits() -> None:
    state = state_with(node("a"), node("b"))
    state.disconnected("a", now=0.0)
    want(state, "a", "1")
    state.passed(0.5)
    assert sent(state.decide(0.5)) == []
    state.joined(node("a"), [], now=0.6)
    assert sent(state.decide(0.6)) == [("a", ["1"])]


def test_it_is_overloaded_after_its_patience_and_can_be_cancelled() -> None:
    state = state_with(node("a", capacity=1))
    submit(state, [0])
    state.decide(0.0)
    want(state, "a", "1", "2", patience=2.0)
    state.cancel("2")
    state.passed(2.5)
    (told,) = [each for each in state.decide(2.5) if isinstance(each, GiveUp)]
    assert (told.call.id, told.overloaded) == ("1", True)
    assert set(state.calls) == {"0"}


def test_its_patience_is_kept_when_old_deadlines_are_thrown_away() -> None:
    state = state_with(node("a", capacity=1))
    submit(state, [0])
    state.decide(0.0)
    want(state, "a", "waits", patience=50.0)
    for number in range(3000):
        submit(state, [f"c{number}"], patience=100.0)
        state.cancel(f"c{number}")
    assert len(state.deadlines) < 3000
    state.passed(51.0)
    assert [each.call.id for each in state.decide(51.0) if isinstance(each, GiveUp)] == ["waits"]


def test_a_node_takes_no_more_waiting_calls_than_the_queue_would() -> None:
    state = state_with(node("a", capacity=1), policy=Policy(max_queue=2))
    want(state, "a", "0")
    state.decide(0.0)
    want(state, "a", "1", "2")
    assert not state.submit(Call("3", 0.0, 60.0, wants="a"))


def test_a_fault_sends_it_to_another_node() -> None:
    state = state_with(node("a"), node("b"))
    want(state, "a", "1")
    state.decide(0.0)
    assert state.finished("a", "1", now=0.0, fault="slot died") is None
    assert sent(state.decide(0.0)) == [("b", ["1"])]
