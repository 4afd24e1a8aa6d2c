"""What the router decides about: its policy, nodes, calls, and the four things it can decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    batch_size: int = 64
    """Calls sent to a node together at most. Source: rStar2-Agent §3.1."""
    linger_seconds: float = 0.002
    """How long the oldest call waits for a batch to fill while no node is idle, seconds."""
    max_queue: int = 200_000
    """Calls waiting at once; beyond it a caller is told so at once."""
    max_attempts: int = 3
    """Times a call is sent to a node; what kills three nodes is probably the call."""
    silent_seconds: float = 3.0
    """A node that has sent nothing for so long is taken for frozen, seconds."""
    reconnect_seconds: float = 1.0
    """How long a node may be away before its calls go elsewhere, seconds."""
    rest_seconds: float = 1.0
    """How long a node that only fails gets no calls, seconds."""


@dataclass(slots=True, eq=False)
class Node:
    name: str
    """Unique to one process: a restarted one has another."""
    label: str
    """What people call it; stays over restarts."""
    slots: int
    """Programs it runs at once."""
    capacity: int
    """Calls it takes from us at once, those waiting there included."""
    heard: float
    """When the last bytes came, monotonic seconds; when it went away, while it is not connected."""
    connected: bool = True
    held: dict[str, None] = field(default_factory=dict)
    """Ids sent to it and not answered, in the order sent; what others now run too is among them."""
    wanted: dict[str, Call] = field(default_factory=dict)
    """Calls that wait for this very node, in their order."""
    others: int = 0
    """Calls it holds for other routers, by its last report."""
    faults: int = 0
    """Faults in a row."""
    rests_until: float = 0.0

    def has_room(self) -> bool:
        """For another call, now."""
        return self.connected and not self.rests_until and len(self.held) < self.capacity

    def load(self) -> float:
        return (len(self.held) + self.others) / max(1, self.slots)


@dataclass(slots=True, eq=False)
class Call:
    id: str
    arrived: float
    """Monotonic seconds."""
    patience: float
    """How long it may wait in the queue, seconds."""
    wants: str = ""
    """Name of the node it is for while that lives; afterwards any will do. Empty: any will do."""
    attempt: int = 1
    node: Node | None = None
    """Who is to answer it; None while it waits."""
    deadline: float = 0.0
    avoid: Node | None = None
    """Whose fault sent it back."""
    ghosts: list[Node] = field(default_factory=list)
    """Nodes that may still run it although it was given to another."""


@dataclass(frozen=True, slots=True)
class Send:
    node: Node
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for this result any more; the node still answers, with anything."""

    node: Node
    call_id: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The call is over and has no result."""

    call: Call
    overloaded: bool
    """It waited too long; otherwise we lost it too often."""
    reason: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection of a node that went silent."""

    node: Node


Decision = Send | Withdraw | GiveUp | HangUp
