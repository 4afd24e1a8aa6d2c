"""The scheduler's record of one engine: its trajectories (residents), the forecast of its cache, its speed.

Residents advance together, so time is counted in steps of one token for each resident (on average, with those that wait
for a tool): a resident whose own tokens are now x, at step v, holds x + (w - v) at a later step w, until it
ends. So the cache at step w is the sum of (x - v) over those still there, plus w times their number, and the whole
future is two sums by the step of the end.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

ENDS = 32  # the longest response is divided into this many slots for the steps of ends
PROMISED = 0.9  # share of the cache that the expected peak may fill
STEP_FEEDS = 128.0  # tokens that can be fed in the fixed time of a step: 156 for 14B on two MI300X
FORGET = 0.98  # weight kept by older observations of an engine's pace, at each look
SEEN_FROM = 0.25  # of the cache used by residents, before the engine's own count is meaningful
LEAST_HELD = 0.1  # of the tokens of residents is assumed to be held
KEPT = 0.9  # weight kept by older evictions, at each forecast, and by the share of tokens held, at each look


@dataclass(slots=True, eq=False)
class Resident:
    """A trajectory as the scheduler sees it."""

    ask: Ask
    """Its latest request."""
    engine: str | None = None
    response: int = 0
    """Tokens after the prompt when last known, replies included."""
    since: float = math.inf
    """Step of its engine at which its turn began; infinite while none is worked on."""
    end: float = 0.0
    """The length at which it is assumed to end: a quantile of all lengths, drawn again when it has passed that."""
    reads: float = 0.0
    """Expected work: cached tokens to be read."""
    base: float = 0.0
    """Own tokens minus the engine's step count, as of its entry into the book."""
    slot: int = 0
    """Key of the slot in which its end is entered."""


class Book:
    """One engine: its residents, the forecast of its cache, its pace, and its evictions."""

    def __init__(self, name: str, load: EngineLoad) -> None:
        self.name = name
        self.residents: dict[str, Resident] = {}
        """By session id."""
        self._groups: Counter[str] = Counter()
        """Group -> number of its residents, who share one prompt in the cache."""
        self.pace = (0.0, 0.0)
        """Seconds that its work took, and the cached tokens that it read; both fade. Zero: no work observed."""
        self.last, self._seen_at = load, -1.0
        """The engine's load at the last look, and the time of that look."""
        self.step = 0.0
        """Steps that the engine has taken: the tokens that each resident has gained."""
        self.held = 1.0
        """Recent share of the tokens of residents with an engine row that the engine counts as used: vLLM does not
        count those of residents that wait for a tool, and may evict them."""
        self.reads = 0.0
        """Work that is still expected: cached tokens to be read."""
        self._prompts = 0
        """Tokens of the prompts, each once for a group."""
        self._slots: dict[int, tuple[int, float]] = {}
        """Step of the end // _width -> number of residents, sum of their bases."""
        self._width = 1.0
        self.counted = (load.evictions, load.evictions)
        """Evictions by the last two forecasts."""
        self._evicted = self._overcommitted = 1.0
        """Recent evictions, and recent residents taken beyond what is promised; one is added to each count."""

    # Facts

    def look(self, load: EngineLoad, now: float) -> None:
        """Record the engine's load; steps follow from the tokens it has produced since."""
        last, seconds = self.last, now - self._seen_at
        produced = max(0, load.produced_tokens - last.produced_tokens)  # a restarted engine counts from 0
        self.step += produced / max(1, len(self.residents))
        if produced and last.running and load.running and (used := last.used_tokens + load.used_tokens):
            reads = produced * used / (last.running + load.running)
            self.pace = FORGET * self.pace[0] + seconds, FORGET * self.pace[1] + reads
        self._evicted += max(0, load.evictions - last.evictions)
        self.last, self._seen_at = load, now
        own = self._tokens() * (1 - load.waiting / max(1, len(self.residents)))  # those waiting for a row hold none
        if own > load.capacity_tokens * SEEN_FROM:
            self.held += (1 - KEPT) * (max(LEAST_HELD, min(1.0, load.used_tokens / own)) - self.held)

    def slowness(self) -> float:
        """Seconds for each cached token that is read; 1 for an engine without observed work."""
        return self.pace[0] / self.pace[1] if self.pace[1] else 1.0

    def finish(self) -> float:
        """Seconds until all expected work is done."""
        return self.reads * self.slowness()

    # Residents

    def add(self, resident: Resident) -> None:
        ask = resident.ask
        self.residents[ask.session_id] = resident
        self._groups[ask.group] += 1
        self._prompts += ask.prompt_tokens if self._groups[ask.group] == 1 else 0
        self._enter(resident, resident.response)

    def remove(self, resident: Resident) -> None:
        ask = resident.ask
        del self.residents[ask.session_id]
        self._groups[ask.group] -= 1
        self._prompts -= 0 if self._groups[ask.group] else ask.prompt_tokens
        self.reads -= resident.reads
        number, bases = self._slots[resident.slot]
        self._slots[resident.slot] = number - 1, bases - resident.base

    def length_of(self, resident: Resident) -> float:
        """Its length by now: the known tokens, plus one for each step since its turn began."""
        return resident.response + max(0.0, self.step - resident.since)

    def forecast(self) -> None:
        """Enter all residents again with their current lengths; let older evictions fade."""
        self._evicted, self._overcommitted = (1 + KEPT * (count - 1) for count in (self._evicted, self._overcommitted))
        self.counted = (self.counted[1], self.last.evictions)
        self._groups, self._slots, self.reads = +self._groups, {}, 0.0
        for resident in self.residents.values():
            self._enter(resident, self.length_of(resident))

    def _enter(self, resident: Resident, response: float) -> None:
        if not self._slots:
            self._width = max(1.0, (resident.ask.limit + resident.response) / ENDS)
        resident.base = response - self.step
        resident.slot = int((resident.end - resident.base) / self._width)
        number, bases = self._slots.get(resident.slot, (0, 0.0))
        self._slots[resident.slot] = number + 1, bases + resident.base
        self.reads += resident.reads

    # Forecast

    def takes(self, resident: Resident) -> bool:
        """Whether the cache is expected to fit with `resident`, or admitting more pays. Counts the over-commitments."""
        self.add(resident)
        fits = self.fits()
        pays = not fits and self._pays(resident)
        self.remove(resident)
        self._overcommitted += pays
        return fits or pays

    def fits(self) -> bool:
        """Whether the expected peak of the cache stays within what is promised of it."""
        return self._peak() <= PROMISED * self.last.capacity_tokens / self.held

    def _pays(self, resident: Resident) -> bool:
        """Whether one more token per step until the cache is full outweighs feeding the trajectory again after an
        eviction, times the evictions per over-commitment so far; at least one, because evictions follow later."""
        number = len(self.residents)
        steps = (self.last.capacity_tokens / self.held - self._tokens()) / number
        times = max(1.0, self._evicted / self._overcommitted)
        return steps * STEP_FEEDS > times * (resident.ask.tokens + steps) * number

    def _tokens(self) -> float:
        """Tokens of all residents by now."""
        return self._prompts + sum(bases + number * self.step for number, bases in self._slots.values())

    def _peak(self) -> float:
        """Most tokens expected in the cache at any later step: just before the residents of a slot end."""
        number, total, peak = 0, 0.0, 0.0
        for slot, (here, bases) in sorted(self._slots.items(), reverse=True):
            number, total, end = number + here, total + bases, (slot + 0.5) * self._width
            size = total + number * (end if end > self.step else self.step)  # a million calls of max() a step count
            peak = size if size > peak else peak
        return self._prompts + peak
