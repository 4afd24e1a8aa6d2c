"""How a run stands: `running`, `finished`, `stopped` or `failed`, and why it failed. The words of
`runs list`, `runs show` and the page.

Not here: how many steps are done (show.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal, read_journal
from rocstar.record.lock import is_written

ENDED = "ended"
"""The event of a run that an error ended; a resumed run writes others after it."""
QUIET_SECONDS = 900.0  # a run elsewhere that wrote nothing for so long is called stopped


def note_failure(run: RunFolder, reason: str) -> None:
    """Keep the sentence that a run ends with. Only for the holder of its lock. Raises OSError."""
    with Journal(run.events) as events:
        events.append({"time": round(time.time(), 3), "event": ENDED, "reason": reason})


def state_of(run: RunFolder) -> str:
    """A run on another machine is running while it writes. Raises DataError."""
    if run.summary.exists():
        return "finished"
    writing = is_written(run.path)
    if writing is None:
        writing = time.time() - run.last_active / 1e9 < QUIET_SECONDS and not failure_of(run)
    if writing:
        return "running"
    return "failed" if failure_of(run) else "stopped"


def failure_of(run: RunFolder) -> str | None:
    """The sentence that a run ended with; None unless an error ended it. Raises DataError."""
    return failure_in(read_journal(run.events))


def failure_in(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The same from its events."""
    return str(events[-1].get("reason")) if events and events[-1].get("event") == ENDED else None
