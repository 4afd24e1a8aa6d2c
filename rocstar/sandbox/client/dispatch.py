"""Decides which node a call goes to, and whether it is sent again: facts in, decisions out. No clock, no socket.

Invariant: a submitted entry is held by one node or waits here, until it leaves exactly once: by `answered`, `cancel`
or GiveUp. Only the node that holds an entry can answer it, so no call is answered twice.

A call goes to the less loaded of two nodes drawn at random; a cell goes to the node that has its session. Only this
module sends a call again: a plain call whose node was lost, or answered INTERNAL, up to MAX_ATTEMPTS in all, to another
node if there is one; a call that a node had no room for, until its patience is over.

    node A has c1 and a cell of session s, and ends     c1 waits, attempt 2, then goes to node B; the cell is given up
    node A answers c1 OVERLOADED                         c1 goes to node B at once, to A after A's pause or next answer
    the same, c1 does not wait for room, B pauses too    c1 is overloaded, and the next such call goes to A or B
    node A answers the first cell of s OVERLOADED        the cell waits, then goes to any node; A does not pause
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from rocstar.sandbox.call import Call, Response, SandboxDown, ServiceOutcome, SessionLost, failed

MAX_ATTEMPTS = 2
FIRST_PAUSE = 0.05  # seconds a node pauses after a failure; doubles with each further failure
MAX_PAUSE = 5.0
CALM_SECONDS = 10.0  # a node without failure for this long after its pause starts over with the first pause
CELL_PAUSE = 0.5  # seconds before a node without room for a cell is tried again: sessions end seldom
EARLY = 0.01  # seconds by which a node's clock may end a call's patience too early, which is not a full queue
SCAN_SECONDS = 0.25  # between two searches for waiting calls whose patience is over
MAX_HOMES = 100_000  # sessions whose node is remembered; the least recently used one is forgotten first


@dataclass(slots=True, eq=False)
class NodeFacts:
    """The known facts about one node."""

    label: str  # its name in messages
    tries: int = 1  # failed starts in a row after which calls no longer wait for it
    slots: int = 1  # programs it runs at once: its share of the load
    up: bool = False  # it said hello and is connected
    opening: bool = False  # it was asked to connect, and has neither said hello nor failed
    paused_until: float = 0.0  # until then no plain call is sent to it, and it is not opened
    pauses: int = 0  # pauses in a row
    failed_starts: int = 0  # since it was last up
    starts: int = 0  # how often it came up
    problem: str = ""  # why it is not up
    held: dict[int, Any] = field(default_factory=dict)  # entries sent to it and unanswered, by number


N = TypeVar("N", bound=NodeFacts)


@dataclass(slots=True, eq=False)
class Entry(Generic[N]):
    """One unanswered call."""

    number: int
    call: Call
    future: Any = None  # awaited by its caller
    again: bool = True  # whether a plain call is sent once more when it is lost
    waits: bool = True  # whether it waits for room; else it is overloaded once a node is and all others are full
    attempt: int = 1
    deadline: float = 0.0  # the end of its patience
    not_before: float = 0.0  # a cell that found no room is not sent again before this time
    avoid: N | None = None  # the node that failed it, used only if there is no other


class Send(NamedTuple):
    """Send the entry to this node, which holds it from now on."""

    entry: Any
    node: Any


class GiveUp(NamedTuple):
    """Answer the entry's caller with this response, or raise this error there."""

    entry: Any
    answer: Response | SandboxDown


class Open(NamedTuple):
    """Connect this node; then report `came_up` or `died`."""

    node: Any


Decision = Send | GiveUp | Open


