"""Finding and killing what a cell has started, by process numbers alone: a slot has no /proc to look into.

The kernel gives numbers in order, so whatever was started since the last sweep has one between that sweep's last number
and the newest. Where they may have begun anew, all numbers are looked at. Not covered: that with more than MOST_NUMBERS
of them, where the slot ends; and, where signals could hit strangers, processes that have left their cell's group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable

from rocstar.sandbox.jail import Jail, Signals, kill_children
from rocstar.sandbox.session_processes import killed_now, newest_pid

SWEEP_SECONDS = 2.0  # for what was killed to be dead; hostile forks can be born faster than they are found
SWEEP_PAUSE = 0.0001
LOOK_SECONDS = 0.1  # between looks at the numbers while a cell runs
NUMBERS_PER_SECOND = 100_000  # more than are given out: two cores that only made and joined threads came to 38,000
MOST_NUMBERS = 2**17  # to look at one by one


class Sweeper:
    """`last`: the newest number there was when all was known to be dead; `seen`: the newest of all, `seen_at` by the
    monotonic clock; `anew`: numbers may have begun anew since the cell began."""

    def __init__(self, jail: Jail) -> None:
        self.jail = jail
        self.may_sweep = jail.may_age or jail.inside.signals == Signals.SCOPED  # else it could hit strangers
        self.last = newest_pid()
        self.begin()

    def begin(self) -> None:
        """Before a cell, while all is dead or stopped: others may have used up all numbers since the last one."""
        if not self.jail.inside.private_processes:
            self.last = newest_pid()
        self.seen, self.seen_at, self.anew = self.last, time.monotonic(), False

    def look(self) -> int:
        """The newest number. To be called so often that they cannot begin anew twice in between."""
        newest, now = newest_pid(), time.monotonic()
        too_late = (now - self.seen_at) * NUMBERS_PER_SECOND >= self.jail.max_pid
        self.anew = self.anew or newest < self.seen or too_late
        self.seen, self.seen_at = newest, now
        return newest

    def look_now_and_then(self) -> None:
        if time.monotonic() >= self.seen_at + LOOK_SECONDS:
            self.look()

    def sweep(self, kept: Container[int], running: int, collect: Callable[[], None]) -> bool:
        """Kill everything but `kept`, of which `running` is the new state, or 0. False when it is not certain that all
        of it is dead. `collect`: waits for children that have died."""
        if not self.may_sweep:  # then what stayed in the cell's group is only stopped
            kill_children(self.jail.children, kept)
            return True
        if self.nothing_was_started(running):
            collect()
            return True
        return self.look_until_quiet(kept, collect)

    def nothing_was_started(self, running: int) -> bool:
        """Whether numbers alone tell that there is nothing to be found, in a namespace of one's own. Three were given
        since the last sweep: the first is dead by now, the second is the new state, which is stopped, and the third was
        just asked for. So nobody is left who could start anything."""
        first = self.last + 1
        if not self.jail.inside.private_processes or running != first + 1 or killed_now(first):
            return False
        newest = self.look()
        if newest != running + 1 or self.anew:
            return False
        self.last = newest
        return True

    def look_until_quiet(self, kept: Container[int], collect: Callable[[], None]) -> bool:
        before, quiet = 0, False
        deadline = time.monotonic() + SWEEP_SECONDS
        while time.monotonic() < deadline:
            newest = self.look()
            if self.anew and self.jail.max_pid > MOST_NUMBERS:
                return False
            numbers = range(2, self.jail.max_pid + 1) if self.anew else range(self.last + 1, newest)
            found = self.kill_all(numbers, kept, collect)
            # In a namespace of one's own it is enough that nothing was born while nothing was seen alive. Where others'
            # births move the numbers, two looks in a row have to find nothing.
            if quiet and (newest == before + 1 if self.jail.inside.private_processes else not found):
                self.last = newest
                return True
            quiet, before = not found, newest
            if found:
                time.sleep(SWEEP_PAUSE)  # the dying need it more
        return False

    def kill_all(self, numbers: Iterable[int], kept: Container[int], collect: Callable[[], None]) -> bool:
        """Kill by number, and then what came to the slot because its parent died between two looks; whether there was
        anything."""
        ours = os.getpid()
        found = [pid for pid in numbers if pid not in kept and pid != ours and killed_now(pid)]
        collect()
        orphans = kill_children(self.jail.children, kept)
        return bool(found) or orphans
