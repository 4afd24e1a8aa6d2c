"""The run folder: the paths of a run's files, creating, finding, branching and deleting runs, and their size on the
disk.

Not here: the contents of the files (journal.py, rollouts.py, show.py) and of checkpoints (the learner's).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.errors import ConfigError, ContractBroken, DataError
from rocstar.record.atomic import half_written, sweep, write_atomic, write_json
from rocstar.record.identity import git_state, hardware, versions
from rocstar.record.journal import Journal, read_journal
from rocstar.record.lock import locked
from rocstar.support.exits import tell_once

if TYPE_CHECKING:
    from rocstar.config.sections import Recipe

SCHEMA_VERSION = 1
SHOWN_NAMES = 5  # of runs, in a message
NAME_BYTES = 240  # the limit of file systems, less the suffixes added to a name
HELD_OUT = "held out"
"""Keys of problems.json besides the names of stages."""
SURROUNDINGS = ("threads", "versions", "git", "code", "computes")
"""Keys of run.json that figures depend on; a branch takes them from its run."""
RUNS = Path("runs")
"""The folder of runs, unless a recipe sets `run.folder`."""


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.rollouts = self.path / "rollouts"
        self.evals = self.path / "evals"
        self.checkpoints = self.path / "checkpoints"
        self.calls = self.path / "calls"
        self.resolved = self.path / "config.resolved.json"
        """The settings in force; resume reads these."""
        self.problems = self.path / "problems.json"
        """Hashes of the problems of each stage, of those held out and of benchmarks, and of files in `model.path`."""
        self.summary = self.path / "summary.json"
        """Written once, when the run is over."""
        self.end_request = self.path / "end_stage"
        """Holds the name of a stage that the user has asked to end after its current step."""

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        base: Path | str,
        argv: Sequence[str],
        *,
        recipe_text: str | None = None,
        fill: Callable[[RunFolder], Mapping[str, Any]] = lambda folder: {},
    ) -> RunFolder:
        """Claim `base/<run.name>` (or `-2`, `-3` ...) and write config.toml, config.resolved.json and run.json.

        `recipe_text`: the recipe as the user wrote it; absent for a recipe built in Python. `fill` adds the run's
        initial files to the folder and returns more entries of run.json. Raises ConfigError if no folder can be created
        there, and OSError."""
        refuse_place(base, recipe.run.name)
        try:
            folder = cls(claim(Path(base) / part for part in numbered(recipe.run.name)))
        except OSError as error:
            raise _no_place(base, error.strerror or str(error)) from None
        try:
            for part in (folder.rollouts, folder.evals, folder.checkpoints):
                part.mkdir()
            if recipe_text is not None:
                write_atomic(folder.path / "config.toml", recipe_text.encode())
            write_json(folder.resolved, recipe.resolved())
            identity = {
                "schema_version": SCHEMA_VERSION,
                "name": folder.name,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "argv": list(argv),
                "versions": versions(),
                "git": git_state(),
                "hardware": hardware(),
            }
            more = fill(folder)
            # Last, because run.json makes the folder a run: a kill before it leaves no run without settings.
            write_json(folder.path / "run.json", {**identity, **more})
        except OSError:
            shutil.rmtree(folder.path, ignore_errors=True)  # a run that fails to start leaves no folder
            raise
        return folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run. Raises ConfigError when `path` is not a run folder."""
        folder = cls(path)
        if not (folder.path / "run.json").is_file():
            raise ConfigError(f"{path} is not a run folder: it has no run.json")
        return folder

    @classmethod
    def find(cls, name: str, base: Path | str = RUNS) -> RunFolder:
        """A run by path, by name below `base`, by an unambiguous prefix, or "last" (the one last written to)."""
        runs = list_runs(base)
        if name == "last" and runs:
            return max(runs, key=lambda run: (run.last_active, run.name))
        if (Path(name) / "run.json").is_file():
            return cls(name)
        exact = [run for run in runs if run.name == name]
        if not exact and Path(name).name == name != "" and (Path(base) / name).is_dir():
            return cls.open(Path(base) / name)  # of another user, or without its run.json
        matches = exact or [run for run in runs if run.name.startswith(name)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError(f"{name} may be any of {nearest_of(name, matches)}; write more of the name")
        there = f"the nearest of the runs there are: {nearest_of(name, runs)}"
        none = "nor any other; begin one with rocstar train, or give their folder with --runs"
        raise ConfigError(f"there is no run {name} in {base}{'; ' + there if runs else ', ' + none}")

    @property
    def name(self) -> str:
        """The name of the folder, or of the link to it."""
        return os.path.basename(os.path.abspath(self.path))

    def recipe_text(self) -> str:
        """The text of config.toml; empty for a recipe built in Python."""
        file = self.path / "config.toml"
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def asks_to_end(self, stage: str) -> bool:
        """Whether the user has asked this stage to end."""
        return self.end_request.is_file() and self.end_request.read_bytes().strip() == stage.encode()

    def request_end(self) -> str:
        """Ask the run to end its current stage; returns the stage's name. Raises ConfigError without one."""
        stage_events = [event for event in read_journal(self.events) if event["event"] in ("stage", "stage_end")]
        if not stage_events or stage_events[-1]["event"] == "stage_end":
            raise ConfigError(f"run {self.name} has no stage under way that could end")
        write_atomic(self.end_request, str(stage_events[-1]["name"]).encode())
        return str(stage_events[-1]["name"])

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"{step_name(step)}.parquet"

    def calls_file(self, step: int) -> Path:
        """The file of finished model calls in a step that no checkpoint holds yet."""
        return self.calls / f"{step_name(step)}.jsonl"

    def pool(self, stage: str) -> Path:
        """The file of results on the problems that a stage chose from."""
        return self.path / "pools" / f"{stage}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def evaluation(self, name: str, step: int) -> Path:
        """Folder of one evaluation; its `result.json` is the last file written."""
        return self.evals / name / step_name(step)

    def next_log(self, name: str) -> Path:
        """The first free `logs/<name>-<number>.txt`; its folder is made. Raises OSError."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        return next(file for n in count(1) if not (file := folder / f"{name}-{n}.txt").exists())

    def sft_rows(self, stage: str) -> Path:
        """The file of an SFT stage's demonstrations as tokens."""
        return self.path / "sft_rows" / f"{stage}.parquet"

    @property
    def argument(self) -> str:
        """The run's name for a command line without --runs."""
        is_usual = self.path.resolve().parent == Path("runs").resolve()
        return shlex.quote(self.name if is_usual else str(self.path))

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings that changed when the run was continued, rows `{step, setting, was, now}`. Raises DataError."""
        return list(self.identity.get("changes", []))

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending."""
        return sorted(step_of(path) for path in self.checkpoints.glob("step=[0-9]*") if path.is_dir())

    def evaluation_folders(self) -> list[tuple[str, int, Path]]:
        """(name, step, folder) of every finished evaluation, by step and then name."""
        folders = (file.parent for file in self.evals.glob("*/step=[0-9]*/result.json"))
        found = [(folder.parent.name, step_of(folder), folder) for folder in folders]
        return sorted(found, key=lambda one: (one[1], one[0]))

    def evaluations(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(name, step, result) of each. One with a broken file is skipped, with a message on stderr."""
        found = []
        for name, step, folder in self.evaluation_folders():
            try:
                found.append((name, step, read_json(folder / "result.json")))
            except DataError as error:
                tell_once(f"{error}, so this evaluation is left out; delete its folder and evaluate again")
        return found

    @property
    def identity(self) -> dict[str, Any]:
        """run.json. Raises DataError."""
        return read_json(self.path / "run.json")

    @property
    def last_active(self) -> int:
        """When the run last wrote something, nanoseconds since 1970."""
        files = (self.path / "run.json", self.metrics, self.events, self.summary)
        return max(file.stat().st_mtime_ns for file in files if file.exists())

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run for its single writer while it runs. An evaluation of a live run writes into its own folder and
        needs no lock. Raises ConfigError, which names the holder."""
        return locked(self.path, f"run {self.name}")

    def rewind(self, step: int) -> None:
        """Delete the records after `step`, which resuming makes again: metrics, rollouts, evaluations, summary; and
        unfinished writes. Only for the holder of the lock."""
        with Journal(self.metrics) as metrics:
            metrics.truncate_after(step)
        self.summary.unlink(missing_ok=True)
        for file in self.rollouts.glob("step=[0-9]*.parquet"):
            if step_of(file) > step:
                file.unlink()
        for folder in self.evals.glob("*/step=[0-9]*"):
            if step_of(folder) > step:
                shutil.rmtree(folder)
        sweep(self.path)


def list_runs(base: Path | str = RUNS) -> list[RunFolder]:
    """All runs below `base`, by name."""
    return [RunFolder(file.parent) for file in sorted(Path(base).glob("*/run.json"))]


def closed_folders(base: Path | str) -> list[str]:
    """`base` and folders in it that this user may not read, so that `list_runs` cannot see runs there."""
    folders = (Path(base), *sorted(Path(base).glob("*/")))
    return [str(folder) for folder in folders if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)]


def nearest_of(name: str, runs: Iterable[RunFolder]) -> str:
    """For a message: the few runs with the most similar names, and the number of others."""
    names = [run.name for run in runs]
    near = get_close_matches(name, names, n=SHOWN_NAMES, cutoff=0.0)
    return ", ".join(near) + (f" and {len(names) - len(near)} others" if len(near) < len(names) else "")


def step_name(step: int) -> str:
    return f"step={step:06d}"


def step_of(path: Path) -> int:
    """The step in a name such as `step=000042.parquet`."""
    return int(path.name.removeprefix("step=").split(".")[0])


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises DataError when the file holds something else, OSError when it cannot be read."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return value


def numbered(name: str) -> Iterable[str]:
    """`name`, `name-2`, `name-3` ..."""
    return (name if number == 1 else f"{name}-{number}" for number in count(1))


def free_place(base: Path | str, name: str) -> Path:
    """The path at which a run of this name would be created now."""
    return next(place for part in numbered(name) if not (place := Path(base) / part).exists())


def claim(paths: Iterable[Path]) -> Path:
    """Create the first of these folders that does not exist. Creation is the claim, so two processes never share one.
    Raises OSError."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ContractBroken("there were only so many folders to choose from")


def refuse_place(base: Path | str, name: str) -> None:
    """Raises ConfigError if no run folder `base/name` could be created, as far as that shows beforehand."""
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise ConfigError(f"run.name = {name!r} cannot be a folder name; use letters, digits and dashes")
    if name == "last" or "@" in name:
        raise ConfigError(
            f"run.name = {name!r} has a meaning of its own on the command line (the last run, RUN@STEP); take another"
        )
    there = next(part for part in (Path(base).absolute() / name).parents if part.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise _no_place(base, f"{there} is not a folder that can be written into")
    if len(os.fsencode(name)) > NAME_BYTES:
        raise _no_place(base, f"the name is longer than {NAME_BYTES} bytes")


def _no_place(base: Path | str, why: str) -> ConfigError:
    return ConfigError(f"no run folder can be made in {base} ({why}); choose another with run.folder=FOLDER")


# What runs leave on the disk that may go. Nothing here touches a run that is being written.


def size_of(path: Path) -> int:
    """Bytes on the disk of a file, or of all files below a folder; 0 for a missing path."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(_blocks(file) for file in files)


def leftovers(run: RunFolder, keep: int) -> list[Path]:
    """Paths that may be deleted from a run without a writer: all but its newest `keep` checkpoints, unfinished writes,
    and the weights published for its engines."""
    old = [run.checkpoint(step) for step in run.checkpoint_steps()[: -keep or None]]
    weights = run.path / "weights"
    return sorted({*old, *half_written(run.path), *([weights] if weights.exists() else [])})


def delete(paths: list[Path]) -> None:
    """Raises OSError."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _blocks(file: Path) -> int:
    try:
        return 0 if file.is_dir() else file.lstat().st_blocks * 512
    except FileNotFoundError:  # the run is still writing
        return 0


# Branches: a run continues from a checkpoint of another, which stays unchanged, so nothing after that step is lost.
# Files that never change are shared by hard links if the file system supports them.


def find_checkpoint(name: str, runs: Path) -> tuple[RunFolder, int]:
    """The run and step of RUN or RUN@STEP; without a step its newest checkpoint. Raises ConfigError."""
    is_whole = any((place / "run.json").is_file() for place in (Path(name), runs / name))  # a run may be called so
    has_step = not is_whole and re.search(r"@[^/]*$", name)
    run_name, _, step_text = name.rpartition("@") if has_step else (name, "", "")
    run = RunFolder.find(run_name, runs)
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.name} has no checkpoint yet; wait for its first, or resume it if it was stopped")
    step = steps[-1] if not step_text else int(step_text) if re.fullmatch("[0-9]{1,9}", step_text) else -1
    if step not in steps:
        raise ConfigError(f"run {run.name} has no checkpoint of step {step_text}; it has {', '.join(map(str, steps))}")
    return run, step


def copy_metrics(source: RunFolder, target: RunFolder, step: int) -> list[dict[str, Any]]:
    """Copy the rows of metrics up to `step` to `target`, and return them. Raises OSError."""
    rows = [row for row in read_journal(source.metrics) if row["step"] <= step]
    write_atomic(target.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def fill_branch(
    fresh: RunFolder, source: RunFolder, step: int, *, anew: Set[str], changes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Copy the state of `source` after `step` to `fresh`, and return entries for run.json. anew: SFT stages whose rows
    differ here. Raises OSError."""
    rows = copy_metrics(source, fresh, step)
    imitated = (path for path in source.path.glob("sft_rows/*.parquet") if path.stem not in anew)
    for path in (*_kept(source, step), *imitated):
        share(path, fresh.path / path.relative_to(source.path))
    begun_stages = {row["stage"] for row in rows}
    for path in source.path.glob("pools/*"):
        if path.stem in begun_stages:
            share(path, fresh.path / path.relative_to(source.path))
    problems = read_json(source.problems)
    # a stage's name has no space
    write_json(fresh.problems, {name: problems[name] for name in problems if name in begun_stages or " " in name})
    environment = {name: source.identity[name] for name in SURROUNDINGS if name in source.identity}
    return {"branched_from": {"run": str(source.path.resolve()), "step": step}, "changes": list(changes), **environment}


def _kept(source: RunFolder, step: int) -> Iterator[Path]:
    """Files and folders of `source` that a branch at `step` shares."""
    yield from (file for file in source.rollouts.glob("step=*.parquet") if step_of(file) <= step)
    yield from (folder for _, at, folder in source.evaluation_folders() if at <= step)
    yield from (source.checkpoint(there) for there in source.checkpoint_steps() if there <= step)


def share(path: Path, place: Path) -> None:
    """Link or copy a file or folder that never changes to another path."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, place, copy_function=_link)
    else:
        _link(path, place)


def _link(source: Path | str, place: Path | str) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, place)
