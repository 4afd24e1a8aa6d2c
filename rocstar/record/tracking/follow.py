"""Reading a run's metrics while they are written, and handing each step on once.

A resumed run rewrites what came after its checkpoint, with the same values; steps that were handed on are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.journal import Tail

POLL_SECONDS = 1.0


class Sink(Protocol):
    """Where metrics go. Errors of the library behind it pass through."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The numbers of one step, by name."""
        ...

    def close(self) -> None:
        """Whatever was logged has arrived when this returns."""
        ...


def follow(folder: RunFolder, name: str, sink: Sink, wait: Callable[[float], bool]) -> int:
    """Hand on every step there is, then those to come, until `wait` says that no more will; the last step.

    wait: sleeps up to so many seconds, and says whether the run goes on. Where it stopped is kept in
    `tracking/<name>.json`, so that a second start goes on from there. Raises OSError."""
    place = state_file(folder, name)
    sent: int = read_json(place)["step"] if place.exists() else 0
    tail = Tail(folder.metrics)
    while True:
        going_on = wait(POLL_SECONDS)
        _, lines = tail.fresh()
        for row in map(json.loads, lines):
            if row["step"] > sent:
                sink.log(row["step"], _numbers(row))
                sent = row["step"]
        place.parent.mkdir(exist_ok=True)
        write_json(place, {"step": sent})
        if not going_on:
            return sent


def state_file(folder: RunFolder, name: str) -> Path:
    """How far a tracker came."""
    return folder.path / "tracking" / f"{name}.json"


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Without what names the step, and without what is not a number."""
    left_out = ("step", "stage")
    numbers = {key: value for key, value in row.items() if key not in left_out and isinstance(value, int | float)}
    return {key: float(value) for key, value in numbers.items() if not isinstance(value, bool)}
