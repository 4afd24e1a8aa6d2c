"""Training state on disk, by torch.distributed.checkpoint: written by any number of ranks, read by any other.

learner/          .metadata and one .distcp file a rank
    weights.NAME            fp32
    moments.NAME.KEY        what the optimizer keeps for a parameter
    counters                int64: optimizer updates, policy version
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException

STATE_FOLDER = "learner"


def save_state(folder: Path, tensors: dict[str, Any]) -> None:
    """Collective. Raises OSError."""
    target = folder / STATE_FOLDER
    with _torch_words(target):
        save(tensors, storage_writer=FileSystemWriter(target), no_dist=not dist.is_initialized())


def load_state(folder: Path, tensors: dict[str, Any]) -> None:
    """Collective; fills `tensors` in place. Raises OSError."""
    target = folder / STATE_FOLDER
    with _torch_words(target):
        load(tensors, storage_reader=FileSystemReader(target), no_dist=not dist.is_initialized())


def names_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every saved tensor. Raises OSError."""
    found = FileSystemReader(folder / STATE_FOLDER).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in found.items() if hasattr(entry, "size")}


def moments(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """What the optimizers keep, by parameter name."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"moments.{names[parameter]}.{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_moments(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the optimizers back what `moments` saved. Collective. Raises OSError."""
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    saved: dict[str, torch.Tensor] = {}
    shapes = names_in(folder)
    for name, parameter in model.named_parameters():
        for entry, shape in shapes.items():
            head, _, key = entry.rpartition(".")
            if head == f"moments.{name}":
                like = torch.zeros_like(parameter) if shape == tuple(parameter.shape) else torch.zeros(shape)
                saved[entry] = owners[id(parameter)].state[parameter][key] = like
    load_state(folder, saved)


@contextmanager
def _torch_words(path: Path) -> Iterator[None]:
    """Errors as OSError, and no warning that one process is one process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        raise _as_os_error(error, path) from error


def _as_os_error(error: CheckpointException, path: Path) -> OSError:
    """The OSError that the system gave, where one is the cause or stands behind it."""
    first = next(iter(error.failures.values()))[0]
    cause: BaseException | None = first
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return OSError(f"{path}: {first}")