class Dispatch(Generic[N]):
    """Report facts, then carry out the decisions of `decide`; call it again at `next_at`. Times: monotonic seconds."""

    def __init__(self, random: Callable[[], float]) -> None:
        """random: draws from [0, 1)."""
        self.nodes: list[N] = []
        self.waiting: dict[int, Entry[N]] = {}
        self._random = random
        self._homes: dict[str, N] = {}
        self._ready: list[N] = []  # up and not paused: plain calls may go there
        self._with_room: list[N] = []
        self._ended: list[Decision] = []
        self._scan_at = 0.0

    # Facts about calls.

    def submit(self, entry: Entry[N], now: float) -> N | None:
        """The node to send the entry to now; None: it waits, see `decide`."""
        entry.deadline = now + entry.call.patience_seconds
        return self._place(entry, now)

    def answered(self, node: N, number: int) -> Entry[N] | None:
        """The entry that this answers; None if this node does not hold it."""
        entry: Entry[N] | None = node.held.pop(number, None)
        return entry

    def failed(self, node: N, entry: Entry[N], now: float, *, overloaded: bool) -> bool:
        """The node answered this entry with a failure of the service. True: the call is sent again, so its caller is
        not answered yet."""
        if overloaded:
            if entry.call.cell == 1:  # any node may start its session
                self._homes.pop(entry.call.session, None)
            if now >= entry.deadline - EARLY:
                return False
            if not entry.call.session:
                self._pause(node, now)
            if not (entry.waits or self._ready):
                return False
            entry.avoid, entry.not_before = node, now + CELL_PAUSE
            self.waiting[entry.number] = entry
            return True
        return not entry.call.session and self._sends_again(node, entry, now)

    def has_room(self, node: N, now: float) -> bool:
        """The node answered a call, so it gets one more despite its pause, which ends if no call waits. Returns whether
        one waits."""
        if node in self._ready or not node.up:
            return False
        if self.waiting:
            self._with_room.append(node)
        else:
            node.paused_until = now
            self._refresh(node, now)
        return bool(self.waiting)

    def cancel(self, entry: Entry[N]) -> N | None:
        """Forget an entry. Returns the node that holds it, if one does."""
        self.waiting.pop(entry.number, None)
        return next((node for node in self.nodes if node.held.pop(entry.number, None)), None)

    def forget(self, session: str) -> N | None:
        """The session has ended or is lost. Returns the node that had it."""
        return self._homes.pop(session, None)

    # Facts about nodes.

    def came_up(self, node: N, slots: int, now: float) -> None:
        node.up, node.opening, node.slots, node.failed_starts = True, False, max(1, slots), 0
        node.starts += 1
        self._refresh(node, now)

    def died(self, node: N, problem: str, now: float) -> None:
        """The node ended, or could not be connected. Its plain calls are tried once more; its sessions are lost."""
        node.failed_starts += not node.up
        node.up, node.opening, node.problem = False, False, problem
        self._pause(node, now)
        self._refresh(node, now)
        self._homes = {session: home for session, home in self._homes.items() if home is not node}
        entries, node.held = list(node.held.values()), {}
        for entry in entries:
            if entry.call.session:
                self._ended.append(GiveUp(entry, SessionLost(problem)))
            elif not self._sends_again(node, entry, now):
                self._ended.append(GiveUp(entry, SandboxDown(problem)))

    # Decisions.

    def decide(self, now: float) -> list[Decision]:
        """All decisions that are due now."""
        decisions: list[Decision] = []
        for node in self.nodes:
            self._refresh(node, now)
            if now >= node.paused_until and not node.up and not node.opening:
                node.opening = True
                decisions.append(Open(node))
        scan = now >= self._scan_at
        if self._ready or scan:
            sends = [Send(entry, self._place(entry, now)) for entry in list(self.waiting.values())]
            decisions += [send for send in sends if send.node is not None]
        for node in self._with_room:
            entry = next((entry for entry in self.waiting.values() if not entry.call.session), None)
            if node.up and entry is not None:
                node.held[entry.number] = self.waiting.pop(entry.number)
                decisions.append(Send(entry, node))
        self._with_room.clear()
        if scan and self.waiting:
            self._scan_at = now + SCAN_SECONDS
            for entry in [entry for entry in self.waiting.values() if now >= entry.deadline]:
                problem = f"no sandbox took the call within {entry.call.patience_seconds:g} seconds"
                self._end(entry, failed(entry.call.id, ServiceOutcome.OVERLOADED, problem))
        if not any(node.up or node.failed_starts < node.tries for node in self.nodes):
            problem = "; ".join(node.problem for node in self.nodes) or "there is no sandbox node"
            for entry in [*self.waiting.values()]:
                self._end(entry, SandboxDown(problem))
        decisions += self._ended
        self._ended = []
        return decisions

    def next_at(self) -> float | None:
        """When to call `decide` again if no fact is reported earlier; None: never."""
        times = [node.paused_until for node in self.nodes if node not in self._ready and not node.opening]
        return min([*times, self._scan_at] if self.waiting else times, default=None)

    def _place(self, entry: Entry[N], now: float) -> N | None:
        # A call that does not wait is sent even to a full node, which may have room for its caller.
        ready = self._ready if self._ready or entry.waits else [node for node in self.nodes if node.up]
        node = self._home_of(entry, now) if entry.call.session else self._choose(ready, entry)
        if node is None:
            self.waiting[entry.number] = entry
            return None
        self.waiting.pop(entry.number, None)
        node.held[entry.number] = entry
        return node

    def _choose(self, nodes: list[N], entry: Entry[N]) -> N | None:
        if len(nodes) < 2:
            return nodes[0] if nodes else None
        first = int(self._random() * len(nodes))
        second = int(self._random() * (len(nodes) - 1))
        one, other = nodes[first], nodes[second + (second >= first)]
        if one is entry.avoid or other is entry.avoid:
            return other if one is entry.avoid else one
        return one if len(one.held) * other.slots <= len(other.held) * one.slots else other

    def _home_of(self, entry: Entry[N], now: float) -> N | None:
        """A session stays with its node while that is up, paused or not. A cell whose session has no known node goes to
        any node: a node that does not have the session answers LOST."""
        if now < entry.not_before:
            return None
        name, branches = entry.call.session, entry.call.branches
        home = self._homes.pop(name, None) or self._choose([node for node in self.nodes if node.up], entry)
        if home is not None:
            self._homes |= dict.fromkeys((name, *branches), home)  # at the end: the least recently used come first
            while len(self._homes) > MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        return home

    def _sends_again(self, node: N, entry: Entry[N], now: float) -> bool:
        """Whether the call is sent again; its patience then restarts, because the service lost it."""
        if not entry.again or entry.attempt >= MAX_ATTEMPTS:
            return False
        entry.attempt += 1
        entry.avoid, entry.deadline = node, now + entry.call.patience_seconds
        self.waiting[entry.number] = entry
        return True

    def _end(self, entry: Entry[N], answer: Response | SandboxDown) -> None:
        del self.waiting[entry.number]
        self._ended.append(GiveUp(entry, answer))

    def _pause(self, node: N, now: float) -> None:
        """Start a pause. Failures during a pause answer calls that were sent before it, so they start no other."""
        if now >= node.paused_until:
            node.pauses = 0 if now - node.paused_until > CALM_SECONDS else min(10, node.pauses)
            node.paused_until = now + min(MAX_PAUSE, FIRST_PAUSE * float(2**node.pauses))
            node.pauses += 1
            self._refresh(node, now)

    def _refresh(self, node: N, now: float) -> None:
        ready = node.up and now >= node.paused_until
        if ready and node not in self._ready:
            self._ready.append(node)
        elif not ready and node in self._ready:
            self._ready.remove(node)
