"""A run's progress in memory and on disk: model, learner state and position, renamed into place as one folder.

checkpoints/step=000042/
    model/         Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json; with
                   model.lora_rank adapter/ of PEFT's format, and model.safetensors only at a stage's end
    learner/       fp32 weights that are trained and optimizer state
    state.json     Progress; `bytes` and `hashes` of each file of the two folders
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rocstar.config.sections import RunSection
from rocstar.dialogue.codec import Codec
from rocstar.learning.models import load_model
from rocstar.learning.policy import ADAPTER_FOLDER, Policy
from rocstar.learning.update import Updater
from rocstar.record.atomic import whole_folder, write_json
from rocstar.record.folder import RunFolder
from rocstar.support.weights import marks_of, refuse_changed, refuse_other_base, state_of


@dataclass(slots=True, kw_only=True)
class Progress:
    """A run's progress. All else that a step depends on follows from the recipe and the weights."""

    stage: int = 0
    """Number of the stage under way, 0 is the first."""
    stage_step: int = 0
    """Steps done in this stage."""
    step: int = 0
    """Steps done in the run."""
    policy_version: int = 0
    """Optimizer updates so far."""
    stage_complete: bool = False
    """Whether the stage under way has done all its steps."""


class Checkpoints:
    """The progress of a run, and when its checkpoints are written."""

    def __init__(self, folder: RunFolder, settings: RunSection, progress: Progress, newest: Path | None) -> None:
        """newest: the checkpoint of `progress`, the source of learner state; None at the run's beginning."""
        self._folder, self._settings = folder, settings
        self.progress, self.newest = progress, newest
        self._written_at = time.monotonic()
        self._writing_seconds = 0.0

    def start_clock(self) -> None:
        """Count the time until the next checkpoint from now."""
        self._written_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether enough time has passed, and writing takes at most the share `checkpoint_cost` of it."""
        passed = time.monotonic() - self._written_at
        cheap = self._writing_seconds <= self._settings.checkpoint_cost * passed
        return passed >= self._settings.checkpoint_seconds and cheap

    def is_saved(self) -> bool:
        """Whether the newest checkpoint is that of the last step."""
        return self.newest == self._folder.checkpoint(self.progress.step)

    def write(self, policy: Policy, learner: Updater, *, complete: bool) -> None:
        """complete: the stage under way is over. Raises OSError."""
        began = time.monotonic()
        self.progress.stage_complete = complete
        save(self._folder, self.progress, policy, learner)
        prune(self._folder, self._settings.keep_checkpoints)
        self.newest = self._folder.checkpoint(self.progress.step)
        self._written_at = time.monotonic()
        self._writing_seconds = self._written_at - began


def save(folder: RunFolder, progress: Progress, policy: Policy, learner: Updater) -> None:
    """Write the checkpoint of `progress.step`; a kill leaves either all of it or none. Raises OSError."""
    with whole_folder(folder.checkpoint(progress.step)) as fresh:
        policy.save(fresh / "model", merged=progress.stage_complete)
        learner.save(fresh)
        write_json(fresh / "state.json", asdict(progress) | marks_of(fresh))


def latest(folder: RunFolder) -> tuple[Progress, Path] | None:
    """The newest complete checkpoint; None if there is none. Raises DataError."""
    for step in reversed(folder.checkpoint_steps()):
        path = folder.checkpoint(step)
        if (path / "state.json").is_file():
            state = state_of(path)
            refuse_changed(path)
            return Progress(**{one.name: state[one.name] for one in fields(Progress) if one.name in state}), path
    return None


def opened(checkpoint: Path, base: Path | None = None) -> tuple[Any, Codec]:
    """The model of a checkpoint, as exported, and its tokenizer; exact weights are in the learner's state. base: the
    base model of its adapters, if it has any. Raises ConfigError."""
    folder = checkpoint / "model"
    if base:
        refuse_other_base(folder / ADAPTER_FOLDER, base)
    return load_model(base or folder), Codec.load(folder)


def prune(folder: RunFolder, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the last one of each stage."""
    for step in folder.checkpoint_steps()[:-keep]:
        path = folder.checkpoint(step)
        state = path / "state.json"  # absent if this loop was killed while deleting
        if not state.is_file() or not json.loads(state.read_text())["stage_complete"]:
            shutil.rmtree(path)
