"""Which node a call goes to, and whether it is sent again: facts in, decisions out. No clock, no socket, no node.

Invariant: an entry that was submitted is with one node or waits here, until it leaves exactly once, by `answered`, by
`cancel` or by a GiveUp. Only the node that holds an entry can answer it, so no call is answered twice.

A call goes to the less loaded of two nodes drawn at random; a cell goes to the node that has its session. This is the
only place that sends a call again: a plain one whose node was lost, or answered INTERNAL, up to MAX_ATTEMPTS in all,
elsewhere if there is another node; one that a node had no room for, until its patience is over.

    node A has c1 and a cell of session s, and dies     c1 waits, attempt 2, then goes to node B; the cell is given up
    node A says OVERLOADED to c1                         c1 goes to node B at once, to A only after A's rest
    node A says OVERLOADED to the first cell of s        the cell waits, then goes anywhere; A does not rest
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

MAX_ATTEMPTS = 2
FIRST_PAUSE = 0.05  # seconds; doubles with each failure
MAX_PAUSE = 5.0
CELL_PAUSE = 0.5  # seconds before a node without room for a cell is asked again: sessions end seldom
CALM_SECONDS = 10.0  # a node that did not fail for so long after its rest starts over with the first pause
SCAN_SECONDS = 0.25  # how often waiting calls are looked through for those whose time has come
MAX_HOMES = 100_000  # sessions whose node is remembered; the one not used for longest is forgotten first


@dataclass(slots=True, eq=False)
class NodeFacts:
    """What is known of one node."""

    label: str
    """How messages call it."""
    tries: int = 1
    """Failed starts in a row after which calls no longer wait for it."""
    slots: int = 1
    """Programs it runs at once: its share of the load."""
    up: bool = False
    """It said hello and is connected."""
    opening: bool = False
    """It was asked to connect, and has neither said hello nor failed."""
    rests_until: float = 0.0
    """No plain call is sent to it, and it is not opened, before."""
    pauses: int = 0
    """Rests in a row."""
    failed_starts: int = 0
    """Since it was last up."""
    problem: str = ""
    """Why it is not up."""
    held: dict[int, Any] = field(default_factory=dict)
    """Entries sent to it and not answered, by number."""


N = TypeVar("N", bound=NodeFacts)


@dataclass(slots=True, eq=False)
class Entry(Generic[N]):
    """One call on its way."""

    number: int
    patience: float
    """How long it may wait until a node takes it, seconds."""
    session: str = ""
    first: bool = False
    """It may start its session, so any node will do while none has it."""
    again: bool = True
    """Whether a plain call is sent once more when it is lost."""
    attempt: int = 1
    deadline: float = 0.0
    """When its patience is over."""
    not_before: float = 0.0
    """A cell that found no room is not sent before."""
    avoid: N | None = None
    """The node that failed it, taken only where there is no other."""


class Send(NamedTuple):
    """Send it to this node, which holds it from now on."""

    entry: Any
    node: Any


class GiveUp(NamedTuple):
    """Tell its caller. `lost`: its session is gone; `late`: no node took it within its patience."""

    entry: Any
    reason: str
    lost: bool = False
    late: bool = False


class Open(NamedTuple):
    """Connect this node; `came_up` or `died` is the answer."""

    node: Any


Decision = Send | GiveUp | Open


class Dispatch(Generic[N]):
    """Report facts, then carry out `decide`; ask it again at `next_at`. Times are monotonic seconds.

    random: draws from [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self.nodes: list[N] = []
        self.waiting: dict[int, Entry[N]] = {}
        self.homes: dict[str, N] = {}
        self._random = random
        self._rested: list[N] = []  # up, and not at rest: plain calls may go there
        self._given_up: list[GiveUp] = []
        self._scan_at = 0.0

    # Facts about calls.

    def submit(self, entry: Entry[N], now: float) -> N | None:
        """The node to send it to now; None: it waits, see `decide`."""
        entry.deadline = now + entry.patience
        return self._place(entry, now)

    def answered(self, node: N, number: int) -> Entry[N] | None:
        """The entry that this is the answer to; None: nobody waits for it, or not for this node's answer."""
        entry: Entry[N] | None = node.held.pop(number, None)
        return entry

    def failed(self, node: N, entry: Entry[N], now: float, *, overloaded: bool) -> bool:
        """The answer that `answered` just gave is a failure of the service. True: it is not given to the caller,
        because the call is sent again."""
        if overloaded:
            return self._found_no_room(node, entry, now)
        if entry.session or not entry.again or entry.attempt >= MAX_ATTEMPTS:
            return False
        self._again(node, entry, now)
        return True

    def cancel(self, entry: Entry[N]) -> N | None:
        """Forget it. The node that holds it, if one does."""
        self.waiting.pop(entry.number, None)
        holder = next((node for node in self.nodes if node.held.get(entry.number) is entry), None)
        if holder is not None:
            del holder.held[entry.number]
        return holder

    def forget(self, session: str) -> N | None:
        """The session has ended or is lost. The node that had it."""
        return self.homes.pop(session, None)

    # Facts about nodes.

    def add(self, node: N) -> None:
        self.nodes.append(node)

    def remove(self, node: N, now: float) -> None:
        """It is not used any longer; what it holds is lost with it."""
        if node in self.nodes:
            self.died(node, f"{node.label} was removed", now)
            self.nodes.remove(node)

    def came_up(self, node: N, slots: int, now: float) -> None:
        node.up, node.opening, node.slots, node.failed_starts, node.problem = True, False, max(1, slots), 0, ""
        self._refresh(node, now)

    def died(self, node: N, problem: str, now: float) -> None:
        """It ended, or could not be connected. Its plain calls are tried once more; its sessions are lost."""
        if not node.up:
            node.failed_starts += 1
        node.up = node.opening = False
        node.problem = problem
        self._rest(node, now)
        self.homes = {session: home for session, home in self.homes.items() if home is not node}
        entries, node.held = list(node.held.values()), {}
        for entry in entries:
            if entry.session:
                self._given_up.append(GiveUp(entry, problem, lost=True))
            elif entry.again and entry.attempt < MAX_ATTEMPTS:
                self._again(node, entry, now)
            else:
                self._given_up.append(GiveUp(entry, problem))

    # Decisions.

    def decide(self, now: float) -> list[Decision]:
        """All that is to be done now."""
        decisions: list[Decision] = []
        for node in self.nodes:
            if now >= node.rests_until and not node.up and not node.opening:
                node.opening = True
                decisions.append(Open(node))
            elif node.up and node not in self._rested:
                self._refresh(node, now)
        scan = now >= self._scan_at
        if self.waiting and (self._rested or scan):
            decisions += self._sends(now)
        if self.waiting and scan:
            self._scan_at = now + SCAN_SECONDS
            self._expire(now)
        if self.waiting and not any(self._hoped_for(node) for node in self.nodes):
            self._despair()
        decisions += self._given_up
        self._given_up = []
        return decisions

    def next_at(self) -> float | None:
        """When `decide` has something to do although nothing happens; None: never."""
        times = [node.rests_until for node in self.nodes if node not in self._rested and not node.opening]
        if self.waiting:
            times.append(self._scan_at)
        return min(times, default=None)

    def _sends(self, now: float) -> list[Decision]:
        sends: list[Decision] = []
        for entry in list(self.waiting.values()):
            if (node := self._place(entry, now)) is not None:
                sends.append(Send(entry, node))
        return sends

    def _place(self, entry: Entry[N], now: float) -> N | None:
        node = self._choose_home(entry, now) if entry.session else self._choose(self._rested, entry)
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
        if one is entry.avoid:
            return other
        if other is entry.avoid:
            return one
        return one if len(one.held) * other.slots <= len(other.held) * one.slots else other

    def _choose_home(self, entry: Entry[N], now: float) -> N | None:
        """A session's node is not changed while it is up, at rest or not. A cell of a session that no node is known
        to have goes anywhere: a node that does not have it says so."""
        if now < entry.not_before:
            return None
        home = self.homes.pop(entry.session, None)
        if home is None:
            home = self._choose([node for node in self.nodes if node.up], entry)
        if home is not None:
            self.homes[entry.session] = home  # as the last: those used least come first
            if len(self.homes) > MAX_HOMES:
                del self.homes[next(iter(self.homes))]
        return home

    def _found_no_room(self, node: N, entry: Entry[N], now: float) -> bool:
        if not entry.session:
            self._rest(node, now)
        elif entry.first:
            self.homes.pop(entry.session, None)
        if now >= entry.deadline:
            return False
        entry.avoid, entry.not_before = node, now + CELL_PAUSE
        self.waiting[entry.number] = entry
        return True

    def _again(self, node: N, entry: Entry[N], now: float) -> None:
        """Its wait starts anew: the loss was not its own fault."""
        entry.attempt += 1
        entry.avoid = node
        entry.deadline = now + entry.patience
        self.waiting[entry.number] = entry

    def _rest(self, node: N, now: float) -> None:
        """Failures while it rests are answers to what was sent before, and count as one."""
        if now < node.rests_until:
            return
        if now - node.rests_until > CALM_SECONDS:
            node.pauses = 0
        node.rests_until = now + min(MAX_PAUSE, FIRST_PAUSE * float(2**node.pauses))
        node.pauses = min(10, node.pauses + 1)
        self._refresh(node, now)

    def _refresh(self, node: N, now: float) -> None:
        rested = node.up and now >= node.rests_until
        if rested and node not in self._rested:
            self._rested.append(node)
        elif not rested and node in self._rested:
            self._rested.remove(node)

    def _hoped_for(self, node: N) -> bool:
        return node.up or node.failed_starts < node.tries

    def _expire(self, now: float) -> None:
        for entry in [entry for entry in self.waiting.values() if now >= entry.deadline]:
            del self.waiting[entry.number]
            reason = f"no sandbox took the call within {entry.patience:g} seconds"
            self._given_up.append(GiveUp(entry, reason, late=True))

    def _despair(self) -> None:
        reason = "; ".join(node.problem for node in self.nodes) or "there is no sandbox node"
        self._given_up += [GiveUp(entry, reason) for entry in self.waiting.values()]
        self.waiting.clear()
