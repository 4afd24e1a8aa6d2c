"""The runs of one recipe under each combination of some settings and seeds, and what they came to over seeds.

Each is an ordinary run, made by `rocstar train` in a process of its own, so that one that fails, or is killed for its
memory, does not lose the others. Runs that belong together have the same `run.sweep`; nothing else is kept."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from rocstar.config.recipe import load_recipe, resolved_from_json
from rocstar.config.sections import Recipe
from rocstar.config.tree import flat
from rocstar.errors import ConfigError
from rocstar.evaluation.intervals import student_interval
from rocstar.record.differences import varying
from rocstar.record.folder import RunFolder, list_runs, read_json, refuse_place
from rocstar.record.show import COMPARED, state_of
from rocstar.support.exits import INTERRUPTED

MOST_RUNS = 1000
NAME_CHARACTERS = 40  # of a value in the name of its run
SEED = "run.seed"
GAINS = ("accuracy", "greedy")
COUNTED = ("tokens",)
"""Figures that are no shares."""
ITS_OWN = ("run.name", "run.folder", "run.sweep")
WHERE = ("cluster.", "engine.", "run.stall_", "run.threads")
"""Settings that may change when a run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRun:
    """One run of a sweep, made already or not."""

    recipe: Recipe
    settings: tuple[str, ...]
    """What `rocstar train` is given besides the recipe's file."""
    swept: tuple[str, ...]
    """The settings among them that differ between the runs."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.recipe.run.folder) / self.recipe.run.name)

    @property
    def state(self) -> str:
        """`new`, or as `runs list` says. Raises DataError, and ConfigError for a folder in which no run was begun:
        `train` would take the next free name, of which no sweep knows that it has that run already."""
        if self.folder.path.exists() and not self.is_there:
            problem = "exists and holds no run, which a kill may leave"
            raise ConfigError(
                f"{self.folder.path} {problem}; delete it, or name the sweep otherwise with run.name=NAME"
            )
        return state_of(self.folder) if self.is_there else "new"

    @property
    def is_there(self) -> bool:
        return (self.folder.path / "run.json").is_file()

    def command(self, path: str) -> list[str]:
        """Begins the run, or goes on with it."""
        rest = ["--resume", str(self.folder.path)] if self.is_there else [path, *self.settings]
        return [sys.executable, "-Pm", "rocstar", "train", *rest]


def planned(path: str, settings: Sequence[str]) -> list[SweptRun]:
    """All runs of a sweep, the last setting's values in turn first. Raises ConfigError for a value that a recipe
    refuses, and for a run of such a name that is there and is another one."""
    values = [values_of(text) for text in settings]
    if math.prod(map(len, values)) > MOST_RUNS:
        raise ConfigError(f"these settings make {math.prod(map(len, values))} runs; at most {MOST_RUNS} are one sweep")
    several = [len(texts) > 1 for texts in values]
    keys = [texts[0].partition("=")[0] for texts in values]
    for key, more in zip(keys, several, strict=True):
        if keys.count(key) > 1:
            raise ConfigError(f"{key} is given twice; write all its values in one, as in {key}=1,2")
        if key == "run.sweep" or (more and key in ITS_OWN):
            raise ConfigError(f"{key} can't be swept: run.name=NAME names the sweep, and its runs are named after it")
    made = list(itertools.product(*values))
    base = load_recipe(path, made[0]).run.name
    return [_planned(path, base, each, list(itertools.compress(each, several))) for each in made]


def values_of(text: str) -> list[str]:
    """`key=1e-6,3e-6` and `key=0..2` as one setting for each value; a comma in quotes or brackets belongs to its value.
    Raises ConfigError."""
    key, equals, raw = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"{text!r} is not of the form section.key=value,value")
    values = [value for part in _parts(raw) for value in _counted(part)]
    if len(values) > 1 and (not all(values) or len(set(values)) < len(values)):
        raise ConfigError(f"{text!r} has an empty value, or one twice; write each once, as in {key}=1,2")
    return [f"{key}={value}" for value in values]


def _parts(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or (character in "\"'" and (depth or not parts[-1].strip())):
            quote = character if not quote else "" if character == quote else quote
        elif character in "[]{}":
            depth += 1 if character in "[{" else -1
        elif character == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def _counted(part: str) -> list[str]:
    found = re.fullmatch(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})", part)
    if not found:
        return [part]
    first, last = map(int, found.groups())
    if not 0 <= last - first < MOST_RUNS:
        raise ConfigError(f"{part} is no range of at most {MOST_RUNS} whole numbers; write the smaller one first")
    return [str(number) for number in range(first, last + 1)]


def _planned(path: str, base: str, given: Sequence[str], swept: Sequence[str]) -> SweptRun:
    name = "-".join([base, *(_short(text, swept) for text in swept)])
    settings = (*given, f"run.name={name}", f"run.sweep={base}")
    recipe = load_recipe(path, settings)
    refuse_place(recipe.run.folder, name)
    made = SweptRun(recipe=recipe, settings=settings, swept=tuple(swept))
    if made.is_there:
        _refuse_other(made)
    return made


def _short(text: str, swept: Sequence[str]) -> str:
    """`learning_rate=1e-6`: the last part of the key, all of it where another one ends so."""
    key, _, value = text.partition("=")
    last = key.rpartition(".")[2]
    alone = sum(other.partition("=")[0].rpartition(".")[2] == last for other in swept) == 1
    plain = re.sub(r"[^\w.+-]+", "_", value)
    if plain != value or len(value) > NAME_CHARACTERS:
        plain = f"{plain[:NAME_CHARACTERS]}~{sha256(value.encode()).hexdigest()[:6]}"
    return f"{last if alone else key}={plain}"


def _refuse_other(made: SweptRun) -> None:
    here = dict(flat(made.recipe.resolved()))
    there = dict(flat(resolved_from_json(made.folder.resolved).resolved()))
    for key in sorted({*here, *there}):
        if here.get(key) != there.get(key) and not key.startswith(WHERE):
            raise ConfigError(
                f"run {made.folder.path} is there already with {key} = {json.dumps(there.get(key))}, not "
                f"{json.dumps(here.get(key))}; name this sweep otherwise with run.name=NAME"
            )


def carry_out(command: Sequence[str]) -> int:
    """The exit code of one run, whose results go to stderr. Raises KeyboardInterrupt, once it has saved and ended,
    where Ctrl-C ended it, which reaches this process too, or SIGTERM or SIGHUP, which are handed on."""
    asked = False

    def hand_on(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        child.send_signal(number)  # a second SIGHUP, of the terminal's own, changes nothing

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        while (code := child.poll()) is None:
            try:
                code = child.wait()
            except KeyboardInterrupt:
                asked = True
    finally:
        for ended, handler in before.items():
            signal.signal(ended, handler)
    if asked or code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


# What they came to


def swept_runs(name: str, base: Path) -> list[RunFolder]:
    """The runs of a sweep. Raises ConfigError where there is none, DataError."""
    sweeps: dict[str, list[RunFolder]] = {}
    for run in list_runs(base):
        if run.resolved.is_file() and (of := read_json(run.resolved).get("run", {}).get("sweep")):
            sweeps.setdefault(of, []).append(run)
    if name not in sweeps:
        raise ConfigError(f"there is no sweep {name} in {base}; there are {', '.join(sorted(sweeps)) or 'none'}")
    return sweeps[name]


def came_to(name: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    """For each setting its runs, and of those that are finished each figure over seeds: `figure`, `values` by run,
    `mean`, `range`, and `interval`, Student's 95% interval of the mean over runs as far as such a figure can go (null
    for one run, and where all values are the same). Source: ours. Raises DataError."""
    settings = [dict(flat(read_json(run.resolved))) for run in runs]
    keys = [key for key in varying(settings) if key not in (SEED, *ITS_OWN)]
    rows: dict[str, dict[str, Any]] = {}
    for run, flat_settings in zip(runs, settings, strict=True):
        values = {key: flat_settings.get(key) for key in keys}
        row = rows.setdefault(json.dumps(values), {"settings": values, "runs": [], "finished": []})
        row["runs"].append({"name": run.name, "seed": flat_settings.get(SEED)})
        row["finished"] += [run] if run.summary.exists() else []
    for row in rows.values():
        row["figures"] = _figures(row["finished"])
        row["finished"] = len(row["finished"])
    return {"sweep": name, "settings": list(rows.values())}


def _figures(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    by_run = {run.name: figures_of(run) for run in runs}
    keys = dict.fromkeys(key for figures in by_run.values() for key in figures)
    return [
        {"evaluation": key[0], "figure": key[1], **_over_runs(key, {n: f[key] for n, f in by_run.items() if key in f})}
        for key in keys
    ]


def figures_of(run: RunFolder) -> dict[tuple[str, str], float]:
    """(evaluation, figure) -> value; of an evaluation that was made after several steps the last. `gain` is after less
    before. Raises DataError."""
    found: dict[tuple[str, str], float] = {}
    for name, _, result in run.evaluations():
        for figure, key in COMPARED.items():
            value = result.get(key)
            value = value.get("value") if isinstance(value, Mapping) else value
            if value is not None:
                found[name, figure] = float(value)
    return found | {
        ("gain", figure): value - found["before", figure]
        for (name, figure), value in found.items()
        if name == "after" and ("before", figure) in found and figure in GAINS
    }


def _over_runs(key: tuple[str, str], values: Mapping[str, float]) -> dict[str, Any]:
    numbers = list(values.values())
    low, high = -1.0 if key[0] == "gain" else 0.0, math.inf if key[1] in COUNTED else 1.0
    found = student_interval(numbers)
    interval = found and [max(low, found[0]), min(high, found[1])]
    return {"values": dict(values), "mean": fmean(numbers), "range": [min(numbers), max(numbers)], "interval": interval}
