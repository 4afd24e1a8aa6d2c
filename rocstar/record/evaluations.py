"""Stored evaluations and their names: RUN/NAME@STEP of a run, MODEL/NAME of a plain model or an endpoint. Every command
shows this name and accepts it, a prefix of it, or the evaluation's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError, DataError
from rocstar.record.folder import RUNS, RunFolder, list_runs, read_json, step_of

RESULT, SAMPLES, GREEDY = "result.json", "samples.parquet", "greedy.parquet"
MOST_NAMED = 12  # evaluations that a refusal lists


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFolder:
    """A finished evaluation."""

    folder: Path
    owner: str
    """Name of its run, or of its model."""
    name: str
    step: int | None
    """The step of the run's checkpoint; None for an evaluation of a plain model or an endpoint."""

    @property
    def label(self) -> str:
        return f"{self.owner}/{self.name}" + ("" if self.step is None else f"@{self.step}")


def model_folder(base: Path | str, model: str) -> Path:
    """The folder of evaluations of a plain model or an endpoint."""
    return Path(base) / "evals" / re.sub(r"[^\w.-]+", "_", model)


def evaluations_of(run: RunFolder) -> list[EvaluationFolder]:
    """A run's finished evaluations, by step and then name."""
    return [
        EvaluationFolder(folder=folder, owner=run.name, name=name, step=step)
        for name, step, folder in run.evaluation_folders()
    ]


def list_evaluations(base: Path | str = RUNS) -> list[EvaluationFolder]:
    """All below `base`: those of runs, then those of models, by name."""
    folders = [file.parent for file in sorted(Path(base).glob(f"evals/*/*/{RESULT}"))]
    of_models = (EvaluationFolder(folder=one, owner=one.parent.name, name=one.name, step=None) for one in folders)
    return [*(one for run in list_runs(base) for one in evaluations_of(run)), *of_models]


def find_evaluation(name: str, base: Path | str = RUNS) -> Path:
    """The folder of an evaluation: its path, its name, or a prefix of its name; by default of a run's last step.
    MODEL:NAME, as in the page's addresses, is accepted too. Raises ConfigError, which lists the matches of an ambiguous
    name."""
    if (Path(name) / RESULT).is_file():
        return Path(name)
    owner, slash, rest = name.rpartition("/" if "/" in name else ":")
    stem, _, step = rest.partition("@")
    there = _owned(owner, base) if owner else list_evaluations(base)
    there = [one for one in there if slash != ":" or one.step is None]
    exact = [one for one in there if one.name == stem]
    found = exact or [one for one in there if one.name.startswith(stem)]
    found = [one for one in found if not step or str(one.step) == step]
    if not found:
        known = _labels(there or list_evaluations(base)) or f"none in {base}; name one as last/after, or by its folder"
        raise ConfigError(f"there is no evaluation {name}; there are: {known}")
    last = {(one.owner, one.name, one.step is None): one for one in found}
    if len(last) > 1:
        raise ConfigError(f"{name} may be any of {_labels(list(last.values()))}; write more of the name")
    return next(iter(last.values())).folder


def is_evaluation(name: str, base: Path | str = RUNS) -> bool:
    """Whether the user's name means an evaluation and not a run."""
    is_run = (Path(name) / "run.json").is_file() or (Path(base) / name / "run.json").is_file()
    return (Path(name) / RESULT).is_file() or (("/" in name or ":" in name) and not is_run)


def label_of(folder: Path, base: Path | str = RUNS) -> str:
    """The name of an evaluation below `base`; the path of any other."""
    run, home = owner_of(folder), Path(base).resolve()
    if run is not None and run.path.parent == home:
        return f"{run.name}/{folder.resolve().parent.name}@{step_of(folder.resolve())}"
    within = folder.resolve().parent
    return f"{within.name}/{folder.resolve().name}" if within.parent == home / "evals" else str(folder)


def owner_of(folder: Path) -> RunFolder | None:
    """The run whose evaluation this is; None for one of a plain model."""
    run = folder.resolve().parent.parent.parent
    return RunFolder(run) if (run / "run.json").is_file() and folder.resolve().name.startswith("step=") else None


def row_of(one: EvaluationFolder) -> dict[str, Any]:
    """An evaluation in a list: its name and figures, or `broken` if its file is invalid."""
    row = {"evaluation": one.label, "folder": str(one.folder), "step": one.step}
    try:
        result = read_json(one.folder / RESULT)
        setup = result.get("setup") or {}
        data = setup.get("data") or {}
        subject = {"model": setup.get("model"), "data": data.get("benchmark") or data.get("path") or data.get("source")}
        figures = {key: result.get(key) for key in ("accuracy", "greedy", "problems", "undecided")}
        return {**row, **subject, **figures, "attempts": setup.get("attempts")}
    except (DataError, OSError, AttributeError) as error:
        return {**row, "broken": str(error)}


def _owned(owner: str, base: Path | str) -> list[EvaluationFolder]:
    """The evaluations of the run or the model of that name, or of those whose names begin with it. Raises ConfigError
    if there is none."""
    if owner == "last" or (Path(owner) / "run.json").is_file():
        return evaluations_of(RunFolder.find(owner, base))
    there, model = list_evaluations(base), model_folder(base, owner).name
    exact = [one for one in there if one.owner in (owner, model)]
    by_prefix = [one for one in there if one.owner.startswith((owner, model))]
    return exact or by_prefix or evaluations_of(RunFolder.find(owner, base))


def _labels(some: Sequence[EvaluationFolder]) -> str:
    more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
    return ", ".join(one.label for one in some[:MOST_NAMED]) + more
