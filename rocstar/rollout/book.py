"""What the scheduler knows of one engine: its trajectories (residents), how its cache will fill, how fast it is.

Residents advance together, so time is counted in steps of one token for each resident (on average, with those that wait
for a tool): a resident whose own tokens are now x, at step v, holds x + (w - v) at a later step w, until it
ends. So the cache at step w is the sum of (x - v) over those still there, plus w times their number, and the whole
future is two sums by the step of the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

ENDS = 32  # steps of ends are told apart to this part of the longest response
PROMISED = 0.9  # share of the cache that the expected peak may fill
STEP_FEEDS = 128.0  # tokens that can be fed in the fixed time of a step: 156 for 14B on two MI300X
FEED_READS = 1000.0  # cached tokens that can be read in the time of feeding one (14B on two MI300X)
FORGET = 0.98  # of what was seen of an engine's pace, kept at each look
SEEN_FROM = 0.25  # of the cache that residents have, before the engine's own count tells anything
LEAST_HELD = 0.1  # of the tokens of residents is assumed to be held
KEPT = 0.9  # of what was seen of its evictions, at each forecast


@dataclass(slots=True, eq=False)
class Resident:
    """A trajectory as the scheduler sees it."""

    asked: Ask
    """Its latest ask."""
    share: float
    """It is assumed to end at this quantile of all lengths."""
    request_id: str = ""
    """Request id of the turn that waits or is worked on; empty while a tool runs."""
    engine: str | None = None
    response: int = 0
    """Tokens after the prompt when last known, replies included."""
    since: float = -1.0
    """Step of its engine at which its turn began; negative while none is worked on."""
    end: float = 0.0
    """The length at which it is assumed to end."""
    reads: float = 0.0
    """Expected work: cached tokens to be read."""
    base: float = 0.0
    """Own tokens minus the engine's step count, since it was entered into the book."""
    slot: int = 0
    """Key of the slot in which its end is entered."""


