"""Random histories of the router's decisions against model nodes that die, freeze, fall off the network and return.

The promises: nothing lost, nothing delivered twice, no node over its capacity, nobody starved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rocstar.sandbox.router.decide import RouterState
from rocstar.sandbox.router.nouns import Call, GiveUp, HangUp, Node, Policy, Send, Withdraw

POLICY = Policy(batch_size=3, linger_seconds=0.5, silent_seconds=3.0, reconnect_seconds=2.0, max_attempts=3)


@dataclass(slots=True)
class ModelNode:
    """The other side: what a correct node does, without running anything."""

    name: str
    label: str
    capacity: int
    linked: bool = True
    frozen: bool = False
    running: set[str] = field(default_factory=set)
    done: dict[str, str] = field(default_factory=dict)  # results the router has not had: id -> fault
    lost_in_transit: bool = False


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = 0
        self.state = RouterState(POLICY, random.Random(1))
        self.models: dict[str, ModelNode] = {}
        self.submitted: set[str] = set()
        self.delivered: list[str] = []
        self.given_up: list[str] = []
        self.cancelled: set[str] = set()
        self.first_sent: list[str] = []
        self.wishes: dict[str, str] = {}
        self.freed: set[str] = set()
        self.sent: set[str] = set()

    @initialize(capacities=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def nodes(self, capacities: list[int]) -> None:
        for number, capacity in enumerate(capacities):
            self.add(f"n{number}", capacity)

    def add(self, label: str, capacity: int) -> None:
        self.names += 1
        model = ModelNode(f"{label}-{self.names}", label, capacity)
        self.models[model.name] = model
        self.hello(model)

    def hello(self, model: ModelNode) -> None:
        node = Node(model.name, model.label, 2, model.capacity, self.now)
        model.linked = True
        self.state.joined(node, {*model.running, *model.done}, now=self.now)
        self.carry_out()

    def carry_out(self) -> None:
        decisions = self.state.decide(self.now)
        # Once its node was given up a call is anybody's, also when that node comes back under its name.
        self.freed |= {call_id for call_id, name in self.wishes.items() if name not in self.state.nodes}
        for decision in decisions:
            if isinstance(decision, Send):
                self.deliver_calls(self.models.get(decision.node.name), [call.id for call in decision.calls])
            elif isinstance(decision, Withdraw):
                model = self.models.get(decision.node.name)
                if model is not None and model.linked and decision.call_id in model.running:
                    model.running.discard(decision.call_id)
                    model.done[decision.call_id] = "withdrawn"
            elif isinstance(decision, HangUp):
                self.models[decision.node.name].linked = False
            elif isinstance(decision, GiveUp):
                self.given_up.append(decision.call.id)

    def deliver_calls(self, model: ModelNode | None, ids: list[str]) -> None:
        assert model is not None and model.linked, "sent to a node that is not there"
        for call_id in ids:
            wish = self.state.nodes.get(self.wishes.get(call_id, ""))
            first = self.state.calls[call_id].attempt == 1 and call_id not in self.sent
            bound = first and wish is not None and call_id not in self.freed
            assert not bound or wish.name == model.name, "given to another than it wanted"
        self.sent.update(ids)
        plain = [call_id for call_id in ids if call_id not in self.wishes]
        self.first_sent += [call_id for call_id in plain if call_id not in self.first_sent]
        if model.lost_in_transit:
            return
        for call_id in ids:
            assert call_id not in model.running and call_id not in model.done, "sent twice to one node"
            model.running.add(call_id)
        assert len(model.running) <= model.capacity

    @rule(count=st.integers(1, 8), patience=st.sampled_from([1.0, 1000.0]))
    def submit(self, count: int, patience: float) -> None:
        for _ in range(count):
            self.submit_one(patience)
        self.carry_out()

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 8), patience=st.sampled_from([1.0, 1000.0]))
    def submit_to_one_node(self, choice: random.Random, count: int, patience: float) -> None:
        """Known or long gone."""
        name = choice.choice([*sorted(self.models), "gone"])
        for _ in range(count):
            self.submit_one(patience, name)
        self.carry_out()

    def submit_one(self, patience: float, wants: str = "") -> None:
        call_id = str(len(self.submitted))
        self.submitted.add(call_id)
        if wants:
            self.wishes[call_id] = wants
        assert self.state.submit(Call(call_id, self.now, patience, wants=wants))

    @rule(choice=st.randoms(use_true_random=False), fault=st.sampled_from(["", "", "", "slot died"]))
    def a_node_finishes_something(self, choice: random.Random, fault: str) -> None:
        able = [model for model in self.models.values() if model.running and not model.frozen]
        if able:
            model = choice.choice(sorted(able, key=lambda model: model.name))
            call_id = choice.choice(sorted(model.running))
            model.running.discard(call_id)
            model.done[call_id] = fault
            self.flush(model)

    def flush(self, model: ModelNode) -> None:
        while model.done and model.linked and not model.frozen:
            call_id, fault = model.done.popitem()
            self.state.heard(model.name, now=self.now)
            call = self.state.finished(model.name, call_id, now=self.now, fault=fault)
            if call is not None:
                self.delivered.append(call.id)
            self.carry_out()

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 2.5, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for model in self.models.values():
            if model.linked and not model.frozen:
                self.state.heard(model.name, now=self.now)
        self.state.passed(self.now)
        self.carry_out()

    @rule(choice=st.randoms(use_true_random=False))
    def a_call_is_cancelled(self, choice: random.Random) -> None:
        if self.state.calls:
            call_id = choice.choice(sorted(self.state.calls))
            self.state.cancel(call_id)
            self.cancelled.add(call_id)
            self.carry_out()

    def pick(self, choice: random.Random, *, linked: bool) -> ModelNode | None:
        able = [model for model in self.models.values() if model.linked == linked and not model.frozen]
        return choice.choice(sorted(able, key=lambda model: model.name)) if able else None

    @rule(choice=st.randoms(use_true_random=False), losing=st.booleans())
    def a_connection_breaks(self, choice: random.Random, losing: bool) -> None:
        """`losing`: what was sent just before is lost with it."""
        model = self.pick(choice, linked=True)
        if model is not None:
            model.lost_in_transit = losing
            self.submit(3, 1000.0)  # a full batch goes into the broken pipe at once
            model.lost_in_transit = False
            model.linked = False
            self.state.disconnected(model.name, now=self.now)
            self.carry_out()

    @rule(choice=st.randoms(use_true_random=False))
    def a_connection_returns(self, choice: random.Random) -> None:
        model = self.pick(choice, linked=False)
        if model is not None:
            self.hello(model)
            self.flush(model)

    @rule(choice=st.randoms(use_true_random=False))
    def a_node_freezes(self, choice: random.Random) -> None:
        model = self.pick(choice, linked=True)
        if model is not None:
            model.frozen = True

    @rule()
    def frozen_nodes_thaw(self) -> None:
        for model in self.models.values():
            if model.frozen:
                model.frozen = False
                if model.linked:
                    self.state.heard(model.name, now=self.now)
                    self.flush(model)

    @rule(choice=st.randoms(use_true_random=False))
    def a_node_is_killed_and_restarted(self, choice: random.Random) -> None:
        model = choice.choice(sorted(self.models.values(), key=lambda model: model.name))
        del self.models[model.name]
        if model.linked:
            self.state.disconnected(model.name, now=self.now)
            self.carry_out()
        self.add(model.label, model.capacity)

    @invariant()
    def nothing_is_delivered_twice_or_both_delivered_and_given_up(self) -> None:
        ends = [*self.delivered, *self.given_up, *self.cancelled]
        assert len(ends) == len(set(ends))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.submitted == {*self.state.calls, *self.delivered, *self.given_up, *self.cancelled}
        for call in self.state.calls.values():
            places = [call.id in self.state.queue, *(call.id in node.wanted for node in self.state.nodes.values())]
            assert sum(places) == (call.node is None)
            assert call.node is None or call.node is self.state.nodes[call.node.name]

    @invariant()
    def no_node_is_over_its_capacity(self) -> None:
        assert all(len(node.held) <= node.capacity for node in self.state.nodes.values())

    @invariant()
    def bookkeeping_agrees_with_itself(self) -> None:
        for node in self.state.nodes.values():
            has_room = node.connected and not node.rests_until and len(node.held) < node.capacity
            assert (node in list(self.state.open)) == has_room
            assert (node.name in self.state.idle) == (has_room and not node.held)
        assert all(node.name in self.state.nodes for node in self.state.open)
        assert {name for name, node in self.state.nodes.items() if node.wanted} <= set(self.state.wanting)
        assert set(self.state.wanting) <= set(self.state.nodes)

    @invariant()
    def first_come_first_sent(self) -> None:
        assert self.first_sent == sorted(self.first_sent, key=int)

    @precondition(lambda self: bool(self.models))
    @rule()
    def in_the_end_everybody_is_served(self) -> None:
        """With nodes that work, every open call ends within as many steps as there are calls and waits."""
        self.frozen_nodes_thaw()
        for model in self.models.values():
            if not model.linked:
                self.hello(model)
        steps = 10 * (len(self.state.calls) + 10)
        while self.state.calls and steps:
            steps -= 1
            for model in list(self.models.values()):
                model.done |= dict.fromkeys(sorted(model.running), "")
                model.running.clear()
                self.flush(model)
            self.time_passes(1.1)
            for model in list(self.models.values()):
                if not model.linked:
                    self.hello(model)
        assert not self.state.calls


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
