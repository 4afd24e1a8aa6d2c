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

from rocstar.rollout.prices import FED, STEP, Prices
from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

ENDS = 32  # steps of ends are told apart to this part of the longest response
FIRST_TARGET = 0.9  # of the cache, promised before anything is known of lengths and prices
SPREAD = 2.0  # room kept for bad luck: so many times the promise over the root of the number of residents
TARGETS = (0.6, 4.0)  # least and most that is promised of a cache
GAIN = 0.15  # relative change of the promise, over the difference of the two losses as shares of the time
STRIDE = 0.2  # most by which it changes at once, relative: what was promised before shows only later
EVICTED = 4.0  # weight of what evictions cost: it rises steeply with the promise, what empty places cost falls slowly
WORTH = 0.1  # share of the time: nothing more is promised where less could be won
GROWN = 0.6  # of the expected peak: where the residents hold less, they are young and the cache is still filling
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


class Book:
    """One engine's residents and forecast."""

    def __init__(self, name: str, load: EngineLoad, prices: Prices) -> None:
        self.name, self.capacity, self.target = name, load.capacity_tokens, FIRST_TARGET
        self.residents: dict[str, Resident] = {}
        self.groups: dict[str, int] = {}
        """Residents by group: the prompt is held once."""
        self.step, self.reads, self.ends, self._limits = 0.0, 0.0, 0.0, 0
        self.produced, self._evictions, self._adjusted = load.produced_tokens, load.evictions, load.evictions
        self._overflows, self._filling = False, True
        self._too_little = self._too_much = self._weighed = 0.0
        """Since the promise was last adjusted: seconds lost to empty places while somebody waited, lost to evictions,
        and in all, at an average engine's pace."""
        self.fed = 0
        """Tokens that it was given to feed since the last look."""
        self._prices, self._last, self._seen_at = prices, load, -1.0
        self._seconds = self._expected = 1e-3
        self._rate = 0.0
        """Steps a second, lately."""
        self._width = 1.0
        self._slots: dict[int, list[float]] = {}
        """End step // width -> number of residents, sum of bases."""
        self._prompts = 0

    # Facts

    def look(self, load: EngineLoad, now: float, wanted: bool) -> None:
        """Take in what the engine says; steps follow from the tokens it has produced since. `wanted`: somebody waits
        for admission."""
        last, seconds = self._last, now - self._seen_at
        if seconds <= 0:
            return
        produced = max(0, load.produced_tokens - last.produced_tokens)  # an engine that began anew counts from nothing
        steps = produced / max(1, len(self.residents))
        self.step += steps
        self._rate = steps / seconds
        if produced and last.running and load.running and self.capacity:
            self._weigh(load, produced, seconds, wanted)
        self.capacity, self.produced, self._last, self._seen_at = load.capacity_tokens, load.produced_tokens, load, now
        self._evictions = load.evictions

    def _weigh(self, load: EngineLoad, produced: int, seconds: float, wanted: bool) -> None:
        """Learn what steps cost, and what was lost by promising too little of the cache or too much."""
        last, price = self._last, self._prices.each
        used, running = (last.used_tokens + load.used_tokens) / 2, (last.running + load.running) / 2
        steps, again = produced / running, load.recomputed_tokens - last.recomputed_tokens
        expected = self._prices.see((steps, produced, steps * used, self.fed + again), seconds, self.slowness())
        self.fed = 0
        self._seconds = FORGET * self._seconds + seconds
        self._expected = FORGET * self._expected + expected
        self._weighed += expected
        empty = price[STEP] * steps * max(0.0, 1.0 - used / self.capacity)
        # not by `again`: vLLM does not tell what it feeds after a preemption
        self._too_much += price[FED] * (load.evictions - last.evictions) * used / running
        if load.waiting and self.overflows_at(load):
            self._too_much += empty  # what was evicted waits for room
        elif wanted and not self._filling:
            self._too_little += empty

    def adjust(self) -> bool:
        """Promise more of the cache where empty places have cost more than evictions since the last time, else less;
        whether it has evicted."""
        self._filling = self._is_filling()
        self._overflows, self._adjusted = self._evictions > self._adjusted, self._evictions
        if self._weighed > 0.0:
            gain = (self._too_little - EVICTED * self._too_much) / self._weighed
            change = 0.0 if 0.0 < gain < WORTH else max(-STRIDE, min(STRIDE, GAIN * gain))
            target = self.target * (1.0 + change)
            self.target = max(TARGETS[0], min(TARGETS[1], target))
        self._too_little = self._too_much = self._weighed = 0.0
        return self._overflows

    def _is_filling(self) -> bool:
        """Whether its residents are young, as at the beginning of a step: the cache is then empty for another reason
        than too small a promise."""
        now = sum(bases + number * self.step for number, bases in self._slots.values())
        return now + self._prompts <= GROWN * (self._peak() + self._prompts)

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
        if (slot := self._slots.get(resident.slot)) is None:
            self._slots[resident.slot] = [1.0, resident.base]
        else:
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
        sampled, most = self.step - resident.since, resident.asked.limit
        return resident.response + (sampled if 0.0 < sampled < most else most if sampled > 0.0 else 0.0)

    # Forecast

    def slowness(self) -> float:
        """Seconds taken, over what an average engine takes for the same."""
        return self._seconds / self._expected

    def finish(self) -> float:
        return self.reads * self.slowness()

    def finish_with(self, reads: float) -> float:
        """When all expected work is done, `reads` more included; in reads of an average engine."""
        return (self.reads + reads) * self.slowness()

    def fits(self, resident: Resident) -> bool:
        """Whether the expected peak of the cache with `resident` stays within what is promised of it; or all can come
        to their limits."""
        prompts = self._prompts + (0 if resident.group in self.groups else resident.prompt)
        if prompts + self._limits + resident.most <= self.capacity:
            return True
        luck = 1.0 + SPREAD / math.sqrt(len(self.residents) + 1)
        promised = self.capacity * self.target / luck - prompts
        if self.ends + resident.end <= promised:
            return True
        base = resident.response - self.step
        last = int((resident.end - base) / self._width)
        slot = self._slots.setdefault(last, [0.0, 0.0])
        self._slots[last] = [slot[0] + 1.0, slot[1] + base]
        peak = self._peak()
        self._slots[last] = slot
        return peak <= promised

    def _peak(self) -> float:
        """Most own tokens that are expected to be held at any later step: just before the residents of a slot end."""
        width, step, slots = self._width, self.step, self._slots
        number = total = peak = 0.0
        for slot in sorted(slots, reverse=True):
            here, bases = slots[slot]
            number += here
            total += bases
            then = (slot + 0.5) * width
            held = total + number * (then if then > step else step)
            if held > peak:
                peak = held
        return peak
