"""Whose turn it is: callers share the time of slots, not the number of calls, so one whose programs loop until their
limit takes no more from the others than one whose programs end at once.

The next call is the first of the caller who has had the least time. Source: fair queueing by virtual time (Goyal and
others, 1996), with the time that was really used in place of a call's expected length, which nobody knows.
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

MAX_CALLERS = 10_000  # then those who have nothing under way and owe nothing go


@dataclass(slots=True, eq=False)
class Caller:
    """A token, an address, or who started the daemon."""

    seconds: float
    """What it has had of the slots, up to `at`; that goes on while its programs and cells run."""
    at: float = 0.0
    running: int = 0
    calls: int = 0
    """Not answered."""

    def used(self, now: float) -> float:
        return self.seconds + self.running * (now - self.at)

    def run(self, change: int, now: float) -> None:
        """So many more of its calls run from now on."""
        self.seconds, self.at = self.used(now), now
        self.running += change


@dataclass(slots=True, eq=False)
class Queued:
    """A call in the daemon, from its arrival to its answer."""

    number: int
    """Its name on the connection."""
    order: int
    """Of its arrival."""
    caller: Caller
    call: Call
    size: int
    """Of its frame, bytes."""
    arrived: float = field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    moves: int = 0
    """How often it was given to a slot that could not start it."""
    run: RunningCall | None = None
    """Set while it runs."""
    timer: asyncio.TimerHandle | None = None
    """Of its patience, while it waits."""
    started: bool = False
    """Its turn has come."""
    answered: bool = False
    """It is over."""

    def __lt__(self, other: Queued) -> bool:
        return self.order < other.order


class Line:
    """The calls that wait for one pool or session; those that are answered are skipped."""

    def __init__(self) -> None:
        self._calls: dict[Caller, list[Queued]] = {}
        """Of each caller, a heap by arrival."""
        self._callers: list[tuple[float, int, Caller]] = []
        """A heap: no caller has used less than stands here. The number is a call's, so that no two are equal."""

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
        """Remove what `first` has just named."""
        heapq.heappop(self._calls[queued.caller])


class Callers:
    """The time that each has had."""

    def __init__(self) -> None:
        self._all: dict[int, Caller] = {}
        self.active = 0
        """Those with calls that are not answered."""
        self._least = 0.0
        """What the caller of the last call to start had used then: nobody saves up what he left to others."""

    def come(self, name: int) -> Caller:
        """The one of this name, of whom a call has just come."""
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
        """A call of it is answered."""
        caller.calls -= 1
        self.active -= not caller.calls

    def start(self, caller: Caller, now: float) -> None:
        """A call of it starts."""
        caller.run(1, now)
        self._least = max(self._least, caller.seconds)
