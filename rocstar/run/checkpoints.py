"""A run's progress in memory and on disk: model, learner state and position, renamed into place as one folder.

checkpoints/step=000042/
    model/         Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json; with
                   model.lora_rank adapter/ of PEFT's format, and model.safetensors only at a stage's end
    learner/       fp32 weights that are trained and optimizer state
    state.json     Progress; of `carried` only whether it exists; `bytes` and `hashes` of each file of the two folders
    carried.json   what the last step carried over to the next, with rollout.carry_over
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rocstar.config.sections import RunSection
from rocstar.dialogue.codec import Codec
from rocstar.errors import DataError
from rocstar.learning.models import load_model
from rocstar.learning.policy import ADAPTER_FOLDER, Policy
from rocstar.learning.update import Updater
from rocstar.record.atomic import whole_folder, write_atomic, write_json
from rocstar.record.folder import RunFolder
from rocstar.rollout.carry import Carried
from rocstar.support.weights import marks_of, put_back, refuse_changed, refuse_other_base, state_of
from rocstar.types import Problem

CARRIED = TypeAdapter(Carried)


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
    carried: Carried = field(default_factory=Carried)
    """What its last step carried over to the next."""


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
        carries = progress.carried != Carried()
        state = asdict(replace(progress, carried=Carried())) | {"carried": carries, **marks_of(fresh)}
        write_json(fresh / "state.json", state)
        if carries:
            write_atomic(fresh / "carried.json", _dumped(progress.carried).encode())


def latest(folder: RunFolder) -> tuple[Progress, Path] | None:
    """The newest complete checkpoint; None if there is none. Raises DataError."""
    for step in reversed(folder.checkpoint_steps()):
        path = folder.checkpoint(step)
        if (path / "state.json").is_file():
            state, carried = state_of(path), path / "carried.json"
            refuse_changed(path)
            carries = state.get("carried", carried.is_file())  # absent in older checkpoints
            done = {name: state[name] for name in state if name not in ("bytes", "hashes")}
            return Progress(**done | {"carried": _read_carried(carried) if carries else Carried()}), path
    return None


def opened(checkpoint: Path, base: Path | None = None) -> tuple[Any, Codec]:
    """The model of a checkpoint, as exported, and its tokenizer; exact weights are in the learner's state. base: the
    base model of its adapters, if it has any. Raises ConfigError."""
    folder = checkpoint / "model"
    if base:
        refuse_other_base(folder / ADAPTER_FOLDER, base)
    return load_model(base or folder), Codec.load(folder)


def with_problems(carried: Carried, problems: Sequence[Problem]) -> Carried:
    """The same groups with the stage's own problems: JSON turned a loader's fields, such as a date, into text, which a
    reward function would otherwise get only after a kill."""
    known = {_dumped(problem): problem for problem in problems}
    groups = (
        replace(one, group=replace(one.group, problem=known.get(_dumped(one.group.problem), one.group.problem)))
        for one in carried.groups
    )
    return replace(carried, groups=tuple(groups))


def _dumped(value: Carried | Problem) -> str:
    return json.dumps(asdict(value), default=str)  # keeps lone surrogates, which a model can write


def _read_carried(file: Path) -> Carried:
    try:
        return CARRIED.validate_python(json.loads(file.read_bytes()))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(
            f"{file} holds the attempts that its step carried over to the next and cannot be read ({why}); "
            f"{put_back(file.parent)}"
        ) from None


def prune(folder: RunFolder, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the last one of each stage."""
    for step in folder.checkpoint_steps()[:-keep]:
        path = folder.checkpoint(step)
        state = path / "state.json"  # absent if this loop was killed while deleting
        if not state.is_file() or not json.loads(state.read_text())["stage_complete"]:
            shutil.rmtree(path)
