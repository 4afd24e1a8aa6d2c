"""What the scheduler knows of one engine: who is there, how its cache will fill, how fast it is.

Residents advance together, so everything is told in steps, one token for each resident, those that wait for a tool
included on average: a resident whose own tokens are now x, at step v, holds x + (w - v) at a later step w, until it
ends. So the cache at step w is the sum of (x - v) over those still there, plus w times their number, and the whole
future is two sums by the step of the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

ENDS = 32  # steps of ends are told apart to this part of the longest response
FIRST_TARGET = 0.85  # of the cache, filled before anything is known of lengths
MOST_TARGET = 0.9  # later: what is expected is a little off, and overflow costs more than a tenth left free
LEAST_TARGET = 0.6  # however often it evicts
FORGET = 0.98  # of what was seen of an engine's pace, kept at each look


@dataclass(slots=True, eq=False)
class Resident:
    """A trajectory as the scheduler sees it."""

    session_id: str
    group: str
    prompt: int
    asked: Ask
    """Its latest."""
    most: int
    """Longest response it may come to, tokens."""
    kin: Any = None
    """What its length is expected from."""
    request_id: str = ""
    """Of the turn that waits or is worked on; empty while a tool runs."""
    engine: str | None = None
    response: int = 0
    """Tokens after the prompt when last known, replies included."""
    since: float = -1.0
    """Step of its engine at which its turn began; negative while none is worked on."""
    share: float = 0.0
    """It is assumed to end at the length that this share of its like do not pass."""
    end: float = 0.0
    """That length."""
    reads: float = 0.0
    """Expected work: cached tokens to be read."""
    base: float = 0.0
    """Own tokens minus the engine's step count, since it was entered into the book."""
    slot: int = 0
    """Where its end is entered."""


@dataclass(slots=True, eq=False)
class Paces:
    """Seconds of a step by the use of the cache, over all engines: a straight line by least squares."""

    weight: float = 0.0
    used: float = 0.0
    seconds: float = 0.0
    used_used: float = 0.0
    used_seconds: float = 0.0

    def expected(self, used: float, seconds: float, steps: float) -> float:
        """Enter `steps` steps seen at a use of `used` tokens; the seconds that an average engine takes for them."""
        each = seconds / steps
        self.weight += steps
        self.used += steps * used
        self.seconds += steps * each
        self.used_used += steps * used * used
        self.used_seconds += steps * used * each
        mean_used, mean = self.used / self.weight, self.seconds / self.weight
        spread = self.used_used / self.weight - mean_used * mean_used
        slope = (self.used_seconds / self.weight - mean_used * mean) / spread if spread > 1.0 else 0.0
        return steps * max(mean / 10, mean + max(0.0, slope) * (used - mean_used))


