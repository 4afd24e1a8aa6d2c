"""The schedulers that can be simulated, by name: ours, and those that others use, behind the same seam as yardsticks.

The four of others keep a trajectory on the engine of its first turn while that engine is there (sticky sessions), and
serve newcomers in the order in which they came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rocstar.errors import ConfigError
from rocstar.forecast.workload import PlannedAttempt
from rocstar.rollout.expected import LifeTable
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.rollout.scheduler import Ask, Scheduler
from rocstar.types import EngineLoad


class _Sticky:
    """What the four share; each says which engine a newcomer gets, or that it has to wait."""

    def __init__(self) -> None:
        self._newcomers: dict[str, Ask] = {}
        self._later: dict[str, Ask] = {}
        self._open: dict[str, Ask] = {}
        """Asks by request id: without an engine yet, waiting to return to their engine, and being worked on."""
        self._request: dict[str, str] = {}
        """Session id -> its only request."""
        self._home: dict[str, str] = {}
        """Session id -> engine."""
        self._full: frozenset[str] = frozenset()
        """The engines that had no room for a newcomer; nothing has been freed since."""

    def ask(self, ask: Ask, now: float) -> None:
        self._request[ask.session_id] = ask.request_id
        waiting = self._later if ask.session_id in self._home else self._newcomers
        waiting[ask.request_id] = ask

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> dict[str, str]:
        homes = {request: self._home[ask.session_id] for request, ask in self._later.items()}
        found = {request: home for request, home in homes.items() if home in engines}
        for request in found:
            self._open[request] = self._later.pop(request)
        while self._newcomers and engines and (not self._full or self._full != frozenset(engines)):
            ask = next(iter(self._newcomers.values()))
            if (home := self._choose(ask, engines)) is None:
                self._full = frozenset(engines)
                break
            self._home[ask.session_id] = home
            self._open[ask.request_id] = self._newcomers.pop(ask.request_id)
            found[ask.request_id] = home
        return found

    def answered(self, request_id: str, tokens: int, now: float) -> None:
        if (ask := self._open.pop(request_id, None)) is not None:
            del self._request[ask.session_id]

    def close(self, session_id: str, now: float) -> None:
        if (request := self._request.pop(session_id, None)) is not None:
            for asks in (self._newcomers, self._later, self._open):
                asks.pop(request, None)
        if (home := self._home.pop(session_id, None)) is not None:
            self._released(session_id, home)
            self._full = frozenset()

    def lose(self, engine: str, now: float) -> None:
        lost = [session for session, home in self._home.items() if home == engine]
        again: dict[str, Ask] = {}
        self._full = frozenset()
        for session in lost:
            self._released(session, self._home.pop(session))
            request = self._request.get(session, "")
            if (ask := self._open.pop(request, None) or self._later.pop(request, None)) is not None:
                again[request] = ask
        self._newcomers = again | self._newcomers

    def _choose(self, ask: Ask, engines: Mapping[str, EngineLoad]) -> str | None:
        raise NotImplementedError

    def _released(self, session_id: str, engine: str) -> None:
        """A trajectory has left its engine."""


class StaticSplit(_Sticky):
    """Problems are dealt out to the engines, all siblings of one together (verl 0.2, paper 3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self._number: dict[str, int] = {}
        """Group -> how many came before it."""

    def _choose(self, ask: Ask, engines: Mapping[str, EngineLoad]) -> str | None:
        names = sorted(engines)
        return names[self._number.setdefault(ask.group, len(self._number)) % len(names)]


class RoundRobin(_Sticky):
    """Attempts are dealt out one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._dealt = 0

    def _choose(self, ask: Ask, engines: Mapping[str, EngineLoad]) -> str | None:
        names = sorted(engines)
        self._dealt += 1
        return names[(self._dealt - 1) % len(names)]


class LeastRequests(_Sticky):
    """The engine with the fewest trajectories. verl's stock balancer does the same but never counts
    down."""

    def __init__(self) -> None:
        super().__init__()
        self._open_at: Counter[str] = Counter()

    def _choose(self, ask: Ask, engines: Mapping[str, EngineLoad]) -> str | None:
        chosen = min(sorted(engines), key=self._open_at.__getitem__)
        self._open_at[chosen] += 1
        return chosen

    def _released(self, session_id: str, engine: str) -> None:
        self._open_at[engine] -= 1


class WorstCase(_Sticky):
    """The authors' rule: a trajectory reserves prompt + cap for its whole life on the engine with the most capacity
    left, and waits where none has enough (their verl fork). Theirs polls; here waiters are served in
    order. A trajectory larger than an empty engine gets that engine alone."""

    def __init__(self) -> None:
        super().__init__()
        self._reserved: dict[str, int] = {}
        """Session id -> tokens."""
        self._reserved_at: Counter[str] = Counter()
        self._capacity: dict[str, int] = {}

    def _choose(self, ask: Ask, engines: Mapping[str, EngineLoad]) -> str | None:
        need = ask.tokens + ask.limit
        for name in engines.keys() - self._capacity.keys():
            self._capacity[name] = engines[name].capacity_tokens
        left = {name: self._capacity[name] - self._reserved_at[name] for name in sorted(engines)}
        chosen = max(left, key=left.__getitem__)
        if left[chosen] < need and self._reserved_at[chosen]:
            return None
        self._reserved[ask.session_id] = need
        self._reserved_at[chosen] += need
        return chosen

    def _released(self, session_id: str, engine: str) -> None:
        self._reserved_at[engine] -= self._reserved.pop(session_id)

    def lose(self, engine: str, now: float) -> None:
        super().lose(engine, now)
        self._capacity.pop(engine, None)


class Clairvoyant(LifeTable):
    """Knows every length beforehand: what no scheduler can know, as a yardstick for those that learn."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        super().__init__()
        self._lengths = lengths

    def reads(self, session_id: str, response: float, prompt: int) -> float:
        length = self._lengths[session_id]
        return max(1.0, length - response) * (prompt + (length + response) / 2)

    def length(self, session_id: str, response: float, share: float) -> float:
        return max(response + 1.0, self._lengths[session_id])


OURS, CLAIRVOYANT = "rocstar", "clairvoyant"
SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "static": StaticSplit,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "worst-case": WorstCase,
    OURS: KvScheduler,
}
POLICIES = (*SCHEDULERS, CLAIRVOYANT)


def scheduler(policy: str, steps: Sequence[Sequence[PlannedAttempt]]) -> Scheduler:
    """A new scheduler. `steps` is what will be simulated with it; only the clairvoyant one reads it. Raises
    ConfigError."""
    if policy in SCHEDULERS:
        return SCHEDULERS[policy]()
    if policy != CLAIRVOYANT:
        raise ConfigError(f"there is no policy {policy!r}; choose of {', '.join(POLICIES)}")
    ends = {
        f"{number}/{index}": attempt.response_tokens
        for number, attempts in enumerate(steps)
        for index, attempt in enumerate(attempts)
    }
    return KvScheduler(Clairvoyant(ends))
