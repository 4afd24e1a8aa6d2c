"""What the router does next: facts in, decisions out. No clock, no socket, no program, no randomness of its own.

Invariant: every call submitted leaves exactly once, by `finished`, by `cancel` or by a GiveUp.

A call waits in one first-in, first-out queue. Batches leave it when they are full, when the oldest call has lingered,
or at once while a node is idle. The node is an idle one (the longest idle first), else the less loaded of two drawn
at random. A call that wants one node (a cell, whose session lives there) waits for room there and goes before what the
queue would send; when that node is gone or leaving, it joins the queue. A call goes back to the front of the queue when
its node answers with a fault of its own, goes silent, or is gone for longer than a reconnect takes. Until then the node
may still come back and give the result.

    node A holds c1, its connection breaks        c1 still A's
    A is back within `reconnect_seconds`          c1 still A's; had it never arrived there, front of the queue
    A is not back                                 c1 to the front of the queue, attempt 2, then to node B
    A is back after that and has c1's result      c1 leaves with it, B is told to drop it
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from rocstar.sandbox.router.bag import Bag
from rocstar.sandbox.router.nouns import Call, Decision, GiveUp, HangUp, Node, Policy, Send, Withdraw

CORES_SHARE = 4  # slots per core, roughly: so many calls can go to a node together without waiting for each other there
REST_AFTER = 3  # faults in a row after which a node rests; one that fails everything at once would look idle for ever
MIN_HEAP = 1024


class RouterState:
    """Tell it facts, then ask `decide`. Times are monotonic seconds and never go back."""

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self.policy = policy
        self.rng = rng
        self.calls: dict[str, Call] = {}
        self.queue: OrderedDict[str, Call] = OrderedDict()
        self.nodes: dict[str, Node] = {}
        self.open = Bag()  # have room
        self.idle: dict[str, Node] = {}  # have nothing to do, longest first
        self.wanting: dict[str, Node] = {}  # somebody may wait for one of these alone
        self.deadlines: list[tuple[float, str]] = []
        self.decisions: list[Decision] = []

    # Facts about calls.

    def submit(self, call: Call) -> bool:
        """False: the queue is full and the call was not taken."""
        node = self.nodes.get(call.wants) if call.wants else None
        if len(self.queue) + (len(node.wanted) if node else 0) >= self.policy.max_queue:
            return False
        self.calls[call.id] = call
        if node is not None and node.capacity:
            node.wanted[call.id] = call
            self.wanting[node.name] = node
        else:
            self.queue[call.id] = call
        self.set_deadline(call, call.arrived)
        return True

    def finished(self, name: str, call_id: str, *, now: float, fault: str = "") -> Call | None:
        """A node answered. The call, when this is its one result; None for a late double, an unknown call or a
        `fault` of the node's own, after which it is sent again."""
        node = self.nodes.get(name)
        call = self.calls.get(call_id)
        if node is not None:
            node.held.pop(call_id, None)
            if call is not None:
                self.count_fault(node, bool(fault), now)
            self.refresh(node)
        if call is None:
            return None
        if not fault:
            self.close(call)
            return call
        if call.node is node:
            call.avoid = node
            self.send_again([call], fault, now)
        return None

    def cancel(self, call_id: str) -> None:
        call = self.calls.get(call_id)
        if call is not None:
            self.close(call)

    # Facts about nodes.

    def joined(self, node: Node, holds: Iterable[str], *, now: float) -> None:
        """A node said hello. `node`: new, or one that is known by its name; `holds`: ids it will answer."""
        gone = [old for old in self.nodes.values() if not old.connected and old.label == node.label]
        for old in [old for old in gone if old.name != node.name]:  # it was restarted and remembers nothing
            self.died(old.name, now=now)
        known = self.nodes.setdefault(node.name, node)
        known.connected, known.slots, known.capacity, known.heard = True, node.slots, node.capacity, now
        before, known.held = known.held, dict.fromkeys(holds)
        missing = [self.calls[call_id] for call_id in before if call_id in self.calls]
        self.requeue([call for call in missing if call.node is known and call.id not in known.held], now)
        for call_id in known.held:
            self.adopt(known, call_id)
        self.refresh(known)

    def adopt(self, node: Node, call_id: str) -> None:
        call = self.calls.get(call_id)
        if call is None:
            self.decisions.append(Withdraw(node, call_id))
        elif call.node is None:
            del self.queue[call_id]
            call.node = node
        elif call.node is not node:
            call.ghosts.append(node)

    def heard(self, name: str, *, now: float) -> None:
        self.nodes[name].heard = now

    def reported(self, name: str, *, slots: int, capacity: int, others: int) -> None:
        """The node's own view of its load; capacity 0: it is leaving."""
        node = self.nodes[name]
        node.slots, node.capacity, node.others = slots, capacity, others
        if capacity == 0:
            self.free_wanted(node)
        self.refresh(node)

    def disconnected(self, name: str, *, now: float) -> None:
        node = self.nodes.get(name)
        if node is not None and node.connected:
            node.connected = False
            node.heard = now
            self.refresh(node)

    def died(self, name: str, *, now: float) -> None:
        """It will not come back, or is not waited for any longer: its calls go elsewhere."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        node.connected = False
        self.free_wanted(node)
        self.refresh(node)
        lost = [self.calls[call_id] for call_id in node.held if call_id in self.calls]
        self.send_again([call for call in lost if call.node is node], f"node {node.label} was lost", now)

    def resumed(self, now: float) -> None:
        """We ourselves stood still until now: nobody was silent, we did not listen."""
        for node in self.nodes.values():
            node.heard = now

    def passed(self, now: float) -> None:
        """Time has passed: deadlines, silence, absence, rest."""
        self.expire(now)
        for node in list(self.nodes.values()):
            away = now - node.heard
            if node.connected and away > self.policy.silent_seconds:
                self.decisions.append(HangUp(node))
                self.died(node.name, now=now)
            elif not node.connected and away > self.policy.reconnect_seconds:
                self.died(node.name, now=now)
            elif node.rests_until and now >= node.rests_until:
                node.rests_until = 0.0
                self.refresh(node)

    # Decisions.

    def decide(self, now: float) -> list[Decision]:
        """All that is to be done now, in order. Ask again after more facts, and at `next_at`."""
        for node in list(self.wanting.values()):
            self.send_wanted(node)
        while self.queue and self.open and self.due_at() <= now:
            self.send_batch()
        decisions, self.decisions = self.decisions, []
        return decisions

    def next_at(self) -> float | None:
        """When `decide` has something to do although nothing happens; None: never. `passed` is not meant."""
        return self.due_at() if self.queue and self.open else None

    def due_at(self) -> float:
        if self.idle or len(self.queue) >= self.policy.batch_size:
            return 0.0
        return next(iter(self.queue.values())).arrived + self.policy.linger_seconds

    def send_batch(self) -> None:
        node = self.choose(next(iter(self.queue.values())).avoid)
        self.give(node, [self.queue.popitem(last=False)[1] for _ in range(self.batch_size(node))])

    def send_wanted(self, node: Node) -> None:
        while node.wanted and node.has_room():
            several = min(self.policy.batch_size, node.capacity - len(node.held), len(node.wanted))
            self.give(node, [node.wanted.pop(call_id) for call_id in list(node.wanted)[:several]])
        if not node.wanted:
            del self.wanting[node.name]

    def free_wanted(self, node: Node) -> None:
        """Whatever waits for this node may go anywhere."""
        self.queue.update(node.wanted)
        node.wanted.clear()
        self.wanting.pop(node.name, None)

    def give(self, node: Node, batch: Sequence[Call]) -> None:
        for call in batch:
            call.node = node
        node.held.update(dict.fromkeys([call.id for call in batch]))
        self.refresh(node)
        self.decisions.append(Send(node, batch))

    def batch_size(self, node: Node) -> int:
        """An even share of what waits, but an idle node's slots are filled, and a core's worth goes together."""
        share = -(-len(self.queue) // len(self.open))
        if self.idle:
            share = max(share, min(node.slots, -(-len(self.queue) // len(self.idle))))
        room = node.capacity - len(node.held)
        return min(self.policy.batch_size, room, len(self.queue), max(share, node.slots // CORES_SHARE))

    def choose(self, avoid: Node | None) -> Node:
        """`avoid` only where there is nobody else."""
        for node in self.idle.values():
            if node is not avoid:
                return node
        one, two = self.open.draw(self.rng), self.open.draw(self.rng)
        if one is avoid or two is avoid:
            one = two = next((node for node in self.open if node is not avoid), one)
        return one if one.load() <= two.load() else two

    # Inner workings.

    def refresh(self, node: Node) -> None:
        """Bring `open` and `idle` up to date after a change of this node."""
        has_room = node.has_room()
        if has_room:
            self.open.add(node)
        else:
            self.open.discard(node)
        if has_room and not node.held and not node.others:
            self.idle.setdefault(node.name, node)
        else:
            self.idle.pop(node.name, None)

    def count_fault(self, node: Node, fault: bool, now: float) -> None:
        node.faults = node.faults + 1 if fault else 0
        node.rests_until = now + self.policy.rest_seconds if node.faults >= REST_AFTER else 0.0

    def send_again(self, calls: Sequence[Call], reason: str, now: float) -> None:
        again = []
        for call in calls:
            if call.attempt >= self.policy.max_attempts:
                tries = f"the call was lost {call.attempt} times, at last because {reason}"
                self.close(call)
                self.decisions.append(GiveUp(call, overloaded=False, reason=tries))
            else:
                call.attempt += 1
                again.append(call)
        self.requeue(again, now)

    def requeue(self, calls: Sequence[Call], now: float) -> None:
        """To the front, the oldest first, with fresh patience: its wait was not its own fault. A call that an earlier
        node still runs stays there: no node is given the same call twice."""
        for call in reversed(sorted(calls, key=lambda call: call.arrived)):  # ties keep their order
            if call.node is not None and call.id in call.node.held:
                call.ghosts.append(call.node)
            call.node = next((node for node in call.ghosts if self.still_runs(node, call)), None)
            if call.node is not None:
                call.ghosts.remove(call.node)
                continue
            self.queue[call.id] = call
            self.queue.move_to_end(call.id, last=False)
            self.set_deadline(call, now)

    def still_runs(self, node: Node, call: Call) -> bool:
        return self.nodes.get(node.name) is node and call.id in node.held

    def close(self, call: Call) -> None:
        del self.calls[call.id]
        self.queue.pop(call.id, None)
        if call.wants and call.wants in self.wanting:
            self.wanting[call.wants].wanted.pop(call.id, None)
        holders = call.ghosts if call.node is None else [call.node, *call.ghosts]
        for node in holders:
            if node.connected and call.id in node.held:
                self.decisions.append(Withdraw(node, call.id))

    def set_deadline(self, call: Call, now: float) -> None:
        call.deadline = now + call.patience
        heappush(self.deadlines, (call.deadline, call.id))
        if len(self.deadlines) > max(MIN_HEAP, 4 * len(self.queue)):  # mostly calls that have left the queue long ago
            every = itertools.chain(self.queue.values(), *(node.wanted.values() for node in self.wanting.values()))
            self.deadlines = [(waiting.deadline, waiting.id) for waiting in every]
            heapify(self.deadlines)

    def expire(self, now: float) -> None:
        while self.deadlines and self.deadlines[0][0] <= now:
            at, call_id = heappop(self.deadlines)
            call = self.calls.get(call_id)
            if call is not None and call.node is None and call.deadline == at:
                self.close(call)
                late = f"no node took the call within {call.patience:g} seconds; {len(self.queue)} calls are waiting"
                self.decisions.append(GiveUp(call, overloaded=True, reason=late))
