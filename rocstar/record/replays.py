"""The results of `rocstar replay` as files of the run folder, for the web page. Nothing is computed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from rocstar.errors import DataError
from rocstar.record.atomic import plain, write_atomic
from rocstar.record.folder import RunFolder, read_json, tell_once
from rocstar.record.identity import versions


def keep(run: RunFolder, step: int | None, found: Mapping[str, Any]) -> None:
    """Store results: `steps`, all of them (step is None), or those `tried` of one step, which are added to earlier ones
    of the same versions; equal settings are replaced. Warns on stderr if the run folder cannot be written."""
    file, origin = run.replay(step), {"made": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    try:
        file.parent.mkdir(exist_ok=True)
        before = _before(run, step)
        others = before["tried"] if before.get("versions") == origin["versions"] else ()
        tried = {one["settings"]: one for one in (*others, *found.get("tried", ()))}
        write_atomic(file, json.dumps(plain({**origin, **found, "tried": [*tried.values()]})).encode())
    except OSError as error:
        why = error.strerror or error
        tell_once(f"{file} cannot be written ({why}), so rocstar view will not show this replay")


def _before(run: RunFolder, step: int | None) -> Mapping[str, Any]:
    try:
        return {} if step is None else _read(run, step)
    except DataError as error:
        tell_once(f"{error}; it is replaced")
        return {}


def replays_of(run: RunFolder, step: int | None) -> dict[str, Any]:
    """The steps replayed under other settings; the results of one of them (None: the last), without tokens; and `all`:
    the results of the unchanged replay of all steps, null if there was none. Raises DataError."""
    steps, whole = run.replayed_steps(), run.replay(None)
    shown = steps[-1] if steps and step is None else step
    tried = [
        {**one, "heaviest": [{key: attempt[key] for key in attempt if key != "carried"} for attempt in one["heaviest"]]}
        for one in ([] if shown is None else _read(run, shown)["tried"])
    ]
    return {"steps": steps, "step": shown, "tried": tried, "all": read_json(whole) if whole.is_file() else None}


def carried(run: RunFolder, step: int, row: int, settings: str) -> list[float] | None:
    """[T] the share of a step's gradient on each token of an attempt; None if it was not stored or the file is invalid,
    which the replays view reports. row: of the step's rollouts; settings: as in the file, "" for the run's own."""
    with suppress(DataError):
        known = _read(run, step)["tried"]
        tried = next((one for one in known if settings in ("", one["settings"])), {"heaviest": ()})
        return next((one["carried"] for one in tried["heaviest"] if one["row"] == row), None)
    return None


def _read(run: RunFolder, step: int) -> Mapping[str, Any]:
    """The stored results of a step, in `tried` the run's own settings first; empty if there are none. Raises
    DataError."""
    file = run.replay(step)
    found = read_json(file) if file.is_file() else {"tried": []}
    if not isinstance(found.get("tried"), list) or not all(map(_is_tried, found["tried"])):
        raise DataError(f"{file} is not a file of rocstar replay; delete it and replay the step again")
    return found


def _is_tried(one: Any) -> bool:
    heaviest = one.get("heaviest") if isinstance(one, dict) and isinstance(one.get("settings"), str) else None
    return isinstance(heaviest, list) and all(isinstance(i, dict) and i.keys() >= {"row", "carried"} for i in heaviest)
