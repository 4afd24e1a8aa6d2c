"""rocstar's scheduler: it fills an engine by the cache that its trajectories are expected to need, not by their number.

- A newcomer is admitted where the expected peak of the cache, with it, fits; `book.py` forecasts it. Room is not kept
  for the longest case: each trajectory is assumed to end at a quantile of the lengths expected of it, and quantiles are
  spread evenly over trajectories, so that together they end as such trajectories do.
- Newcomers are served in the order in which they came, those of a lost engine before them. Taking the longest expected
  first brings less than 1% (docs/rollouts.md).
- Among engines with room, a newcomer goes to the one that would finish its work first, at the pace that it has shown.
  Where that is nearly equal, siblings are spread over engines: they have similar lengths, so that balances lengths
  that are not known yet. The cost is one prompt fed on each engine, a few hundredths of one attempt's work.
- An engine takes no newcomer that it would finish later than all engines together finish everything: a faster engine
  will have room before.
- More than fits is admitted where that pays. A schedule can save only the fixed cost of steps and the tokens that are
  fed again. One of n residents saves an n-th of a step's fixed cost with each token, until the cache is expected to be
  full; then a resident is evicted, and its tokens are fed again (`Book.takes`).
- Later turns stay where their cache is. Where over-committing does not pay, a trajectory that returns to an engine that
  overflows has to be admitted again, before newcomers. So the scheduler corrects a promise that was too large; by the
  engine's own rule the cache would fill completely and overflow again.
- Otherwise a trajectory may move at the start of a turn only when no newcomer waits and its engine is behind
  the others or has evicted, if what is still to come outweighs what has to be fed again. These moves together feed at
  most 1% of what is sampled. They are for engines of unequal pace (docs/rollouts.md).

Expectations are learned again when as many turns have ended as trajectories are on engines, so the cost of an event
does not grow with their number.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice

from rocstar.rollout.book import FEED_READS, Book, Resident
from rocstar.rollout.expected import Expectation, LifeTable
from rocstar.rollout.scheduler import Ask, Assignment
from rocstar.types import EngineLoad

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are
MOVED_SHARE = 0.01  # of the tokens sampled and expected: what moves may feed again
BEHIND = 1.03  # times the average time to finish: an engine that far back gives trajectories away
NEAR = 4  # engines looked at for a newcomer
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
        self._behind: set[str] = set()
        """Engines that give trajectories away."""
        self._events = self._drawn = self._moved_tokens = 0
        self._movable = 0.0
        """Tokens that moves may have caused to be fed again by now."""
        self._each = 0.0
        """Mean of the reads expected of a waiting trajectory."""

    # Facts

    def ask(self, ask: Ask, now: float) -> None:
        resident = self._open.get(ask.session_id)
        if resident is None:
            resident = self._newcomer(ask)
        elif resident.engine is not None:
            self._books[resident.engine].fed += ask.tokens - ask.prompt_tokens - resident.response
        if resident.request_id:  # of a turn that was given up before it began
            self._by_request.pop(resident.request_id, None)
        resident.request_id, resident.asked, resident.response = ask.request_id, ask, ask.tokens - ask.prompt_tokens
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
        self._expectation.end(resident.kin, resident.response)
        if resident.engine is not None:
            self._changed.add(resident.engine)
            self._books[resident.engine].remove(resident)

    def lose(self, engine: str, now: float) -> None:
        """Trajectories in the middle of a turn wait again now; those that run a tool wait when it has answered."""
        book = self._books.pop(engine, None)
        for resident in reversed(book.residents.values()) if book else ():
            resident.engine, resident.since = None, -1.0
            self._returning.pop(resident.session_id, None)
            if resident.request_id:
                self._wait(resident)
                self._waiting.move_to_end(resident.session_id, last=False)
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
        for resident in self._here(engines) if self._returning else ():
            book = self._books[resident.engine or ""]
            if self._keeps(resident, book, engines[book.name]):
                if book.name in self._behind:
                    book = self._rehome(resident, book, engines)
                resident.since = book.step_at(now)
                found.append(Assignment(resident.request_id, book.name))
        if self._waiting and self._changed:
            found += self._admit(engines, now)
        return found

    def _meet(self, engines: Mapping[str, EngineLoad]) -> None:
        """Books for engines that are new or back; one that is away without being lost keeps its own."""
        for name, load in engines.items():
            if name not in self._books:
                self._books[name] = Book(name, load)
                self._changed.add(name)

    def _here(self, engines: Mapping[str, EngineLoad]) -> list[Resident]:
        """Returning trajectories whose engine is up."""
        here = [resident for resident in self._returning.values() if resident.engine in engines]
        for resident in here:
            del self._returning[resident.session_id]
        return here

    def _keeps(self, resident: Resident, book: Book, load: EngineLoad) -> bool:
        """Whether its engine goes on with it. Where over-committing does not pay, a trajectory that returns to an
        engine that overflows waits to be admitted again."""
        if len(book.residents) == 1 or not book.overflows_at(load) or book.may_overcommit():
            return True
        book.remove(resident)
        self._changed.add(book.name)
        resident.engine = None
        self._wait(resident)
        self._waiting.move_to_end(resident.session_id, last=False)
        return False

    def _rehome(self, resident: Resident, home: Book, engines: Mapping[str, EngineLoad]) -> Book:
        """Move a trajectory to the engine that finishes first, if that pays; returns the book of its engine."""
        tokens = resident.asked.tokens
        if self._waiting or self._moved_tokens + tokens > self._movable:
            return home
        self._meet(engines)
        best = min((self._books[name] for name in engines), key=Book.finish)
        self._expect(resident)
        work = resident.reads + FEED_READS * tokens
        is_expensive = work > 3 * resident.reads
        if is_expensive or best.finish(work) * BEHIND > home.finish() or not self._fits(resident, best):
            return home
        home.remove(resident)
        self._moved_tokens += tokens
        self._settle(resident, best)
        return best

    def _admit(self, engines: Mapping[str, EngineLoad], now: float) -> list[Assignment]:
        self._meet(engines)
        books = [self._books[name] for name in self._changed if name in engines]
        for book in books:
            book.look(engines[book.name], now)
        if not books:
            return []
        self._assume_paces()
        order = sorted((book.finish(), book.name) for book in books)
        latest = self._finish_of_all(engines)
        found = []
        while order and self._waiting:
            resident = next(iter(self._waiting.values()))
            self._expect(resident)
            _, name = place = self._among(order, resident)
            order.remove(place)
            book = self._books[name]
            is_late = book.finish() > latest and not (self._is_idle() or self._is_first(book, engines))
            if is_late or not self._fits(resident, book):
                self._changed.discard(name)
                continue
            del self._waiting[resident.session_id]
            self._settle(resident, book)
            insort(order, (book.finish(), name))
            resident.since = book.step
            found.append(Assignment(resident.request_id, name))
        return found

    def _among(self, order: list[tuple[float, str]], resident: Resident) -> tuple[float, str]:
        """The first to finish; or, of those later by less than this trajectory's work, that with fewest siblings."""
        latest = order[0][0] + resident.reads
        best, fewest = order[0], len(self._open)
        for place in order[:NEAR]:
            if place[0] > latest:
                break
            siblings = self._books[place[1]].groups.get(resident.group, 0)
            if siblings < fewest:
                best, fewest = place, siblings
        return best

    def _fits(self, resident: Resident, book: Book) -> bool:
        """Whether the forecast has room for it; a trajectory alone on an engine needs none. One that is too large
        for every engine goes to any, and that engine refuses it. Where no engine has anything to do, one newcomer is
        admitted anyhow: residents may wait for what newcomers hold, such as connections of an agent's client."""
        if resident.asked.tokens >= book.last.capacity_tokens:
            return all(resident.asked.tokens >= other.last.capacity_tokens for other in self._books.values())
        return not book.residents or self._is_idle() or book.takes(resident)

    def _is_idle(self) -> bool:
        """Whether no turn is under way: all that were asked wait for an engine."""
        return len(self._by_request) == len(self._waiting) + len(self._returning)

    # Estimates

    def _newcomer(self, ask: Ask) -> Resident:
        limit = ask.tokens - ask.prompt_tokens + ask.limit
        resident = Resident(ask.session_id, ask.group, ask.prompt_tokens, ask, limit)
        resident.kin = self._expectation.begin(ask.session_id, ask.group, limit)
        resident.share = self._share()
        self._open[ask.session_id] = resident
        return resident

    def _wait(self, resident: Resident) -> None:
        if not self._waiting:
            self._changed.update(self._books)
        self._waiting[resident.session_id] = resident

    def _share(self) -> float:
        self._drawn += 1
        return self._drawn * GOLDEN % 1.0

    def _expect(self, resident: Resident) -> None:
        """Its work from here on, and where it is assumed to end."""
        expectation, kin = self._expectation, resident.kin
        resident.reads = expectation.reads(kin, resident.response, resident.prompt)
        resident.end = expectation.length(kin, resident.response, resident.share)

    def _settle(self, resident: Resident, book: Book) -> None:
        resident.engine = book.name
        book.fed += resident.asked.tokens - (resident.prompt if resident.group in book.groups else 0)
        book.add(resident, resident.response)

    def _learn(self, engines: Mapping[str, EngineLoad], now: float) -> None:
        """Take in how far all trajectories have come, and forecast again."""
        self._events = 0
        self._meet(engines)
        books = [self._books[name] for name in sorted(engines)]
        for book in books:
            book.look(engines[book.name], now)
        live = [book.responses() for book in books]
        self._expectation.learn((resident.kin, response) for found in live for resident, response in found)
        for book, found in zip(books, live, strict=True):
            self._expect_anew(found)
            book.forecast(found)
        self._movable = MOVED_SHARE * sum(book.last.produced_tokens + book.ends for book in books)
        self._each = self._mean_reads()
        self._changed.update(engines)  # what did not fit may fit by what is expected now
        average = sum(book.finish() for book in books) / max(1, len(books))
        evicted = {book.name for book in books if book.settle()}
        self._behind = {book.name for book in books if book.finish() > BEHIND * average} | evicted

    def _mean_reads(self) -> float:
        """Mean of the reads of waiting trajectories, from a sample."""
        some = list(islice(self._waiting.values(), 0, None, 1 + len(self._waiting) // SAMPLE))
        for resident in some:
            self._expect(resident)
        return sum(resident.reads for resident in some) / max(1, len(some))

    def _finish_of_all(self, engines: Mapping[str, EngineLoad]) -> float:
        """When all work would be done if it were shared out by the paces of the engines; as `Book.finish` counts."""
        books = [self._books[name] for name in engines]
        work = sum(book.reads for book in books) + self._each * len(self._waiting)
        return 1.000001 * work / sum(1.0 / book.pace.slowness() for book in books)

    def _is_first(self, book: Book, engines: Mapping[str, EngineLoad]) -> bool:
        """Whether no engine would finish before it. There is always one, which takes the next trajectory whatever the
        work of those that wait was thought to be."""
        return all(book.finish() <= self._books[name].finish() for name in engines)

    def _assume_paces(self) -> None:
        """An engine that is new or back is assumed to be as fast as the others. If it were assumed to be slow, it would
        get little to do, and its true pace would not be seen."""
        unknown = [book for book in self._books.values() if not book.pace.is_known]
        known = [book.pace.slowness() for book in self._books.values() if book.pace.is_known] if unknown else []
        for book in unknown if known else ():
            book.pace.assume(sum(known) / len(known))

    def _expect_anew(self, found: Iterable[tuple[Resident, float]]) -> None:
        """Update the work and the ends of these trajectories; an end that has been passed is drawn again."""
        expectation = self._expectation
        for resident, response in found:
            resident.reads = expectation.reads(resident.kin, response, resident.prompt)
            if response >= resident.end:
                resident.share = self._share()
                resident.end = expectation.length(resident.kin, response, resident.share)
