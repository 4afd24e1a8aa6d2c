"""rocstar's scheduler: it fills an engine by the cache that its trajectories are expected to need, not by their number.

- A newcomer is admitted where the expected peak of the cache, with it, fits, or where more than that pays (`book.py`).
  Each trajectory is assumed to end at a quantile of the lengths of all, and quantiles are spread evenly over
  trajectories, so that together they end as such trajectories do.
- No trajectory is held back once less work is left than the residents had when they began: from then on the longest
trajectories and their tools decide when the step ends, so starting later ends it later.
- First come, first served: those that have had an engine (it died, or they left it), then newcomers. Among engines
  with room, each goes to the one that would finish its work first, at the pace that it has shown. An engine takes
  no trajectory that it would finish later than all engines together finish everything: a faster one has room sooner.
- Later turns stay where their cache is, with two exceptions (`_keeps`): where an engine has evicted and the forecast
  has no room for them, and where it is behind the others, which balances lengths that were not known.

Expectations are learned again once as many turns have ended as there are residents, so no event costs more with many.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from itertools import count

from rocstar.rollout.book import Book, Resident
from rocstar.rollout.expected import LifeTable
from rocstar.rollout.scheduler import Ask
from rocstar.types import EngineLoad

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are
MOVED_SHARE = 0.05  # of the tokens sampled may be fed again by moves; without a bound, roomy engines take 2% longer
BEHIND = 1.03  # times the average time to finish: an engine further behind gives trajectories away
FEED_READS = 1000.0  # cached tokens that can be read in the time of feeding one (14B on two MI300X)


class KvScheduler:
    """One for a whole run: lengths and paces learned in one step serve the next. Deterministic."""

    def __init__(self, expectation: LifeTable | None = None) -> None:
        self._expectation = expectation or LifeTable()
        self._open: dict[str, Resident] = {}
        """Session id -> trajectory, from its first ask until it is closed."""
        self._by_request: dict[str, Resident] = {}
        """Those whose turn waits or is worked on, not those that run a tool."""
        self._newcomers: dict[str, Resident] = {}
        self._again: dict[str, Resident] = {}
        """Without an engine, by session id, in the order in which they came; who has had one is served first."""
        self._returning: dict[str, Resident] = {}
        """Later turns that their engine shall continue, by session id."""
        self._books: dict[str, Book] = {}
        self._changed: set[str] = set()
        """Engines where a newcomer might fit that did not before."""
        self._shares = (number * GOLDEN % 1.0 for number in count(1))
        """Quantiles at which trajectories are assumed to end."""
        self._events = self._moved = 0
        """Turns ended since expectations were learned; tokens that moves caused to be fed again."""
        self._average = math.inf
        """Mean of the seconds until an engine has finished."""

    # Facts

    def ask(self, ask: Ask, now: float) -> None:
        resident = self._open.get(ask.session_id)
        response = max(0, ask.tokens - ask.prompt_tokens)  # an agent may drop what it has said
        if resident is None:
            resident = self._open[ask.session_id] = Resident(ask)
            self._expectation.begin(response + ask.limit)
        self._by_request.pop(resident.ask.request_id, None)  # of a turn that was given up before it began
        resident.ask, resident.response = ask, response
        self._by_request[ask.request_id] = resident
        if not (self._newcomers or self._again):
            self._changed.update(self._books)
        if resident.engine is None:
            self._newcomers[ask.session_id] = resident
        else:
            self._returning[ask.session_id] = resident

    def answered(self, request_id: str, tokens: int, now: float) -> None:
        if (resident := self._by_request.pop(request_id, None)) is not None:
            resident.response += tokens
            resident.since = math.inf
            self._events += 1

    def close(self, session_id: str, now: float) -> None:
        if (resident := self._open.pop(session_id, None)) is None:
            return
        self._events += 1
        self._by_request.pop(resident.ask.request_id, None)
        for line in (self._newcomers, self._again, self._returning):
            line.pop(session_id, None)
        self._expectation.end(resident.response)
        if resident.engine is not None:
            self._changed.add(resident.engine)
            self._books[resident.engine].remove(resident)

    def lose(self, engine: str, now: float) -> None:
        """Trajectories in the middle of a turn wait again now; those that run a tool wait once it has answered."""
        book = self._books.pop(engine, None)
        for session, resident in book.residents.items() if book else ():
            resident.engine, resident.since = None, math.inf
            self._returning.pop(session, None)
            if resident.ask.request_id in self._by_request:
                self._again[session] = resident
        self._changed = set(self._books)

    # Decisions

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> dict[str, str]:
        waiting = self._waiting()
        if waiting and (len(self._books) < len(engines) or self._is_idle()):
            self._meet(engines)
        if not self._returning and not (waiting and self._changed):
            return {}
        if self._events >= len(self._open) - waiting:
            self._learn(engines, now)
        found = {}
        for session, resident in [(name, each) for name, each in self._returning.items() if each.engine in engines]:
            del self._returning[session]
            book = self._books[resident.engine or ""]
            if self._keeps(resident, book, engines[book.name], now):
                resident.since = book.step
                found[resident.ask.request_id] = book.name
            else:  # it has to be admitted again
                book.remove(resident)
                self._changed.add(book.name)
                resident.engine, self._again[session] = None, resident
        if self._changed and (self._newcomers or self._again):
            found |= self._admit(engines, now)
        return found

    def _meet(self, engines: Mapping[str, EngineLoad]) -> None:
        """Books for engines that are new or back; one that is away without being lost keeps its own. One without
        observed work is assumed as fast as the others: otherwise it would get little work and stay unobserved."""
        self._changed.update(engines)
        for name, load in engines.items():
            if name not in self._books:
                self._books[name] = Book(name, load)
        known = [book.slowness() for book in self._books.values() if book.pace[1]]
        for book in self._books.values() if known else ():
            book.pace = book.pace if book.pace[1] else (1.0, len(known) / sum(known))

    def _keeps(self, resident: Resident, book: Book, load: EngineLoad, now: float) -> bool:
        """Whether its engine keeps it; if not, any engine admits it again, before newcomers. It leaves an engine that
        has recently evicted, gives idle caches away and has no room by the forecast; and, while no trajectory waits,
        one that is behind, if an average engine would finish earlier even though it must feed the tokens again."""
        if load.evictions > book.counted[0] and not load.keeps_idle:
            book.look(load, now)
            book.remove(resident)
            book.add(resident)  # as long as it is now
            return book.fits()
        work = resident.reads + FEED_READS * resident.ask.tokens
        if self._newcomers or self._again or BEHIND * (self._average + work * book.slowness()) >= book.finish():
            return True
        if self._moved > MOVED_SHARE * sum(each.last.produced_tokens for each in self._books.values()):
            return True
        self._moved += resident.ask.tokens
        return False

    def _admit(self, engines: Mapping[str, EngineLoad], now: float) -> dict[str, str]:
        books = [self._books[name] for name in self._changed if name in engines]
        for book in books:
            book.look(engines[book.name], now)
        order = sorted((book.finish(), book.name) for book in books)
        (latest, is_tail), found = self._finish_of_all(), {}
        while order and (line := self._again or self._newcomers):
            session, resident = next(iter(line.items()))
            self._expect(resident, resident.response)
            finish, name = order.pop(0)
            book = self._books[name]
            is_late = finish > latest and finish > min(each.finish() for each in self._books.values())
            if (is_late and not self._is_idle()) or not self._fits(resident, book, is_tail):
                self._changed.discard(name)
                continue
            del line[session]
            resident.engine, resident.since = name, book.step
            book.add(resident)
            insort(order, (book.finish(), name))
            found[resident.ask.request_id] = name
        return found

    def _fits(self, resident: Resident, book: Book, is_tail: bool) -> bool:
        """Whether the forecast has room for it; a trajectory alone on an engine always fits. One that is too large for
        every engine goes to any, and that engine refuses it. If no engine has work, one newcomer is admitted anyhow:
        residents may wait for something that newcomers hold, such as connections of an agent's client."""
        if resident.ask.tokens >= book.last.capacity_tokens:
            return all(resident.ask.tokens >= other.last.capacity_tokens for other in self._books.values())
        return is_tail or not book.residents or self._is_idle() or book.takes(resident)

    def _is_idle(self) -> bool:
        """Whether no turn is under way: all submitted turns wait for an engine."""
        return len(self._by_request) == self._waiting() + len(self._returning)

    def _finish_of_all(self) -> tuple[float, bool]:
        """Seconds until all work would be done if engines shared it by their paces; and whether it is less than the
        work that residents had when they began, tools' time included, assuming each then equalled the next newcomer."""
        books, next_ = self._books.values(), next(iter((self._newcomers or self._again).values()))
        self._expect(next_, next_.response)
        left = sum(book.reads for book in books) + next_.reads * self._waiting()
        initial = next_.reads * sum(len(book.residents) / book.held for book in books)
        return left / sum(1.0 / book.slowness() for book in books), left < initial

    # Estimates

    def _waiting(self) -> int:
        return len(self._newcomers) + len(self._again)

    def _expect(self, resident: Resident, response: float) -> None:
        """Set its remaining work and assumed end; a new end if it has passed the old one."""
        session, prompt = resident.ask.session_id, resident.ask.prompt_tokens
        resident.reads = self._expectation.reads(session, response, prompt)
        if response >= resident.end:
            resident.end = self._expectation.length(session, response, next(self._shares))

    def _learn(self, engines: Mapping[str, EngineLoad], now: float) -> None:
        """Learn from the current lengths of all trajectories, and forecast again."""
        self._events = 0
        self._meet(engines)  # newcomers that did not fit may fit by the new forecast
        books = [self._books[name] for name in sorted(engines)]
        for book in books:
            book.look(engines[book.name], now)
        self._expectation.learn(book.length_of(resident) for book in books for resident in book.residents.values())
        for book in books:
            for resident in book.residents.values():
                self._expect(resident, book.length_of(resident))
            book.forecast()
        self._average = sum(book.finish() for book in books) / max(1, len(books))
