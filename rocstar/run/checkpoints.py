"""Where a run stands, on disk: model, learner state and position, renamed into place as one folder.

checkpoints/step=000042/
    model/         Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json
    learner/       fp32 weights and optimizer state
    state.json     Progress
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rocstar.learning.learner import GrpoLearner
from rocstar.learning.policy import Policy
from rocstar.learning.sft import SftLearner
from rocstar.record.atomic import whole_folder, write_json
from rocstar.record.folder import RunFolder


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is. Everything else that a step depends on follows from the recipe and the weights."""

    stage: int = 0
    """Number of the stage under way, 0 is the first."""
    stage_step: int = 0
    """Steps of it that are done."""
    step: int = 0
    """Steps of the run that are done."""
    policy_version: int = 0
    """Optimizer updates so far."""
    stage_complete: bool = False
    """The stage under way has done all its steps."""


def save(folder: RunFolder, progress: Progress, policy: Policy, learner: SftLearner | GrpoLearner) -> None:
    """Write the checkpoint of `progress.step`; a kill leaves either all of it or none. Raises OSError."""
    with whole_folder(folder.checkpoint(progress.step)) as fresh:
        policy.save(fresh / "model")
        learner.save(fresh)
        write_json(fresh / "state.json", asdict(progress))


def latest(folder: RunFolder) -> tuple[Progress, Path] | None:
    """The newest whole checkpoint; None when there is none yet."""
    for step in reversed(folder.checkpoint_steps()):
        path = folder.checkpoint(step)
        if (path / "state.json").is_file():
            return Progress(**json.loads((path / "state.json").read_text())), path
    return None


def prune(folder: RunFolder, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the last one of each stage."""
    for step in folder.checkpoint_steps()[:-keep]:
        path = folder.checkpoint(step)
        state = path / "state.json"  # absent where a kill came while this very loop was deleting
        if not state.is_file() or not json.loads(state.read_text())["stage_complete"]:
            shutil.rmtree(path)