class Book:
    """One engine's residents and forecast."""

    def __init__(self, name: str, load: EngineLoad, paces: Paces) -> None:
        self.name, self.capacity, self.target = name, load.capacity_tokens, FIRST_TARGET
        self.residents: dict[str, Resident] = {}
        self.groups: dict[str, int] = {}
        """Residents by group: the prompt is held once."""
        self.step, self.reads, self.ends, self._limits = 0.0, 0.0, 0.0, 0
        self.produced, self._evictions, self._adjusted = load.produced_tokens, load.evictions, load.evictions
        self._overflows = False
        self._paces, self._last, self._seen_at = paces, load, -1.0
        self._seconds = self._expected = 1e-3
        self._rate = 0.0
        """Steps a second, lately."""
        self._width = 1.0
        self._slots: dict[int, list[float]] = {}
        """End step // width -> number of residents, sum of bases."""
        self._prompts = 0

    # Facts

    def look(self, load: EngineLoad, now: float) -> None:
        """Take in what the engine says; steps follow from the tokens it has produced since."""
        last, seconds = self._last, now - self._seen_at
        if seconds <= 0:
            return
        produced = load.produced_tokens - last.produced_tokens
        steps = produced / max(1, len(self.residents))
        self.step += steps
        self._rate = steps / seconds
        if produced and last.running and load.running:
            used, running = (last.used_tokens + load.used_tokens) / 2, (last.running + load.running) / 2
            self._seconds = FORGET * self._seconds + seconds
            self._expected = FORGET * self._expected + self._paces.expected(used, seconds, produced / running)
        self.capacity, self.produced, self._last, self._seen_at = load.capacity_tokens, load.produced_tokens, load, now
        self._evictions = load.evictions

    def adjust(self, fall: float, regained: float) -> bool:
        """Fill less far if it has begun to evict since the last time, the more the larger the part that it gave up;
        whether it has evicted. An overflow that lasts counts once: who is there cannot be taken back."""
        evicted, self._adjusted = self._evictions - self._adjusted, self._evictions
        if evicted and not self._overflows:
            part = min(1.0, evicted / max(1, len(self.residents)))
            self.target = max(LEAST_TARGET, self.target * (1.0 - fall * (0.2 + part)))
        elif not evicted:
            self.target = min(MOST_TARGET, self.target + (regained if self._evictions else 10 * regained))
        self._overflows = evicted > 0
        return self._overflows

    def overflows_at(self, load: EngineLoad) -> bool:
        """Whether it has evicted lately."""
        return self._overflows or load.evictions > self._adjusted

    # Residents

    def add(self, resident: Resident, response: float) -> None:
        """Enter a trajectory that is `response` tokens long now."""
        self.residents[resident.session_id] = resident
        siblings = self.groups.get(resident.group, 0)
        if not siblings:
            self._prompts += resident.prompt
        self.groups[resident.group] = siblings + 1
        self.reads += resident.reads
        self.ends += resident.end
        self._limits += resident.most
        resident.base = response - self.step
        if not self._slots:
            self._width = max(1.0, (resident.asked.limit + resident.response) / ENDS)
        resident.slot = int((resident.end - resident.base) / self._width)
        slot = self._slots.setdefault(resident.slot, [0.0, 0.0])
        slot[0] += 1.0
        slot[1] += resident.base

    def remove(self, resident: Resident) -> None:
        del self.residents[resident.session_id]
        self.groups[resident.group] -= 1
        if not self.groups[resident.group]:
            del self.groups[resident.group]
            self._prompts -= resident.prompt
        self.reads -= resident.reads
        self.ends -= resident.end
        self._limits -= resident.most
        slot = self._slots[resident.slot]
        slot[0] -= 1.0
        slot[1] -= resident.base
        if slot[0] < 0.5:
            del self._slots[resident.slot]

    def clear(self) -> None:
        self.residents, self._slots = {}, {}  # new ones: callers iterate over the old
        self.groups.clear()
        self.reads, self.ends, self._limits, self._prompts = 0.0, 0.0, 0, 0

    def step_at(self, now: float) -> float:
        """Its count of steps, a little after the last look."""
        return self.step + self._rate * max(0.0, now - self._seen_at)

    def response_at(self, resident: Resident) -> float:
        """How long it is by now: what is known, and a token for each step since its turn began."""
        if resident.since < 0:
            return resident.response
        sampled = max(0.0, self.step - resident.since)
        return resident.response + min(sampled, resident.asked.limit)

    # Forecast

    def slowness(self) -> float:
        """Seconds taken, over what an average engine takes for the same."""
        return self._seconds / self._expected

    def finish(self) -> float:
        return self.reads * self.slowness()

    def finish_with(self, reads: float) -> float:
        """When all expected work is done, `reads` more included; in reads of an average engine."""
        return (self.reads + reads) * self.slowness()

    def fits(self, resident: Resident, spread: float) -> bool:
        """Whether the expected peak of the cache with `resident`, and `spread` times the peak over the root of the
        number of residents for bad luck, stays within what is promised of it; or all can come to their limits."""
        prompts = self._prompts + (0 if resident.group in self.groups else resident.prompt)
        if prompts + self._limits + resident.most <= self.capacity:
            return True
        promised = self.capacity * self.target - prompts
        luck = 1.0 + spread / math.sqrt(len(self.residents) + 1)
        return (self.ends + resident.end) * luck <= promised or self._peak_with(resident, spread) <= promised

    def _peak_with(self, resident: Resident, spread: float) -> float:
        """Most own tokens that are expected to be held at any later step, room for bad luck included: just before the
        residents of a slot end."""
        base, width, step, root = resident.response - self.step, self._width, self.step, math.sqrt
        last = int((resident.end - base) / width)
        slots = self._slots
        slots.setdefault(last, [0.0, 0.0])
        number = total = peak = 0.0
        for slot in sorted(slots, reverse=True):
            here, bases = slots[slot]
            number += here
            total += bases
            if slot == last:
                number += 1.0
                total += base
            if number > 0.5:
                then = (slot + 0.5) * width
                held = (total + number * (then if then > step else step)) * (1.0 + spread / root(number))
                if held > peak:
                    peak = held
        return peak
