"""Adapters (LoRA; Hu et al., arXiv 2106.09685) through the PEFT library: added to a model whose own weights then stay
as they are, merged for programs that need a whole model, and saved in PEFT's own format.

Adapters are inserted into the model's own layers, so everything that runs the model runs its adapters. A layer's merged
matrix is W + alpha / rank * B A in fp32, one matrix at a time. Not here: the other kinds of adapters that PEFT trains,
which PEFT merges (`parts/modelfolder.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from rocstar.config.sections import ModelSection
from rocstar.errors import ConfigError, naming
from rocstar.learning.ranks import full, reshard

ADAPTER = "default"
"""PEFT's name of the only adapter."""
BASE, DOWN, UP = ".base_layer.", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def add_adapters(model: Any, section: ModelSection, dtype: torch.dtype, seed: int) -> None:
    """From now on train only adapters, in fp32; the model's own matrices stay in `dtype`. Raises ConfigError for a
    target that is not a linear layer inside the model's layers."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,
        target_modules=_targets(model, section.lora_targets),
        base_model_name_or_path=str(Path(model.name_or_path).absolute()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    config.target_modules = sorted(config.target_modules)  # a set, which each process would save in another order
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)


def _targets(model: Any, requested: Sequence[str]) -> list[str]:
    layers = [name for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear)]
    there = sorted({name.rpartition(".")[2] for name in layers})
    if wrong := [target for target in requested or there or ["nothing"] if target not in there]:
        raise ConfigError(
            f"model.lora_targets names {wrong[0]!r}, which is not a linear layer of a model of type "
            f"{model.config.model_type}; there are {', '.join(there) or 'none'}"
        )
    return list(requested) or there


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's adapters, unsharded, under PEFT's names; collective."""
    found = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": full(value) for name, value in found.items()}


def save_adapters(model: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Save adapters in the format that PEFT and vLLM read. Raises OSError."""
    model.peft_config[ADAPTER].save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    with naming(file):
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, file)


class Merged(Mapping[str, torch.Tensor]):
    """The tensors of a model with its adapters merged, each computed when it is read; collective."""

    def __init__(self, model: Any, left_out: Set[str]) -> None:
        """left_out: names of tensors tied to others."""
        self._state: dict[str, torch.Tensor] = model.state_dict()
        self._scale = model.peft_config[ADAPTER].lora_alpha / model.peft_config[ADAPTER].r
        own = (name for name in self._state if name not in left_out and not name.endswith((DOWN, UP)))
        self._names = {name.replace(BASE, "."): name for name in own}

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._names[name]
        layer, adapted, _ = source.rpartition(f"{BASE}weight")
        if not adapted:
            return full(self._state[source])
        down, up = (full(self._state[layer + part]) for part in (DOWN, UP))
        merged: torch.Tensor = full(self._state[source]).float() + (up @ down) * self._scale
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """Within this context the model computes in fp32 with weights that are kept, or gathered from ranks, in less; one
    layer at a time is widened, since an adapter reads the dtype of others' weights. Collective."""
    reshard(model)
    kept: dict[nn.Module, dict[str, Any]] = {module: dict(module._parameters) for module in model.modules()}
    layers = set(model._no_split_modules or ())
    narrow_data: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def widen(module: nn.Module, given: Any) -> None:
        is_layer = any(each.__name__ in layers for each in type(module).__mro__)
        narrow_data[module] = []
        for part in module.modules() if is_layer else (module,):
            for name, used in part._parameters.items():
                if used is not None and used.dtype != torch.float32:
                    narrow_data[module].append((used, used.data))
                    used.data = full(kept[part][name], used.device).float()

    def narrow(module: nn.Module, given: Any, output: Any) -> None:
        for used, data in narrow_data.pop(module):
            used.data = data

    with ExitStack() as hooks:
        for module in kept:
            hooks.enter_context(module.register_forward_pre_hook(widen))
            hooks.enter_context(module.register_forward_hook(narrow))
        yield
