"""What the scheduler knows of one engine: its trajectories (residents), how its cache will fill, how fast it is.

Residents advance together, so time is counted in steps of one token for each (on average, with those that wait for a
tool): one whose own tokens are x at step v holds x + (w - v) at a later step w, until it ends. So the cache at step w
is the sum of (x - v) over those still there, plus w times their number: two sums by the step of the end are the future.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

ENDS = 32  # steps of ends are told apart to this part of the longest response
PROMISED = 0.9  # share of the cache that the expected peak may fill
SPREAD = 2.0  # room kept for bad luck, as a multiple of the promise over the square root of the number of residents
FEW = 32  # residents; with no more of them an empty place costs more than an overflow
STEP_FEEDS = 128.0  # tokens that can be fed in the fixed time of a step: 156 for 14B on two MI300X
FEED_READS = 1000.0  # cached tokens that can be read in the time of feeding one (14B on two MI300X)
LEAST_ACTIVE = 0.05  # of the residents, at which more are no longer admitted for it
FORGET = 0.98  # of what was seen of an engine's pace, kept at each look


@dataclass(slots=True, eq=False)
class Resident:
    """A trajectory as the scheduler sees it."""

    asked: Ask
    """Its latest ask."""
    request_id: str = ""
    """Request id of the turn that waits or is worked on; empty while a tool runs."""
    engine: str | None = None
    response: int = 0
    """Tokens after the prompt when last known, replies included."""
    since: float = -1.0
    """Step of its engine at which its turn began; negative while none is worked on."""
    share: float = -1.0
    """It is assumed to end at this quantile of all lengths; negative until it is drawn."""
    end: float = 0.0
    """The length at which it is assumed to end."""
    reads: float = 0.0
    """Expected work: cached tokens to be read."""
    base: float = 0.0
    """Own tokens minus the engine's step count, since it was entered into the book."""
    slot: int = 0
    """Key of the slot in which its end is entered."""


