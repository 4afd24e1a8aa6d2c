"""New weights into a model in place, from memory or from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rocstar.errors import EngineUnavailable
from rocstar.types import Weights


def take_weights(model: Any, weights: Weights) -> Mapping[str, torch.Tensor]:
    """Copy `weights` into `model`, to its device and dtype, and return them by name. Raises EngineUnavailable, and then
    changes nothing, when they can't be read or names or shapes differ; tied weights may stand there once or twice."""
    tensors = _read(weights) if weights.tensors is None else weights.tensors
    own = model.state_dict()
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    wrong = sorted(
        name
        for name in (own.keys() - tied) | tensors.keys()
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape
    )
    if wrong:
        raise EngineUnavailable(
            f"weights {weights.version} do not fit the model: {len(wrong)} tensors are missing, unknown or of another "
            f"shape, such as {wrong[0]}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return tensors


def _read(weights: Weights) -> Mapping[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(f"{weights.folder}/model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineUnavailable(
            f"weights {weights.version} could not be read from {weights.folder}: {error}"
        ) from error
    return tensors
