"""What the scheduler knows of one engine: its trajectories (residents), how its cache will fill, how fast it is.

Residents advance together, so time is counted in steps of one token for each resident (on average, with those that wait
for a tool): a resident whose own tokens are now x, at step v, holds x + (w - v) at a later step w, until it
ends. So the cache at step w is the sum of (x - v) over those still there, plus w times their number, and the whole
future is two sums by the step of the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

ENDS = 32  # steps of ends are told apart to this part of the longest response
PROMISED = 0.9  # share of the cache that the expected peak may fill
SPREAD = 2.0  # room kept for bad luck, as a multiple of the promise over the square root of the number of residents
STEP_FEEDS = 128.0  # tokens that can be fed in the fixed time of a step: 156 for 14B on two MI300X
FEED_READS = 1000.0  # cached tokens that can be read in the time of feeding one (14B on two MI300X)
ASSUMED_SECONDS = 1.0  # of work at the assumed pace, for an engine that has not been seen at work
FORGET = 0.98  # of what was seen of an engine's pace, kept at each look
SEEN_FROM = 0.25  # of the cache that residents have, before the engine's own count tells anything
LEAST_HELD = 0.1  # of the tokens of residents is assumed to be held
KEPT = 0.9  # of what was seen of its evictions, at each settling


@dataclass(slots=True, eq=False)
class Resident:
    """A trajectory as the scheduler sees it."""

    session_id: str
    group: str
    prompt: int
    asked: Ask
    """Its latest ask."""
    most: int
    """Longest response it may come to, tokens."""
    kin: Any = None
    """What its length is expected from."""
    request_id: str = ""
    """Request id of the turn that waits or is worked on; empty while a tool runs."""
    engine: str | None = None
    response: int = 0
    """Tokens after the prompt when last known, replies included."""
    since: float = -1.0
    """Step of its engine at which its turn began; negative while none is worked on."""
    share: float = 0.0
    """It is assumed to end at this quantile of the lengths of similar trajectories."""
    end: float = 0.0
    """The length at which it is assumed to end."""
    reads: float = 0.0
    """Expected work: cached tokens to be read."""
    base: float = 0.0
    """Own tokens minus the engine's step count, since it was entered into the book."""
    slot: int = 0
    """Key of the slot in which its end is entered."""


@dataclass(slots=True)
class EnginePace:
    """How fast an engine is: the seconds that its work took, and the work, counted in tokens fed. Both fade."""

    is_known: bool = False
    """Whether the engine has been seen at work."""
    seconds: float = 1e-9
    work: float = 1e-9

    def saw(self, seconds: float, work: float) -> None:
        self.is_known = True
        self.seconds = FORGET * self.seconds + seconds
        self.work = FORGET * self.work + work

    def assume(self, slowness: float) -> None:
        """Until its own pace outweighs it, as if it had been seen at work for a while."""
        self.seconds, self.work = ASSUMED_SECONDS, ASSUMED_SECONDS / slowness

    def slowness(self) -> float:
        """Seconds for the work of feeding a token."""
        return self.seconds / self.work


