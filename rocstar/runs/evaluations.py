"""Finding one kept evaluation by what a person typed."""

from __future__ import annotations

from pathlib import Path

from rocstar.errors import ConfigError
from rocstar.runs.folder import RUNS, RunFolder, step_of

RESULT, SAMPLES = "result.json", "samples.parquet"


def find_evaluation(name: str, base: Path | str = RUNS) -> Path:
    """The folder of an evaluation: its path, or RUN/NAME or RUN/NAME@STEP, where NAME may be the start of one and the
    last step is meant unless one is given. Raises ConfigError."""
    if (Path(name) / RESULT).is_file():
        return Path(name)
    run_name, _, wanted = name.rpartition("/")
    if not run_name:
        raise ConfigError(
            f"{name} is no evaluation: give the folder that holds its {RESULT}, or RUN/NAME, as in last/after"
        )
    run = RunFolder.find(run_name, base)
    wanted, _, step = wanted.partition("@")
    there = [folder for folder in run.evals.glob("*/step=*") if (folder / RESULT).is_file()]
    exact = [folder for folder in there if folder.parent.name == wanted]
    found = exact or [folder for folder in there if folder.parent.name.startswith(wanted)]
    if len({folder.parent.name for folder in found}) > 1:
        names = ", ".join(sorted({folder.parent.name for folder in found}))
        raise ConfigError(f"{wanted} may be any of {names}; write more of the name")
    found = [folder for folder in found if not step or str(step_of(folder)) == step]
    if not found:
        known = ", ".join(sorted(f"{folder.parent.name}@{step_of(folder)}" for folder in there)) or "none"
        raise ConfigError(f"run {run.name} has no evaluation {name.rpartition('/')[2]}; it has: {known}")
    return max(found, key=step_of)


def owner_of(folder: Path) -> RunFolder | None:
    """The run whose evaluation this is; None for one of a plain model."""
    run = folder.resolve().parent.parent.parent
    return RunFolder(run) if (run / "run.json").is_file() and folder.name.startswith("step=") else None
