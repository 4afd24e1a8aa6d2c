"""What runs take on the disk, and giving it back. Nothing here touches a run that is being written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from rocstar.errors import ConfigError, DataError
from rocstar.record.atomic import half_written
from rocstar.record.folder import RunFolder

PARTS = ("checkpoints", "rollouts", "evals", "sft_rows", "weights")
"""Told apart; the rest of a run is small."""


def sizes(run: RunFolder) -> dict[str, int]:
    """Bytes on the disk by part, `other` last. A file that two runs share by hard links counts for both."""
    found = {part: size_of(run.path / part) for part in PARTS}
    return {**found, "other": size_of(run.path) - sum(found.values())}


def size_of(path: Path) -> int:
    """Bytes on the disk of a file, or of all files below a folder; 0 for what is not there."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(_blocks(file) for file in files)


def leftovers(run: RunFolder, keep: int) -> list[Path]:
    """What can go from a run that nobody writes: all but its newest `keep` checkpoints, what a kill left half
    written, and the weights that its engines read."""
    old = [run.checkpoint(step) for step in run.checkpoint_steps()[: -keep or None]]
    weights = run.path / "weights"
    return sorted({*old, *half_written(run.path), *([weights] if weights.exists() else [])})


def delete(paths: list[Path]) -> None:
    """Raises OSError."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def remove(run: RunFolder) -> None:
    """Delete a run. run.json goes first, so that a kill in the middle leaves no run that lacks its files. Raises
    ConfigError where it is being written or only a link to it is here, and OSError."""
    if run.path.is_symlink():
        raise ConfigError(f"{run.path} is a link; delete the run where it lies ({run.path.resolve()})")
    with run.locked():
        (run.path / "run.json").unlink()
    shutil.rmtree(run.path)


def branches_of(run: RunFolder, others: list[RunFolder]) -> Iterator[RunFolder]:
    """The runs that went on from one of its checkpoints."""
    for other in others:
        try:
            origin = other.identity.get("branched_from")
        except DataError:
            continue  # its run.json is broken, which must not keep others from being deleted
        if origin and Path(origin["run"]) == run.path.resolve():
            yield other


def _blocks(file: Path) -> int:
    try:
        return 0 if file.is_dir() else file.lstat().st_blocks * 512
    except FileNotFoundError:  # a run goes on meanwhile
        return 0
