"""rocstar's scheduler: it fills an engine by the cache that its trajectories are expected to need, not by their number.

- A newcomer is admitted where the expected peak of the cache, with it, fits; `book.py` forecasts it. Room is not kept
  for the longest case: each trajectory is assumed to end at a quantile of the lengths expected of it, and quantiles are
  spread evenly over trajectories, so that together they end as such trajectories do.
- Newcomers are served in the order in which they came. Among engines with room, each goes to the one that would finish
  its work first, at the pace that it has shown. An engine takes no newcomer that it would finish later than all engines
  together finish everything: a faster engine will have room before.
- More than fits is admitted where that pays (`Book.takes`), and when less is left than the trajectories on engines had
  to do at their start: from then on the longest of them decide when the step ends, and nobody is held back.
- Later turns stay where their cache is. Where more is expected than an engine can hold, a trajectory that returns from
  its tool waits to be admitted again, before newcomers, and so do those of a lost engine.

Expectations are learned again when as many turns have ended as trajectories are on engines, so the cost of an event
does not grow with their number.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice

from rocstar.rollout.book import Book, Resident
from rocstar.rollout.expected import Expectation, LifeTable
from rocstar.rollout.scheduler import Ask, Assignment
from rocstar.types import EngineLoad

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are
SAMPLE = 256  # waiting trajectories from which the mean of their work is taken


class KvScheduler:
    """One for a whole run: what it has learned of lengths and paces serves the next step. Deterministic."""

    def __init__(self, expectation: Expectation | None = None) -> None:
        self._expectation = expectation or LifeTable()
        self._open: dict[str, Resident] = {}
        """Session id -> trajectory, from its first ask until it is closed."""
        self._by_request: dict[str, Resident] = {}
        self._waiting: OrderedDict[str, Resident] = OrderedDict()
        """Session id -> trajectory without an engine; the first is next."""
        self._returning: dict[str, Resident] = {}
        """Session id -> trajectory that asks for a later turn."""
        self._books: dict[str, Book] = {}
        self._changed: set[str] = set()
        """Engines where a newcomer might fit that did not before."""
        self._events = self._drawn = 0
        self._each = 0.0
        """Mean of the reads expected of a waiting trajectory."""

    def ask(self, ask: Ask, now: float) -> None:
        resident = self._open.get(ask.session_id)
        response = ask.tokens - ask.prompt_tokens
        if resident is None:
            resident = self._open[ask.session_id] = Resident(ask)
            self._expectation.begin(response + ask.limit)
        elif resident.engine is not None:
            self._books[resident.engine].fed += response - resident.response
        self._by_request.pop(resident.request_id, None)  # of a turn that was given up before it began
        resident.request_id, resident.asked, resident.response = ask.request_id, ask, response
        self._by_request[ask.request_id] = resident
        if resident.engine is None:
            self._wait([resident])
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
        lost = list(book.residents.values()) if book else []
        for resident in lost:
            resident.engine, resident.since = None, -1.0
            self._returning.pop(resident.asked.session_id, None)
        self._wait([resident for resident in lost if resident.request_id], first=True)
        self._events = len(self._open)  # learn at the next assignment

    # Decisions

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> list[Assignment]:
        if self._waiting and len(self._books) < len(engines):
            self._meet(engines)
        if not self._returning and not (self._waiting and self._changed):
            return []
        if self._events >= len(self._open) - len(self._waiting):
            self._learn(engines, now)
        found = []
        for resident in [each for each in self._returning.values() if each.engine in engines]:
            del self._returning[resident.asked.session_id]
            book = self._books[resident.engine or ""]
            if not book.overfull:
                resident.since = book.step_at(now)
                found.append(Assignment(resident.request_id, book.name))
                continue
            book.remove(resident)
            resident.engine = None
            self._wait([resident], first=True)
            self._changed.update(self._books)
        return found + self._admit(engines, now)

    def _meet(self, engines: Mapping[str, EngineLoad]) -> None:
        """Books for engines that are new or back; one that is away without being lost keeps its own."""
        for name in engines.keys() - self._books.keys():
            self._books[name] = Book(name, engines[name])
            self._changed.add(name)

    def _admit(self, engines: Mapping[str, EngineLoad], now: float) -> list[Assignment]:
        books = [self._books[name] for name in self._changed if name in engines] if self._waiting else []
        if not books:
            return []
        for book in books:
            book.look(engines[book.name], now)
        self._assume_paces()
        order = sorted((book.finish(), book.name) for book in books)
        latest, nobody_waits = self._finish_of_all(engines)
        found = []
        while order and self._waiting:
            session, resident = next(iter(self._waiting.items()))
            self._expect(resident, resident.response)
            finish, name = order.pop(0)
            book = self._books[name]
            if finish > latest or not self._fits(resident, book, nobody_waits):
                self._changed.discard(name)
                continue
            del self._waiting[session]
            resident.engine, resident.since = name, book.step
            book.add(resident)
            insort(order, (book.finish(), name))
            found.append(Assignment(resident.request_id, name))
        return found

    def _fits(self, resident: Resident, book: Book, nobody_waits: bool) -> bool:
        """Whether the forecast has room for it; a trajectory alone on an engine needs none. One that is too large
        for every engine goes to any, and that engine refuses it."""
        if resident.asked.tokens >= book.last.capacity_tokens:
            return all(resident.asked.tokens >= other.last.capacity_tokens for other in self._books.values())
        return nobody_waits or not book.residents or book.takes(resident)

    # Estimates

    def _wait(self, residents: Sequence[Resident], *, first: bool = False) -> None:
        if not self._waiting:
            self._changed.update(self._books)
        for resident in reversed(residents):
            self._waiting[resident.asked.session_id] = resident
            self._waiting.move_to_end(resident.asked.session_id, last=not first)

    def _expect(self, resident: Resident, response: float) -> None:
        """Its work from here on, and where it is assumed to end."""
        session, prompt = resident.asked.session_id, resident.asked.prompt_tokens
        resident.reads = self._expectation.reads(session, response, prompt)
        passed = resident.engine is not None and response >= resident.end
        if passed or resident.share < 0:
            self._drawn += 1
            resident.share = self._drawn * GOLDEN % 1.0
        if passed or resident.engine is None:
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
        some = list(islice(self._waiting.values(), 0, None, 1 + len(self._waiting) // SAMPLE))
        for resident in some:
            self._expect(resident, resident.response)
        self._each = sum(resident.reads for resident in some) / max(1, len(some))
        self._changed.update(engines)  # what did not fit may fit by what is expected now

    def _finish_of_all(self, engines: Mapping[str, EngineLoad]) -> tuple[float, bool]:
        """When all work would be done if it were shared out by the paces of the engines, as `Book.finish` counts (the
        first of them finishes no later, so it takes the next trajectory); and whether that is less than the residents
        had to do when they began, with their tools' time."""
        books = [self._books[name] for name in engines]
        work = sum(book.reads for book in books) + self._each * len(self._waiting)
        begun = sum(len(book.residents) / book.active for book in books)
        return 1.000001 * work / sum(1.0 / book.slowness() for book in books), work < self._each * begun

    def _assume_paces(self) -> None:
        """An engine that is new or back is assumed to be as fast as the others. If it were assumed to be slow, it would
        get little to do, and its true pace would not be seen."""
        known = [book.slowness() for book in self._books.values() if book.pace]
        for book in self._books.values() if known else ():
            book.pace = book.pace or (1.0, len(known) / sum(known))
