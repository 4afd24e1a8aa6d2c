"""FSDP2: each rank holds a share of every weight; gradients are summed over ranks, not averaged."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from rocstar.learning.forward import prepare

if TYPE_CHECKING:
    from rocstar.learning.ranks import Ranks


def shard(model: Any, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Any:
    """A model over all ranks with the weights of rank 0's `model`; other ranks pass None and never hold it whole.

    Layers are gathered one by one. Embeddings and last norm stay gathered between forward and backward. The LM head is
    not part of it: `Policy.head` gathers it once for all chunks of an update."""
    from transformers import AutoModelForCausalLM

    config, generation = ranks.share(None if ranks.rank else (model.config, model.generation_config))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=torch.float32)
    prepare(empty, device, dtype)
    empty.config.dtype, empty.generation_config = config.dtype, generation
    settings: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if ranks.offload and device.type == "cuda" else OffloadPolicy(),
    }
    layers = set(empty._no_split_modules or ())
    for module in empty.modules():
        if type(module).__name__ in layers:
            fully_shard(module, **settings)
    fully_shard(empty.base_model, **settings)
    head = empty.get_output_embeddings()
    if config.tie_word_embeddings:
        head.weight = empty.get_input_embeddings().weight
    else:
        fully_shard(head, **settings)
    for module in empty.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no PREMUL_SUM
            module.set_gradient_divide_factor(1.0)
    empty.to_empty(device="cpu" if ranks.offload else device)
    if config.tie_word_embeddings:
        head.weight = empty.get_input_embeddings().weight
    weights = {} if ranks.rank else model.state_dict()
    _fill_buffers(empty, model, ranks)
    set_model_state_dict(
        empty, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )
    return empty


def _fill_buffers(empty: Any, model: Any, ranks: Ranks) -> None:
    """Buffers that no state dict holds (rotary frequencies) are small and sent whole."""
    values = ranks.share(None if ranks.rank else {name: value.cpu() for name, value in model.named_buffers()})
    for name, buffer in empty.named_buffers():
        buffer.copy_(values[name])


def reshard(model: Any) -> None:
    """Give up gathered weights: after a pass without a backward one, FSDP2 keeps those of its root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The whole of a sharded tensor, detached; collective. Others as they are."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    whole: torch.Tensor = tensor.full_tensor().detach()
    return whole if device is None else whole.to(device)


def reduced(whole: torch.Tensor, like: Any) -> Any:
    """This rank's shard of the sum over ranks of `whole`; collective."""
    summed = DTensor.from_local(whole, like.device_mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=like.placements)
