"""What there is to look at below a folder: runs, and evaluations that belong to no run. A name in a URL is one of
this list, or a single name of a folder that holds a run: it leads nowhere else.

Not here: what an attempt says (index.py, attempt.py) and metrics over steps (curves.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rocstar.config.tree import flat
from rocstar.errors import ConfigError, DataError
from rocstar.record.evaluations import RESULT, find_evaluation, is_evaluation, owner_of
from rocstar.record.folder import RunFolder, list_runs, read_json, step_of
from rocstar.record.journal import read_journal
from rocstar.record.show import COMPARED, failure_of, state_of

PARTS = ("samples", "greedy")
"""Files of attempts in the folder of an evaluation."""


AttemptFile = tuple[str, int, Path]
"""(part, step, path) of a parquet file of attempts; part: `rollouts`, or the name of an evaluation (`after`, and
`after/greedy` for its greedy attempts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """A run, an evaluation that belongs to none, or rollouts of others."""

    name: str
    """In URLs; unique below the folder that is looked at."""
    root: Path
    run: RunFolder | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """What is said of rollouts that another trainer wrote (others.py)."""
    refused: tuple[str, ...] = ()
    """What of them was left out."""

    def attempt_files(self) -> list[AttemptFile]:
        """All that are there now, the newest step first."""
        found = [
            (path.parent.name, step_of(path), path)
            for path in self.root.glob("rollouts/step=*.parquet")
            if re.fullmatch(r"step=[0-9]+\.parquet", path.name)  # no copy of one
        ]
        for name, step, folder in self.evaluation_folders():
            for part in PARTS:
                if (path := folder / f"{part}.parquet").is_file():
                    found.append((name if part == "samples" else f"{name}/{part}", step, path))
        return sorted(found, key=lambda file: (-file[1], file[0]))

    def evaluation_folders(self) -> list[tuple[str, int, Path]]:
        """(name, step, folder) of every finished evaluation."""
        if self.run is None:
            return [(self.root.name, 0, self.root)] if (self.root / RESULT).is_file() else []
        return sorted(self.run.evaluation_folders())

    def tokenizer(self) -> Path | None:
        """A model folder with the tokenizer of its attempts; None where there is none (any more)."""
        own = [] if self.run else self.evaluation_folders()
        named = [Path(read_json(folder / RESULT).get("setup", {}).get("model") or "") for _, _, folder in own]
        kept = (
            [self.run.checkpoint(step) / "model" for step in reversed(self.run.checkpoint_steps())] if self.run else []
        )
        return next((folder for folder in [*kept, *named] if (folder / "tokenizer.json").is_file()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """All that a page shows."""

    base: Path
    """The folder of runs."""
    first: str = "/"
    """The page that opens first."""
    opened: tuple[RunSource, ...] = ()
    """Rollouts of others, in place of what lies below `base`."""

    @classmethod
    def open(cls, name: str | None, runs: Path) -> Library:
        """Open a folder of runs, a run, or an evaluation, as a person typed it. Raises ConfigError."""
        if name is None and not runs.is_dir():
            raise ConfigError(f"there is no folder {runs} with runs; name one: rocstar view FOLDER")
        if name is None:
            return cls(base=runs)._with_sources()
        path = Path(name)
        if (path / "run.json").is_file():
            return cls(base=path.resolve().parent, first=f"/run/{path.resolve().name}")
        if not (path / RESULT).is_file() and path.is_dir():
            return cls(base=path)._with_sources()
        try:
            if not is_evaluation(name, runs):
                run = RunFolder.find(name, runs)
                return cls(base=run.path.resolve().parent, first=f"/run/{run.name}")
            folder = find_evaluation(name, runs).resolve()
        except ConfigError as error:
            raise ConfigError(f"there is no file or folder {name}, and {error}") from None
        if (owner := owner_of(folder)) is None:
            return cls(base=folder, first=f"/eval/{folder.name}/{folder.name}/0")
        return cls(base=owner.path.parent, first=f"/eval/{owner.name}/{folder.parent.name}/{step_of(folder)}")

    def _with_sources(self) -> Library:
        """Raises ConfigError."""
        if not self.sources():
            reason = "no runs, no evaluations, and no rollouts of TRL, verl, verifiers or inspect_ai that can be read"
            raise ConfigError(f"{self.base} holds {reason}; name another folder, or a file")
        return self

    def sources(self) -> list[RunSource]:
        """Runs, then other evaluations, by name."""
        if self.opened:
            return list(self.opened)
        runs = [RunSource(name=run.path.name, root=run.path, run=run) for run in list_runs(self.base)]
        return (
            runs
            + [
                RunSource(name=f"{file.parent.parent.name}:{file.parent.name}", root=file.parent)
                for file in sorted(self.base.glob(f"evals/*/*/{RESULT}"))
            ]
            + [RunSource(name=self.base.name, root=self.base) for _ in range((self.base / RESULT).is_file())]
        )

    def source(self, name: str) -> RunSource:
        """Raises KeyError."""
        run = RunFolder(self.base / name)
        if name == Path(name).name and name not in ("", ".", "..") and os.path.isfile(run.path / "run.json"):
            return RunSource(name=name, root=run.path, run=run)  # without listing all the others
        return {source.name: source for source in self.sources()}[name]


def remembered(read: Callable[[Path], Any], file: Path) -> Any:
    """What `read` makes of a file, read again only where it changed: the list is asked for every two seconds. Raises
    what `read` raises, OSError."""
    state = file.stat()
    return _made_of(read, file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8192)
def _made_of(read: Callable[[Path], Any], file: Path, modified: int, size: int) -> Any:
    return read(file)


def overview(source: RunSource, spans: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A source as the list shows it, without metrics; `spans` are its stages in metrics.jsonl. A broken file is
    reported in `broken`."""
    kind = "run" if source.run else "rollouts" if source.about else "evaluation"
    row: dict[str, Any] = {"name": source.name, "kind": kind, "path": str(source.root)}
    row |= {"about": source.about, "refused": source.refused} if source.about else {}
    try:
        evals = [
            {"name": name, "step": step, **remembered(_told, folder / RESULT)}
            for name, step, folder in source.evaluation_folders()
        ]
        return {**row, "evals": evals, **(_of_run(source.run, spans) if source.run else {})}
    except (DataError, OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        return {**row, "evals": [], "broken": str(error) or type(error).__name__}


def _of_run(run: RunFolder, spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    state = state_of(run)
    events: dict[str, Any] = {"warnings": 0, "ends": []}
    if run.events.is_file():
        events = remembered(_events, run.events)
    settings = settings_of(run)
    stages = [_stage(one, spans, events["ends"]) for one in settings["stages"]]
    return {
        "started": run.identity.get("started"),
        "state": state,
        "reason": failure_of(run) if state == "failed" else None,
        "active": run.last_active / 1e9,
        "sweep": settings["flat"].get("run.sweep"),
        "stages": stages,
        "steps": sum(stage["done"] if stage["ended"] else stage["steps"] or 0 for stage in stages),
        "warnings": events["warnings"],
    }


def settings_of(run: RunFolder) -> dict[str, Any]:
    """`stages`, and `flat`: every setting by its dotted name. Empty for a run that is just being made. Raises
    DataError, and what settings of another shape lead to."""
    return remembered(_settings, run.resolved) if run.resolved.is_file() else {"stages": [], "flat": {}}


def _told(result: Path) -> dict[str, Any]:
    """`asked` is equal where the problems are."""
    found = read_json(result)
    asked = found.get("setup", {}).get("data", {}).get("problems_sha256")
    return {**{key: found.get(key) for key in COMPARED.values()}, "asked": asked}


def _settings(resolved: Path) -> dict[str, Any]:
    settings = read_json(resolved)
    stages = [{key: stage.get(key) for key in ("name", "kind", "steps")} for stage in settings.get("stage", [])]
    return {"stages": stages, "flat": dict(flat(settings))}


def _events(file: Path) -> dict[str, Any]:
    events = read_journal(file)
    ends = [event for event in events if event.get("event") in ("stage_end", "stage_skipped")]
    return {"warnings": sum(event.get("event") == "warning" for event in events), "ends": ends}


def _stage(stage: Mapping[str, Any], spans: Sequence[Mapping[str, Any]], ends: Sequence[Mapping[str, Any]]) -> Any:
    """A stage with the steps `done`, and why it `ended`; a kill may have undone some steps of one that had."""
    done = sum(int(span["last"] - span["first"]) + 1 for span in spans if span["name"] == stage["name"])
    reasons = [end.get("reason") for end in ends if (end.get("name"), end.get("steps", 0)) == (stage["name"], done)]
    return {**stage, "done": done, "ended": str(reasons[-1]) if reasons else None}
