"""rocstar's scheduler: it fills an engine by the cache that its trajectories are expected to need, not by their number.

- A newcomer is admitted where the expected peak of the cache, with it, fits; `book.py` forecasts it. Room is not kept
  for the longest case: each trajectory is assumed to end at a quantile of the lengths of all, and quantiles are spread
  evenly over trajectories, so that together they end as such trajectories do.
- More than fits is admitted where that pays. A schedule can save only the fixed cost of steps and the tokens that are
  fed again. One of n residents saves an n-th of a step's fixed cost with each token, until the cache is expected to be
  full; then a resident is evicted, and its tokens are fed again (`Book.takes`).
- Nobody is held back once less work is left than the residents had when they began: from then on the longest
  trajectories and their tools decide when the step ends, and the later one begins the later it ends.
- Newcomers are served in the order in which they came, those of a lost engine before them. Among engines with room,
  each goes to the one that would finish its work first, at the pace that it has shown. An engine takes no newcomer that
  it would finish later than all engines together finish everything: a faster engine will have room before.
- Later turns stay where their cache is, with two exceptions (`_keeps`). Where an engine overflows that gives away the
  caches of those that wait for tools, which corrects a promise that was too large; by its own rule the cache would fill
  completely and overflow again. And where an engine is behind the others, which balances lengths that were not known;
  such moves may feed a small share of all tokens again.

Expectations are learned again when as many turns have ended as trajectories are on engines, so the cost of an event
does not grow with their number.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from rocstar.rollout.book import FEED_READS, Book, Resident
from rocstar.rollout.expected import Expectation, LifeTable
from rocstar.rollout.scheduler import Ask, Assignment
from rocstar.types import EngineLoad

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are
MOVED_SHARE = 0.05  # of the tokens sampled: what moves may feed again. 3 to 7% served as well; without a bound
# roomy engines took 10% longer
BEHIND = 1.03  # times the average time to finish: an engine that far back gives trajectories away
SAMPLE = 256  # waiting trajectories from which the mean of their work is taken


class KvScheduler:
    """One for a whole run: what it has learned of lengths and paces serves the next step. Deterministic."""

    def __init__(self, expectation: Expectation | None = None) -> None:
        self._expectation = expectation or LifeTable()
        self._open: dict[str, Resident] = {}
        """Session id -> trajectory, from its first ask until it is closed."""
        self._by_request: dict[str, Resident] = {}
        self._waiting: OrderedDict[str, Resident] = OrderedDict()
        """Without an engine, by session id; the first is next."""
        self._returning: dict[str, Resident] = {}
        """Later turns, by session id."""
        self._books: dict[str, Book] = {}
        self._changed: set[str] = set()
        """Engines where a newcomer might fit that did not before."""
        self._events = self._drawn = self._moved = 0
        self._movable = 0.0
        """Tokens that moves may have caused to be fed again by now; `_moved` have been."""
        self._average = math.inf
        """Mean time for an engine to finish, as `Book.finish` counts."""
        self._each = 0.0
        """Mean of the reads expected of a waiting trajectory."""

    # Facts

    def ask(self, ask: Ask, now: float) -> None:
        resident = self._open.get(ask.session_id)
        response = ask.tokens - ask.prompt_tokens
        if resident is None:
            resident = self._open[ask.session_id] = Resident(ask, self._share())
            self._expectation.begin(response + ask.limit)
        elif resident.engine is not None:
            self._books[resident.engine].fed += response - resident.response
        self._by_request.pop(resident.request_id, None)  # of a turn that was given up before it began
        resident.request_id, resident.asked, resident.response = ask.request_id, ask, response
        self._by_request[ask.request_id] = resident
        if resident.engine is None:
            self._wait(resident)
        else:
            self._returning[ask.session_id] = resident

    def answered(self, request_id: str, tokens: int, now: float) -> None:
        if (resident := self._by_request.pop(request_id, None)) is not None:
            resident.response += tokens
            resident.request_id, resident.since = "", -1.0
            self._events += 1

    def close(self, session_id: str, now: float) -> None:
        if (resident := self._open.pop(session_id, None)) is None:
            return
        self._events += 1
        self._by_request.pop(resident.request_id, None)
        self._waiting.pop(session_id, None)
        self._returning.pop(session_id, None)
        self._expectation.end(resident.response)
        if resident.engine is not None:
            self._changed.add(resident.engine)
            self._books[resident.engine].remove(resident)

    def lose(self, engine: str, now: float) -> None:
        """Trajectories in the middle of a turn wait again now; those that run a tool wait when it has answered."""
        book = self._books.pop(engine, None)
        for resident in reversed(book.residents.values()) if book else ():
            resident.engine, resident.since = None, -1.0
            self._returning.pop(resident.asked.session_id, None)
            if resident.request_id:
                self._wait(resident, first=True)
        self._changed.update(self._books)
        self._changed.discard(engine)
        self._events = len(self._open)  # learn at the next assignment

    # Decisions

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> list[Assignment]:
        if self._waiting and len(self._books) < len(engines):
            self._meet(engines)
        if self._waiting and self._is_idle():
            self._changed.update(engines)
        if not self._returning and not (self._waiting and self._changed):
            return []
        if self._events >= len(self._open) - len(self._waiting):
            self._learn(engines, now)
        found = []
        for resident in [each for each in self._returning.values() if each.engine in engines]:
            del self._returning[resident.asked.session_id]
            book = self._books[resident.engine or ""]
            if self._keeps(resident, book, engines):
                resident.since = book.step
                found.append(Assignment(resident.request_id, book.name))
            else:  # it has to be admitted again
                book.remove(resident)
                self._changed.add(book.name)
                resident.engine = None
                self._wait(resident, first=True)
        if self._waiting and self._changed:
            found += self._admit(engines, now)
        return found

    def _meet(self, engines: Mapping[str, EngineLoad]) -> None:
        """Books for engines that are new or back; one that is away without being lost keeps its own."""
        for name, load in engines.items():
            if name not in self._books:
                self._books[name] = Book(name, load)
                self._changed.add(name)

    def _keeps(self, resident: Resident, book: Book, engines: Mapping[str, EngineLoad]) -> bool:
        """Whether its engine goes on with it; if not, it is admitted again, before newcomers, by any engine. It leaves
        one that overflows and gives idle caches away, where over-committing does not pay; and, while nobody waits, one
        that is behind, if an average engine would finish earlier with it and what it has to feed again, and one has
        room."""
        if len(book.residents) == 1:
            return True
        load = engines[book.name]
        if not load.keeps_idle and book.overflows_at(load) and not book.may_overcommit():
            return False
        tokens = resident.asked.tokens
        if self._waiting or self._moved + tokens > self._movable or book.finish() < BEHIND * self._average:
            return True
        self._meet(engines)
        moved, best = replace(resident, engine=None), min((self._books[name] for name in engines), key=Book.finish)
        self._expect(moved, moved.response)
        work = moved.reads + FEED_READS * tokens
        pays = work < 3 * moved.reads and BEHIND * (self._average + work * book.slowness()) < book.finish()
        if not pays or not self._fits(moved, best, False):
            return True
        self._moved += tokens
        return False

    def _admit(self, engines: Mapping[str, EngineLoad], now: float) -> list[Assignment]:
        self._meet(engines)
        books = [self._books[name] for name in self._changed if name in engines]
        for book in books:
            book.look(engines[book.name], now)
        self._assume_paces()
        order = sorted((book.finish(), book.name) for book in books)
        latest, is_tail = self._finish_of_all(engines) if books else (0.0, False)
        found = []
        while order and self._waiting:
            session, resident = next(iter(self._waiting.items()))
            self._expect(resident, resident.response)
            finish, name = order.pop(0)
            book = self._books[name]
            # The first engine to finish takes the next whatever those that wait were thought to be; when idle all may
            is_late = finish > latest and finish > min(self._books[each].finish() for each in engines)
            if (is_late and not self._is_idle()) or not self._fits(resident, book, is_tail):
                self._changed.discard(name)
                continue
            del self._waiting[session]
            resident.engine, resident.since = name, book.step
            book.add(resident)
            insort(order, (book.finish(), name))
            found.append(Assignment(resident.request_id, name))
        return found

    def _fits(self, resident: Resident, book: Book, is_tail: bool) -> bool:
        """Whether the forecast has room for it; a trajectory alone on an engine needs none. One that is too large
        for every engine goes to any, and that engine refuses it. Where no engine has anything to do, one newcomer is
        admitted anyhow: residents may wait for what newcomers hold, such as connections of an agent's client."""
        if resident.asked.tokens >= book.last.capacity_tokens:
            return all(resident.asked.tokens >= other.last.capacity_tokens for other in self._books.values())
        return is_tail or not book.residents or self._is_idle() or book.takes(resident)

    def _is_idle(self) -> bool:
        """Whether no turn is under way: all that were asked wait for an engine."""
        return len(self._by_request) == len(self._waiting) + len(self._returning)

    # Estimates

    def _wait(self, resident: Resident, *, first: bool = False) -> None:
        if not self._waiting:
            self._changed.update(self._books)
        self._waiting[resident.asked.session_id] = resident
        self._waiting.move_to_end(resident.asked.session_id, last=not first)

    def _share(self) -> float:
        self._drawn += 1
        return self._drawn * GOLDEN % 1.0

    def _expect(self, resident: Resident, response: float) -> None:
        """Its work from here on, and where it is assumed to end: anew while it waits and when it has passed that."""
        session, prompt = resident.asked.session_id, resident.asked.prompt_tokens
        resident.reads = self._expectation.reads(session, response, prompt)
        if resident.engine is not None:
            if response < resident.end:
                return
            resident.share = self._share()
        resident.end = self._expectation.length(session, response, resident.share)

    def _learn(self, engines: Mapping[str, EngineLoad], now: float) -> None:
        """Take in how far all trajectories have come, and forecast again."""
        self._events = 0
        self._meet(engines)
        books = [self._books[name] for name in sorted(engines)]
        for book in books:
            book.look(engines[book.name], now)
        self._expectation.learn(book.length_of(resident) for book in books for resident in book.residents.values())
        for book in books:
            for resident in book.residents.values():
                self._expect(resident, book.length_of(resident))
            book.forecast()
        self._movable = MOVED_SHARE * sum(book.last.produced_tokens for book in books)
        self._average = sum(book.finish() for book in books) / max(1, len(books))
        some = list(islice(self._waiting.values(), 0, None, 1 + len(self._waiting) // SAMPLE))
        for resident in some:
            self._expect(resident, resident.response)
        self._each = sum(resident.reads for resident in some) / max(1, len(some))
        self._changed.update(engines)  # what did not fit may fit by what is expected now

    def _finish_of_all(self, engines: Mapping[str, EngineLoad]) -> tuple[float, bool]:
        """When all work would be done if it were shared out by the paces of the engines, as `Book.finish` counts; and
        whether that is less work than the residents had when they began, counting their tools' time."""
        books = [self._books[name] for name in engines]
        work = sum(book.reads for book in books) + self._each * len(self._waiting)
        begun = self._each * sum(len(book.residents) / book.held for book in books)
        return 1.000001 * work / sum(1.0 / book.slowness() for book in books), work < begun

    def _assume_paces(self) -> None:
        """An engine that is new or back is assumed to be as fast as the others. If it were assumed to be slow, it would
        get little to do, and its true pace would not be seen."""
        known = [book.slowness() for book in self._books.values() if book.pace]
        for book in self._books.values() if known else ():
            book.pace = book.pace or (1.0, len(known) / sum(known))
