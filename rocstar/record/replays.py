"""What `rocstar replay` found, as files of the run folder, for the page to read. Nothing is computed here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rocstar.errors import DataError
from rocstar.record.atomic import plain, write_atomic
from rocstar.record.folder import RunFolder, read_json, tell_once
from rocstar.record.identity import versions


def keep(run: RunFolder, step: int | None, found: Mapping[str, Any]) -> None:
    """found: `steps`, all of them (step is None), or what was `tried` of one, which goes beside what was tried before;
    the same settings are replaced. stderr says so where the run folder cannot be written."""
    file = run.replay(step)
    try:
        file.parent.mkdir(exist_ok=True)
        before = read_json(file) if file.is_file() else {}
        tried = {one["settings"]: one for one in (*before.get("tried", ()), *found.get("tried", ()))}
        made = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
        write_atomic(file, json.dumps(plain({**made, **found, "tried": [*tried.values()]})).encode())
    except (DataError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        tell_once(f"{file} cannot be written ({why}), so rocstar view will not show this replay")


def replays_of(run: RunFolder, step: int | None) -> dict[str, Any]:
    """The steps that were tried under other settings; what was tried of one of them (None: the last), without its
    tokens; and `all`: how all steps came out as they were, null where that was not asked. Raises DataError."""
    steps, whole = run.replayed_steps(), run.replay(None)
    shown = steps[-1] if steps and step is None else step
    tried = [
        {**one, "heaviest": [{key: attempt[key] for key in attempt if key != "carried"} for attempt in one["heaviest"]]}
        for one in _tried(run, shown)
    ]
    return {"steps": steps, "step": shown, "tried": tried, "all": read_json(whole) if whole.is_file() else None}


def carried(run: RunFolder, step: int, row: int, settings: str) -> list[float] | None:
    """[T] the share of a step's gradient on each token of an attempt; None where it was not kept. row: of the step's
    rollouts; settings: as the file has them, "" for the run's own. Raises DataError."""
    tried = next((one for one in _tried(run, step) if settings in ("", one["settings"])), {"heaviest": ()})
    return next((one["carried"] for one in tried["heaviest"] if one["row"] == row), None)


def _tried(run: RunFolder, step: int | None) -> Sequence[Mapping[str, Any]]:
    """The run's own settings first."""
    found: Sequence[Mapping[str, Any]] = read_json(run.replay(step))["tried"] if step in run.replayed_steps() else ()
    return found