class Book:
    """One engine: its residents, the forecast of its cache, its pace."""

    def __init__(self, name: str, load: EngineLoad) -> None:
        self.name = name
        self.residents: dict[str, Resident] = {}
        """By session id."""
        self.groups: Counter[str] = Counter()
        """Group -> number of its residents, who share one prompt in the cache."""
        self.fed = 0
        """Tokens that the engine was given to feed since the last look."""
        self.pace: tuple[float, float] | None = None
        """Seconds that its work took, and the work, counted in tokens fed; both fade. None: not seen at work."""
        self.last, self._seen_at = load, -1.0
        """What the engine said at the last look, and when."""
        self.step = self._rate = 0.0
        """Steps that the engine has taken, the tokens that each resident has gained; and steps a second of late."""
        self.active = 1.0
        """Share of the residents with a turn under way: the others wait for a tool, and their cache may be used."""
        self.reads = 0.0
        """Work of the residents that is still expected: cached tokens to be read."""
        self._prompts = 0
        """Tokens of the prompts, each once for a group."""
        self._slots: dict[int, tuple[float, float]] = {}
        """Step of the end // _width -> [number of residents, sum of their bases]."""
        self._width = 1.0
        self.overfull = False
        """More is expected than the cache can hold, even when all of it is used."""

    def look(self, load: EngineLoad, now: float) -> None:
        """Take in what the engine says; steps follow from the tokens it has produced since."""
        last, seconds = self.last, now - self._seen_at
        if seconds <= 0:
            return
        produced = max(0, load.produced_tokens - last.produced_tokens)  # a restarted engine counts from 0
        steps = produced / max(1, len(self.residents))
        self.step += steps
        self._rate = steps / seconds
        if produced and last.running and load.running:
            used, running = (last.used_tokens + load.used_tokens) / 2, (last.running + load.running) / 2
            again = load.recomputed_tokens - last.recomputed_tokens
            work = produced / running * (STEP_FEEDS + used / FEED_READS) + self.fed + again
            took, done = self.pace or (0.0, 0.0)
            self.pace, self.fed = (FORGET * took + seconds, FORGET * done + work), 0
        self.last, self._seen_at = load, now

    def add(self, resident: Resident) -> None:
        asked = resident.asked
        self.fed += asked.tokens - (asked.prompt_tokens if asked.group in self.groups else 0)
        self.residents[asked.session_id] = resident
        self._prompts += 0 if asked.group in self.groups else asked.prompt_tokens
        self.groups[asked.group] += 1
        self._enter(resident, resident.response)

    def remove(self, resident: Resident) -> None:
        asked = resident.asked
        del self.residents[asked.session_id]
        self.groups[asked.group] -= 1
        if not self.groups[asked.group]:
            del self.groups[asked.group]
            self._prompts -= asked.prompt_tokens
        self._withdraw(resident)
        self.overfull = self.overfull and self._is_overfull()

    def length_of(self, resident: Resident) -> float:
        """How long it is by now: what is known, and a token for each step since its turn began."""
        sampled = self.step - resident.since if resident.since >= 0.0 else 0.0
        return resident.response + min(max(0.0, sampled), resident.asked.limit)

    def forecast(self) -> None:
        """Enter all residents again as they are now."""
        self._slots, self.reads = {}, 0.0
        for resident in self.residents.values():
            self._enter(resident, self.length_of(resident))
        working = sum(bool(resident.request_id) for resident in self.residents.values())
        self.active = max(LEAST_ACTIVE, working / len(self.residents)) if self.residents else 1.0
        self.overfull = self._is_overfull()

    def _enter(self, resident: Resident, response: float) -> None:
        if not self._slots:
            self._width = max(1.0, (resident.asked.limit + resident.response) / ENDS)
        resident.base = response - self.step
        resident.slot = int((resident.end - resident.base) / self._width)
        here, bases = self._slots.get(resident.slot, (0.0, 0.0))
        self._slots[resident.slot] = (here + 1.0, bases + resident.base)
        self.reads += resident.reads

    def _withdraw(self, resident: Resident) -> None:
        self.reads -= resident.reads
        here, bases = self._slots.pop(resident.slot)
        if here > 1.5:
            self._slots[resident.slot] = (here - 1.0, bases - resident.base)

    def _is_overfull(self) -> bool:
        room = self.last.capacity_tokens / self.active - self._prompts
        return len(self.residents) > FEW and self._peak() > room

    def step_at(self, now: float) -> float:
        """Its count of steps at `now`, which is a little after the last look."""
        return self.step + self._rate * max(0.0, now - self._seen_at)

    def slowness(self) -> float:
        """Seconds for the work of feeding a token; of an engine that was not seen at work 1."""
        return self.pace[0] / self.pace[1] if self.pace else 1.0

    def finish(self) -> float:
        """Seconds until all expected work is done; comparable among engines."""
        return self.reads * self.slowness()

    def takes(self, resident: Resident) -> bool:
        """Whether the expected peak of the cache with `resident` stays within what is promised of it, or more pays."""
        asked, number = resident.asked, len(self.residents) + 1
        prompts = self._prompts + (0 if asked.group in self.groups else asked.prompt_tokens)
        capacity = self.last.capacity_tokens
        promised = capacity * PROMISED / (1.0 + SPREAD / math.sqrt(number)) / self.active - prompts
        self._enter(resident, resident.response)
        peak = self._peak()
        self._withdraw(resident)
        return peak <= promised or self._pays(resident, capacity / self.active - prompts)

    def _pays(self, resident: Resident, room: float) -> bool:
        """Whether its tokens until the cache is full save more of the steps' fixed time than it takes to feed all of
        them again then. A token saves one of n residents an n-th of a step's."""
        number = len(self.residents) + 1
        held = sum(bases for _, bases in self._slots.values()) + self.step * (number - 1) + resident.response
        steps = min((room - held) / number, resident.end - resident.response)
        own = resident.asked.tokens if resident.asked.group not in self.groups else resident.response
        return steps * STEP_FEEDS > (own + steps) * number

    def _peak(self) -> float:
        """Most own tokens that are expected to be held at any later step: just before the residents of a slot end."""
        width, step, slots = self._width, self.step, self._slots
        number = total = peak = 0.0
        for slot in sorted(slots, reverse=True):
            here, bases = slots[slot]
            number, total = number + here, total + bases
            peak = max(peak, total + number * max(step, (slot + 0.5) * width))
        return peak