class Book:
    """One engine: its residents, the forecast of its cache, its pace, and its evictions."""

    def __init__(self, name: str, load: EngineLoad) -> None:
        self.name = name
        self.residents: dict[str, Resident] = {}
        """By session id."""
        self.groups: dict[str, int] = {}
        """Group -> number of its residents, who share one prompt in the cache."""
        self.pace = EnginePace()
        self.fed = 0
        """Tokens that the engine was given to feed since the last look."""
        # The last look at the engine
        self.last, self._seen_at = load, -1.0
        """What the engine said, and when."""
        self._rate = 0.0
        """Steps a second between the last two looks."""
        self.step = 0.0
        """Steps that the engine has taken: the tokens that each resident has gained."""
        # Sums over the residents
        self.reads = 0.0
        """Work that is still expected: cached tokens to be read."""
        self.ends = 0.0
        """Tokens of all responses at the lengths where they are assumed to end."""
        self._limits = 0
        """Tokens of all responses at their longest."""
        self._prompts = 0
        """Tokens of the prompts, each once for a group."""
        self._slots: dict[int, list[float]] = {}
        """Step of the end // _width -> [number of residents, sum of their bases]."""
        self._width = 1.0
        self._held = 1.0
        """Recent share of its residents' tokens that the engine counts as used: vLLM gives away what belongs to those
        that wait for a tool, and does not count it."""
        # Evictions
        self._settled = load.evictions
        """Evictions counted at the last call of `settle`."""
        self._overflows = False
        """The engine evicted between the last two calls of `settle`."""
        self._evicted = self._overcommitted = 1.0
        """Recent evictions, and recent residents taken beyond what is promised; one is added to each count."""

    # Facts

    def look(self, load: EngineLoad, now: float) -> None:
        """Take in what the engine says; steps follow from the tokens it has produced since."""
        last, seconds = self.last, now - self._seen_at
        if seconds <= 0:
            return
        produced = max(0, load.produced_tokens - last.produced_tokens)  # a restarted engine counts from 0
        steps = produced / max(1, len(self.residents))
        self.step += steps
        self._rate = steps / seconds
        if produced and last.running and load.running and self.last.capacity_tokens:
            self.pace.saw(seconds, self._work_since(load, produced))
            self.fed = 0
        self._evicted += max(0, load.evictions - last.evictions)
        self.last, self._seen_at = load, now
        self._see_held(load)

    def _see_held(self, load: EngineLoad) -> None:
        own = self._prompts + sum(bases for _, bases in self._slots.values()) + self.step * len(self.residents)
        if self.residents and own > load.capacity_tokens * SEEN_FROM:
            self._held += (1 - KEPT) * (min(1.0, load.used_tokens / own) - self._held)

    def _work_since(self, load: EngineLoad, produced: int) -> float:
        """Work that the engine has done since the last look, counted in tokens fed."""
        last = self.last
        used, running = (last.used_tokens + load.used_tokens) / 2, (last.running + load.running) / 2
        steps, again = produced / running, load.recomputed_tokens - last.recomputed_tokens
        return steps * (STEP_FEEDS + used / FEED_READS) + self.fed + again

    def settle(self) -> bool:
        """Note and return whether the engine has evicted since the last call; let older evictions fade."""
        self._evicted, self._overcommitted = (1 + KEPT * (seen - 1) for seen in (self._evicted, self._overcommitted))
        self._overflows, self._settled = self.last.evictions > self._settled, self.last.evictions
        return self._overflows

    def overflows_at(self, load: EngineLoad) -> bool:
        """Whether the engine has evicted recently."""
        return self._overflows or load.evictions > self._settled

    # Residents

    def add(self, resident: Resident, response: float) -> None:
        """Enter a trajectory that is `response` tokens long now."""
        self.residents[resident.session_id] = resident
        siblings = self.groups.get(resident.group, 0)
        if not siblings:
            self._prompts += resident.prompt
        self.groups[resident.group] = siblings + 1
        self._limits += resident.most
        self._enter(resident, response)

    def forecast(self, responses: Iterable[tuple[Resident, float]]) -> None:
        """Enter again, from now on, all residents and how long they are by now."""
        self._slots, self.reads, self.ends = {}, 0.0, 0.0
        for resident, response in responses:
            self._enter(resident, response)

    def _enter(self, resident: Resident, response: float) -> None:
        slots = self._slots
        if not slots:
            self._width = max(1.0, (resident.asked.limit + resident.response) / ENDS)
        base = resident.base = response - self.step
        place = resident.slot = int((resident.end - base) / self._width)
        slot = slots.get(place)
        if slot is None:
            slots[place] = [1.0, base]
        else:
            slot[0] += 1.0
            slot[1] += base
        self.reads += resident.reads
        self.ends += resident.end

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

    def step_at(self, now: float) -> float:
        """Its count of steps at `now`, which is a little after the last look."""
        return self.step + self._rate * max(0.0, now - self._seen_at)

    def responses(self) -> list[tuple[Resident, float]]:
        """Its residents and how long each is by now: what is known, and a token for each step since its turn began."""
        found = []
        for resident in self.residents.values():
            response: float = resident.response
            if resident.since >= 0.0 and (sampled := self.step - resident.since) > 0.0:
                most = resident.asked.limit
                response += sampled if sampled < most else most
            found.append((resident, response))
        return found

    # Forecast

    def finish(self, more: float = 0.0) -> float:
        """Seconds until all expected work is done, with `more` reads; comparable among engines."""
        return (self.reads + more) * self.pace.slowness()

    def takes(self, resident: Resident) -> bool:
        """Whether the expected peak of the cache with `resident` stays within what is promised of it, or all fit even
        at their limits, or over-committing pays. Counts the over-commitments."""
        prompts = self._prompts + (0 if resident.group in self.groups else resident.prompt)
        capacity = self.last.capacity_tokens
        if prompts + self._limits + resident.most <= capacity:
            return True
        luck = 1.0 + SPREAD / math.sqrt(len(self.residents) + 1)
        capacity = int(capacity / max(self._held, LEAST_HELD))
        promised = capacity * PROMISED / luck - prompts
        if self.ends + resident.end <= promised:
            return True
        base = resident.response - self.step
        last = int((resident.end - base) / self._width)
        slot = self._slots.get(last, [0.0, 0.0])
        self._slots[last] = [slot[0] + 1.0, slot[1] + base]
        fits = self._peak() <= promised
        pays = not fits and self.may_overcommit(1) and self._pays(resident, self._steps_until(capacity - prompts))
        self._slots[last] = slot
        if not slot[0]:
            del self._slots[last]
        self._overcommitted += pays
        return fits or pays

    def may_overcommit(self, more: int = 0) -> bool:
        """Whether a resident's part of a step's fixed cost is more than the cost of feeding a token again, times the
        evictions that each over-commitment has led to; with `more` residents."""
        return self._cost_again() * (len(self.residents) + more) < STEP_FEEDS

    def _cost_again(self) -> float:
        """Evictions for each over-commitment; at least one, because evictions follow later."""
        return max(1.0, self._evicted / self._overcommitted)

    def _pays(self, resident: Resident, steps: float) -> bool:
        """Whether a token in each of so many steps (fewer if it ends before) is worth feeding all of it again then."""
        steps = min(steps, resident.end - resident.response)
        again = resident.response + steps + (0 if resident.group in self.groups else resident.prompt)
        return steps * STEP_FEEDS > self._cost_again() * again * (len(self.residents) + 1)

    def _steps_until(self, held: float) -> float:
        """Steps expected until the residents' own tokens come to so many."""
        number = sum(here for here, _ in self._slots.values())
        total = sum(bases for _, bases in self._slots.values())
        for slot in sorted(self._slots):
            full, (here, bases) = (held - total) / number, self._slots[slot]
            if full <= (slot + 1) * self._width:
                return max(0.0, full - self.step)
            number, total = number - here, total - bases
            if number < 0.5:
                break
        return math.inf

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
