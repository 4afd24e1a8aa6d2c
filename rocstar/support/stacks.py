"""Where every asyncio task and every thread of this process stands, as text for a person who looks for a hang."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import defaultdict
from typing import Any

NAMED = 3  # of the tasks that stand in the same place


def all_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Tasks of `loop`, then threads; outermost call first. May be called from any thread, also while the loop is
    blocked: what moves meanwhile may be shown half way."""
    return f"{_tasks(loop)}\n\n{_threads()}\n"


def awaited(task: asyncio.Task[Any]) -> tuple[str, ...]:
    """The coroutines that a task is inside of, outermost first: `Task.get_stack` shows only the first of them."""
    places: list[str] = []
    at: Any = task.get_coro()
    while at is not None:
        frame = _of(at, "frame")
        if frame is not None:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        at = _of(at, "await") or getattr(at, "gi_yieldfrom", None)
    return tuple(places)


def _of(awaitable: Any, what: str) -> Any:
    """The frame of a coroutine or generator, or what it awaits."""
    return next((found for kind in ("cr", "gi", "ag") if (found := getattr(awaitable, f"{kind}_{what}", None))), None)


def _tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Tasks that stand in the same place are told once."""
    standing: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for task in asyncio.all_tasks(loop):
        standing[awaited(task)].append(task.get_name())
    texts = []
    for places, names in sorted(standing.items(), key=lambda item: -len(item[1])):
        more = ", ..." if len(names) > NAMED else ""
        head = f"{len(names)} tasks ({', '.join(sorted(names)[:NAMED])}{more})"
        texts.append("\n".join([head, *(f"  {place}" for place in places)]))
    return "\n\n".join(texts)


def _threads() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
