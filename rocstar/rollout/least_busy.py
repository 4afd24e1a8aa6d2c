"""The simplest scheduler that does: every ask starts at once, a trajectory stays on its engine, and a new one goes
where fewest turns run. It knows nothing of memory; an engine that is full lets its requests wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rocstar.rollout.scheduler import Ask, Assignment
from rocstar.types import EngineLoad


class LeastBusy:
    def __init__(self) -> None:
        self._waiting: dict[str, Ask] = {}
        self._running: dict[str, tuple[Ask, str]] = {}
        self._home: dict[str, str] = {}
        """Engine by session."""

    def ask(self, ask: Ask, now: float) -> None:
        self._waiting[ask.request_id] = ask

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> list[Assignment]:
        busy = Counter({name: 0 for name in engines})
        busy.update(name for _, name in self._running.values() if name in engines)
        made = [self._place(ask, busy) for ask in self._waiting.values()] if engines else []
        self._waiting = {} if engines else self._waiting
        return made

    def answered(self, request_id: str, tokens: int, now: float) -> None:
        self._running.pop(request_id, None)

    def close(self, session_id: str, now: float) -> None:
        self._home.pop(session_id, None)
        self._waiting = {name: ask for name, ask in self._waiting.items() if ask.session_id != session_id}
        self._running = {name: pair for name, pair in self._running.items() if pair[0].session_id != session_id}

    def lose(self, engine: str, now: float) -> None:
        lost = {name: ask for name, (ask, home) in self._running.items() if home == engine}
        self._running = {name: pair for name, pair in self._running.items() if name not in lost}
        self._home = {session: home for session, home in self._home.items() if home != engine}
        self._waiting.update(lost)

    def _place(self, ask: Ask, busy: Counter[str]) -> Assignment:
        name = self._home.get(ask.session_id, "")
        if name not in busy:
            name = min(busy, key=lambda each: (busy[each], each))
        busy[name] += 1
        self._home[ask.session_id] = name
        self._running[ask.request_id] = (ask, name)
        return Assignment(ask.request_id, name)
