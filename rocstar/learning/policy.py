"""The trained model itself: made, loaded, published. Optimizers live with the learners."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from rocstar.dialogue.codec import Codec
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError
from rocstar.types import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a Qwen3-shaped decoder made from random weights."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    rope_theta: float
    max_positions: int


def random_model(shape: Shape, seed: int) -> Any:
    """A fresh transformers Qwen3ForCausalLM in fp32.

    Matrices start at std 1/sqrt(fan-in) and output projections at zero, so that every layer begins as the identity
    (transformers' own 0.02 is made for widths in the thousands). Source: ours."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.02, generator=generator)
    return model


def load_model(folder: str | Path) -> Any:
    """A transformers causal LM from a Hugging Face folder, fp32. Raises ConfigError when it is not one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # stderr is for what the run does, and the bar is there for milliseconds
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


class Policy:
    """A model with its codec; `save` writes a folder that transformers and vLLM load unchanged."""

    def __init__(self, model: Any, codec: Codec, template_name: str) -> None:
        self.model: Any = model
        self.codec = codec
        self._template_name = template_name
        self.version = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def save(self, folder: Path) -> None:
        """Write config, tokenizer and weights; the folder is replaced as a whole."""
        fresh = folder.with_name(folder.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        self.model.config.save_pretrained(fresh)
        self.codec.save(fresh, template_named(self._template_name))
        self.save_weights(fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)

    def save_weights(self, folder: Path) -> None:
        """model.safetensors only, tied weights once; renamed into place."""
        folder.mkdir(parents=True, exist_ok=True)
        tied = set(self.model._tied_weights_keys or ()) if self.model.config.tie_word_embeddings else set()
        tensors = {k: v.detach().contiguous() for k, v in self.model.state_dict().items() if k not in tied}
        partial = folder / "model.safetensors.new"
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:  # its own words for what the system said; callers know OSError
            raise _as_os_error(error, partial) from error
        partial.rename(folder / "model.safetensors")

    def publish(self, folder: Path) -> Weights:
        """Write the current weights where an engine can read them."""
        self.save_weights(folder)
        return Weights(version=self.version, folder=str(folder))


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """`I/O error: ... (os error 28)` as the OSError it was; any other error as it is."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error
