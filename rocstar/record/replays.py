"""What `rocstar replay` found, as files of the run folder, for the page to read. Nothing is computed here."""

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
    """found: `steps`, all of them (step is None), or what was `tried` of one, which goes beside what the same versions
    tried before; the same settings are replaced. stderr says so where the run folder cannot be written."""
    file, made = run.replay(step), {"made": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    try:
        file.parent.mkdir(exist_ok=True)
        before = _before(run, step)
        others = before["tried"] if before.get("versions") == made["versions"] else ()
        tried = {one["settings"]: one for one in (*others, *found.get("tried", ()))}
        write_atomic(file, json.dumps(plain({**made, **found, "tried": [*tried.values()]})).encode())
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
    """The steps that were tried under other settings; what was tried of one of them (None: the last), without its
    tokens; and `all`: how all steps came out as they were, null where that was not asked. Raises DataError."""
    steps, whole = run.replayed_steps(), run.replay(None)
    shown = steps[-1] if steps and step is None else step
    tried = [
        {**one, "heaviest": [{key: attempt[key] for key in attempt if key != "carried"} for attempt in one["heaviest"]]}
        for one in ([] if shown is None else _read(run, shown)["tried"])
    ]
    return {"steps": steps, "step": shown, "tried": tried, "all": read_json(whole) if whole.is_file() else None}


def carried(run: RunFolder, step: int, row: int, settings: str) -> list[float] | None:
    """[T] the share of a step's gradient on each token of an attempt; None where it was not kept. row: of the step's
    rollouts; settings: as the file has them, "" for the run's own. A file that holds something else has none; the
    replays view says so."""
    with suppress(DataError):
        known = _read(run, step)["tried"]
        tried = next((one for one in known if settings in ("", one["settings"])), {"heaviest": ()})
        return next((one["carried"] for one in tried["heaviest"] if one["row"] == row), None)
    return None


def _read(run: RunFolder, step: int) -> Mapping[str, Any]:
    """What was kept of a step, of what was `tried` the run's own settings first; empty where nothing was. Raises
    DataError."""
    file = run.replay(step)
    found = read_json(file) if file.is_file() else {"tried": []}
    if not isinstance(found.get("tried"), list) or not all(map(_is_tried, found["tried"])):
        raise DataError(f"{file} is not what rocstar replay writes; delete it and replay the step again")
    return found


def _is_tried(one: Any) -> bool:
    heaviest = one.get("heaviest") if isinstance(one, dict) and isinstance(one.get("settings"), str) else None
    return isinstance(heaviest, list) and all(isinstance(i, dict) and i.keys() >= {"row", "carried"} for i in heaviest)
