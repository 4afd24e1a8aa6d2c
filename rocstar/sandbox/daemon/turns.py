"""The order of calls: callers share the time of slots, not the number of calls, so a caller whose programs loop until
their limit takes no more from the others than one whose programs end at once.

The next call is the first of the caller who has used the least time. Source: fair queueing by virtual time (Goyal and
others, 1996), with the time actually used in place of a call's expected length, which is unknown.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocstar.sandbox.call import Call

if TYPE_CHECKING:
    from rocstar.sandbox.daemon.worker import RunningCall

MAX_CALLERS = 10_000  # above it, callers without calls and without an excess of used time are forgotten


@dataclass(slots=True, eq=False)
class Caller:
    """A token, an address, or the process that started the daemon."""

    seconds: float
    """Slot time that its calls had used at the time `at`; grows while its programs and cells run."""
    at: float = 0.0
    running: int = 0
    calls: int = 0
    """Unanswered calls."""

    def used(self, now: float) -> float:
        return self.seconds + self.running * (now - self.at)

    def change_running(self, change: int, now: float) -> None:
        """From now on `change` more of its calls run."""
        self.seconds, self.at = self.used(now), now
        self.running += change


@dataclass(slots=True, eq=False)
class Queued:
    """A call in the daemon, from its arrival to its answer."""

    number: int
    """Its number on the connection."""
    order: int
    """Position by arrival."""
    caller: Caller
    call: Call
    size: int
    """Size of its frame, bytes."""
    arrived: float = field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    moves: int = 0
    """How often a slot received it and could not start it."""
    run: RunningCall | None = None
    """Set while it runs."""
    timer: asyncio.TimerHandle | None = None
    """Ends its patience, while it waits."""
    answered: bool = False
    """Its response has been sent."""

    def __lt__(self, other: Queued) -> bool:
        return self.order < other.order


class Line:
    """The calls that wait for one pool or session; answered ones are skipped."""

    def __init__(self) -> None:
        self._calls: dict[Caller, list[Queued]] = {}
        """The calls of each caller: a heap by arrival."""
        self._callers: list[tuple[float, int, Caller]] = []
        """A heap of (lower bound of the caller's used time, order of one of its calls to break ties, caller)."""

    def __iter__(self) -> Iterator[Queued]:
        for calls in self._calls.values():
            yield from calls

    def push(self, queued: Queued) -> None:
        caller = queued.caller
        if caller not in self._calls:
            self._calls[caller] = []
            heapq.heappush(self._callers, (caller.seconds, queued.order, caller))
        heapq.heappush(self._calls[caller], queued)

    def first(self, now: float) -> Queued | None:
        """The next call; None when nothing waits."""
        while self._callers:
            least, order, caller = self._callers[0]
            calls = self._calls[caller]
            while calls and calls[0].answered:
                heapq.heappop(calls)
            if not calls:
                del self._calls[caller]
                heapq.heappop(self._callers)
            elif caller.used(now) > least:
                heapq.heapreplace(self._callers, (caller.used(now), order, caller))
            else:
                return calls[0]
        return None

    def take(self, queued: Queued) -> None:
        """Remove the call that `first` has just returned."""
        heapq.heappop(self._calls[queued.caller])


class Callers:
    """All callers and the slot time that each has used."""

    def __init__(self) -> None:
        self._all: dict[int, Caller] = {}
        self.active = 0
        """Callers with unanswered calls."""
        self._least = 0.0
        """Used time of the last started call's caller. A returning caller starts with it: idling gives no priority."""

    def come(self, name: int) -> Caller:
        """Count a new call of the caller with this number, and return that caller."""
        if len(self._all) >= MAX_CALLERS:
            kept = {other: each for other, each in self._all.items() if each.calls or each.seconds > self._least}
            self._all = kept
        caller = self._all.setdefault(name, Caller(self._least))
        if not caller.calls:
            caller.seconds = max(caller.seconds, self._least)
            self.active += 1
        caller.calls += 1
        return caller

    def leave(self, caller: Caller) -> None:
        """A call of this caller is answered."""
        caller.calls -= 1
        self.active -= not caller.calls

    def start(self, caller: Caller, now: float) -> None:
        """A call of this caller starts."""
        caller.change_running(1, now)
        self._least = max(self._least, caller.seconds)
