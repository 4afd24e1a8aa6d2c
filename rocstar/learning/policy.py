"""The trained model: where its weights live, how they leave. Optimizers live with the learners."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from rocstar.config.sections import ModelSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import Template
from rocstar.errors import RunHalted
from rocstar.learning.canary import canary_rows
from rocstar.learning.forward import prepare
from rocstar.learning.head import Head
from rocstar.learning.memory import give_back
from rocstar.learning.models import compute_dtype, device_of
from rocstar.learning.ranks import ALONE, Ranks, together
from rocstar.learning.sharding import full, reduced, reshard, shard
from rocstar.learning.state import load_state
from rocstar.types import Canary, Weights


class Policy:
    """A model with its codec, on one rank or sharded over several; trained weights are always fp32.

    With several ranks every rank makes one; those above 0 pass None for model and codec and are sent both."""

    role = "policy"

    def __init__(
        self,
        model: Any,
        codec: Codec,
        template: Template,
        section: ModelSection | None = None,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        """Raises ConfigError for a model that can't be trained packed."""
        section = section or ModelSection()
        ranks.make(self, section)
        self.ranks, self.codec, self.version = ranks, codec, 0
        self.device = device_of(section, ranks.local_rank)
        self.dtype = compute_dtype(section, self.device)
        self.recomputes = section.gradient_checkpointing
        self.learnt = 0, 0
        """Tokens of the update under way that are learnt from, and all of it."""
        self._template = template
        if model is not None:
            model.config.architectures = [type(model).__name__]  # vLLM asks for it; sharding renames the type
            model.to(self.device if ranks.mesh is None else "cpu")
            prepare(model, self.device, self.dtype)
        with ranks.guarded("sharding the model"):
            self._known: int = ranks.share(codec and codec.vocab_size)
            self.model: Any = model if ranks.mesh is None else shard(model, ranks, self.device, self.dtype)
        if self.recomputes:
            enable = getattr(self.model, "activation_checkpointing_enable", None)  # its older name warns where both are
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})

    @classmethod
    def on_rank(cls, ranks: Ranks, members: Mapping[str, Any], section: ModelSection) -> Policy:
        """The same policy on a rank above 0."""
        nothing: Any = None
        return cls(nothing, nothing, nothing, section, ranks=ranks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    # -- used by learners -------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes run in the compute dtype inside it."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    @contextmanager
    def head(self, temperature: float) -> Iterator[Head]:
        """The LM head, whole; gradients that it collected are dealt back to the shards on leaving."""
        embeddings = self.model.get_output_embeddings()
        if self.ranks.mesh is None:
            yield Head(weight=embeddings.weight, bias=embeddings.bias, temperature=temperature, known=self._known)
            return
        weight = full(embeddings.weight, self.device).requires_grad_()
        bias = None if embeddings.bias is None else full(embeddings.bias, self.device).requires_grad_()
        yield Head(weight=weight, bias=bias, temperature=temperature, known=self._known)
        for parameter, whole in ((embeddings.weight, weight), (embeddings.bias, bias)):
            if whole is not None and whole.grad is not None:
                share = reduced(whole.grad, parameter)
                parameter.grad = share if parameter.grad is None else parameter.grad + share

    # -- leaving ----------------------------------------------------------------------------------------------------

    @together
    def save(self, folder: Path) -> None:
        """Fill `folder` as a Hugging Face one that transformers and vLLM load unchanged, weights in the dtype the model
        came in. `runs.atomic.whole_folder` makes it durable, and a whole. Raises OSError, and RunHalted for weights
        that are not finite."""
        tensors = self._tensors(self.model.config.dtype or torch.float32)
        if self.ranks.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(folder)
        self.codec.save(folder, self._template)
        _write_weights(folder / "model.safetensors", tensors)

    @together
    def publish(self, folder: Path | None = None) -> Weights:
        """The current weights for engines. Without a folder they are for one in this process: the live tensors where
        nothing is sharded, so an engine copies what it keeps before the next update. With one they are written there as
        a Hugging Face model in the dtype of the forward pass; raises OSError, and RunHalted for weights that are not
        finite.

        Whoever publishes has learnt for now, so the gradients go, and the memory that passes had goes back."""
        for parameter in self.parameters:
            parameter.grad = None
        give_back()
        if folder is None:
            return Weights(version=self.version, tensors=self._tensors(None))
        tensors = self._tensors(self.dtype)
        if not self.ranks.rank:
            folder.mkdir(parents=True, exist_ok=True)
            self.model.config.save_pretrained(folder)
            _write_weights(folder / "model.safetensors", tensors)
        return Weights(version=self.version, folder=str(folder), canary=self.canary())

    @together
    @torch.no_grad()
    def canary(self) -> tuple[Canary, ...]:
        """What engines in other processes must give with the current weights."""
        with self.head(1.0) as head, self.autocast():
            rows = canary_rows(self.model, head, self._known, self.device)
        reshard(self.model)
        return rows

    @together
    def restore(self, folder: Path) -> None:
        """Take the fp32 weights that a learner's `save` left in `folder`, on any number of ranks. Raises OSError."""
        load_state(folder, {f"weights.{name}": value for name, value in self.model.named_parameters()})

    def require_finite(self) -> None:
        """Raises RunHalted: weights that hold nan or inf are never written."""
        if not all(_finite(parameter) for parameter in self.parameters):
            raise RunHalted("the model's weights hold nan or inf, so nothing is saved; resume from the last checkpoint")

    def _tensors(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Whole tensors by name, tied ones once; empty on ranks above 0."""
        if dtype is not None:
            self.require_finite()
        tied = set(self.model._tied_weights_keys or ()) if self.model.config.tie_word_embeddings else set()
        tensors = {}
        for name, value in self.model.state_dict().items():
            if name not in tied:
                whole = full(value.detach(), torch.device("cpu") if self.ranks.mesh else None)
                if not self.ranks.rank:
                    tensors[name] = whole if dtype is None else whole.to(dtype)
        return tensors


def _finite(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(local.detach().isfinite().all())


def _write_weights(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises OSError."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its own words for what the system said; callers know OSError
        raise _as_os_error(error, path) from error


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """`I/O error: ... (os error 28)` as the OSError it was; any other error as it is."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error