class Book:
    """One engine: its residents, the forecast of its cache, its pace, and its evictions."""

    def __init__(self, name: str, load: EngineLoad) -> None:
        self.name = name
        self.residents: dict[str, Resident] = {}
        """By session id."""
        self.groups: Counter[str] = Counter()
        """Group -> number of its residents, who share one prompt in the cache."""
        self.pace: tuple[float, float] | None = None
        """Seconds that its work took, and the work, counted in tokens fed; both fade. None: not seen at work."""
        self.fed = 0
        """Tokens that the engine was given to feed since the last look."""
        # The last look at the engine
        self.last, self._seen_at = load, -1.0
        """What the engine said, and when."""
        self.step = 0.0
        """Steps that the engine has taken: the tokens that each resident has gained."""
        self.held = 1.0
        """Recent share of its residents' tokens that the engine counts as used: vLLM gives away what belongs to those
        that wait for a tool, and does not count it."""
        # Sums over the residents
        self.reads = 0.0
        """Work that is still expected: cached tokens to be read."""
        self._prompts = 0
        """Tokens of the prompts, each once for a group."""
        self._slots: dict[int, tuple[float, float]] = {}
        """Step of the end // _width -> number of residents, sum of their bases."""
        self._width = 1.0
        # Evictions
        self._counted = (load.evictions, load.evictions)
        """Evictions by the last two forecasts."""
        self._evicted = self._overcommitted = 1.0
        """Recent evictions, and recent residents taken beyond what is promised; one is added to each count."""

    # Facts

    def look(self, load: EngineLoad, now: float) -> None:
        """Take in what the engine says; steps follow from the tokens it has produced since."""
        last, seconds = self.last, now - self._seen_at
        if seconds <= 0:
            return
        produced = max(0, load.produced_tokens - last.produced_tokens)  # a restarted engine counts from 0
        self.step += produced / max(1, len(self.residents))
        if produced and last.running and load.running and last.capacity_tokens:
            used, running = (last.used_tokens + load.used_tokens) / 2, (last.running + load.running) / 2
            again = load.recomputed_tokens - last.recomputed_tokens
            work = produced / running * (STEP_FEEDS + used / FEED_READS) + self.fed + again
            took, done = self.pace or (0.0, 0.0)
            self.pace, self.fed = (FORGET * took + seconds, FORGET * done + work), 0
        self._evicted += max(0, load.evictions - last.evictions)
        self.last, self._seen_at = load, now
        own = self._prompts + self._own_tokens()
        if self.residents and own > load.capacity_tokens * SEEN_FROM:
            self.held += (1 - KEPT) * (max(LEAST_HELD, min(1.0, load.used_tokens / own)) - self.held)

    def slowness(self) -> float:
        """Seconds for the work of feeding a token; 1 for an engine that was not seen at work."""
        return self.pace[0] / self.pace[1] if self.pace else 1.0

    def finish(self) -> float:
        """Seconds until all expected work is done; comparable among engines."""
        return self.reads * self.slowness()

    # Residents

    def add(self, resident: Resident) -> None:
        asked = resident.asked
        self.fed += asked.tokens - (asked.prompt_tokens if asked.group in self.groups else 0)
        self._prompts += 0 if asked.group in self.groups else asked.prompt_tokens
        self.residents[asked.session_id] = resident
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

    def length_of(self, resident: Resident) -> float:
        """How long it is by now: what is known, and a token for each step since its turn began."""
        sampled = self.step - resident.since if resident.since >= 0.0 else 0.0
        return resident.response + min(max(0.0, sampled), resident.asked.limit)

    def forecast(self) -> None:
        """Enter all residents again, as long as they are now; let older evictions fade."""
        self._evicted, self._overcommitted = (1 + KEPT * (seen - 1) for seen in (self._evicted, self._overcommitted))
        self._counted = (self._counted[1], self.last.evictions)
        self._slots, self.reads = {}, 0.0
        for resident in self.residents.values():
            self._enter(resident, self.length_of(resident))

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

    # Forecast

    def takes(self, resident: Resident) -> bool:
        """Whether the expected peak of the cache with `resident` stays within what is promised of it, or admitting more
        pays. Counts the over-commitments."""
        asked = resident.asked
        prompts = self._prompts + (0 if asked.group in self.groups else asked.prompt_tokens)
        room = self.last.capacity_tokens / self.held
        self._enter(resident, resident.response)
        fits = self._peak() <= room * PROMISED - prompts
        pays = not fits and self._pays(resident, room - prompts)
        self._withdraw(resident)
        self._overcommitted += pays
        return fits or pays

    def _pays(self, resident: Resident, room: float) -> bool:
        """Whether a token in each step until the cache is full (or until it ends before) is worth feeding all of it
        again then."""
        asked, number = resident.asked, len(self.residents) + 1
        steps = min((room - self._own_tokens()) / number, resident.end - resident.response)
        again = resident.response + steps + (0 if asked.group in self.groups else asked.prompt_tokens)
        return steps * STEP_FEEDS > self._cost_again() * again * number

    def overflows_at(self, load: EngineLoad) -> bool:
        """Whether the engine has evicted since the forecast before the last."""
        return load.evictions > self._counted[0]

    def may_overcommit(self) -> bool:
        """Whether a resident's part of a step's fixed cost is more than the cost of feeding a token again."""
        return self._cost_again() * len(self.residents) < STEP_FEEDS

    def _cost_again(self) -> float:
        """Evictions that an over-commitment has led to; at least one, because evictions follow later."""
        return max(1.0, self._evicted / self._overcommitted)

    def _own_tokens(self) -> float:
        """Tokens of all residents by now, without their prompts."""
        number, bases = map(sum, zip((0.0, 0.0), *self._slots.values(), strict=True))
        return bases + self.step * number

    def _peak(self) -> float:
        """Most own tokens that are expected to be held at any later step: just before the residents of a slot end."""
        width, step, slots = self._width, self.step, self._slots
        number = total = peak = 0.0
        for slot in sorted(slots, reverse=True):
            here, bases = slots[slot]
            number, total = number + here, total + bases
            peak = max(peak, total + number * max(step, (slot + 0.5) * width))
        return peak
