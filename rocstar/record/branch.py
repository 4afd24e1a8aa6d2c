"""A run that goes on from a checkpoint of another, which stays as it is: a way back to a stage without losing what
came after it. Files that never change once they are written are shared by hard links where the file system has them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError
from rocstar.record.atomic import write_atomic, write_json
from rocstar.record.folder import HELD_OUT, RunFolder, read_json, step_of
from rocstar.record.journal import read_journal


def find_checkpoint(name: str, runs: Path) -> tuple[RunFolder, int]:
    """The run and the step that RUN or RUN@STEP means; without a step its newest checkpoint. Raises ConfigError."""
    run_name, _, wanted = name.rpartition("@") if re.search(r"@[^/]*$", name) else (name, "", "")
    run = RunFolder.find(run_name, runs)
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.name} has no checkpoint yet")
    step = steps[-1] if not wanted else int(wanted) if re.fullmatch("[0-9]{1,9}", wanted) else -1
    if step not in steps:
        raise ConfigError(f"run {run.name} has no checkpoint of step {wanted}; it has {', '.join(map(str, steps))}")
    return run, step


def fill_branch(
    fresh: RunFolder, source: RunFolder, step: int, *, anew: Set[str], changes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Give `fresh` what `source` had after `step`, and return what run.json says of it. anew: SFT stages whose
    rows differ here. Raises OSError."""
    rows = [row for row in read_journal(source.metrics) if row["step"] <= step]
    write_atomic(fresh.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
    imitated = (path for path in source.path.glob("sft_rows/*.parquet") if path.stem not in anew)
    for path in (*_kept(source, step), *imitated):
        _share(path, fresh.path / path.relative_to(source.path))
    begun = {row["stage"] for row in rows}
    for path in source.path.glob("pools/*"):
        if path.stem in begun:
            _share(path, fresh.path / path.relative_to(source.path))
    problems = read_json(source.problems)
    write_json(fresh.problems, {name: problems[name] for name in problems if name in {*begun, HELD_OUT}})
    threads = {name: source.identity[name] for name in ("threads",) if name in source.identity}
    return {"branched_from": {"run": str(source.path.resolve()), "step": step}, "changes": list(changes), **threads}


def _kept(source: RunFolder, step: int) -> Iterator[Path]:
    """Files and folders of `source` that a branch at `step` shares."""
    yield from (file for file in source.rollouts.glob("step=*.parquet") if step_of(file) <= step)
    finished = (file.parent for file in source.evals.glob("*/step=*/result.json"))
    yield from (folder for folder in finished if step_of(folder) <= step)
    yield from (source.checkpoint(there) for there in source.checkpoint_steps() if there <= step)


def _share(path: Path, place: Path) -> None:
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
