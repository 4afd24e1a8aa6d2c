"""The KL reference: a copy of this rank's weights, which change places with the current ones while it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rocstar.learning.state import load_state, save_state

FOLDER = "reference"


class Reference:
    """Weights of `model` as they are now."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def refresh(self) -> None:
        """Take the current weights."""
        for name, parameter in self._model.named_parameters():
            _local(self._weights[name]).copy_(_local(parameter))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model computes with the reference's weights inside it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def save(self, folder: Path) -> None:
        save_state(folder / FOLDER, self._weights)

    def restore(self, folder: Path) -> None:
        """A checkpoint without one (of a stage without KL) leaves it as it is."""
        if (folder / FOLDER).exists():
            load_state(folder / FOLDER, self._weights)

    def _swap(self) -> None:
        for name, parameter in self._model.named_parameters():
            mine, other = _local(parameter), _local(self._weights[name])
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
