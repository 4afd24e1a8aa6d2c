"""Small random models of the shapes that are trained, and the plain transformers forward engines are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rocstar.types import Canary, Sampling, Weights

VOCAB = 61
# Widths are multiples of 32, as in all published models: torch's CPU kernels work on 32 numbers at once and take a
# scalar path, which rounds exp, sin and cos another way, for what is left over.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def qwen(seed: int = 0, **more: Any) -> Any:
    """One key head per query head, tied embeddings. more: of its config, as for each of them."""
    shape = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, **more}
    return lively(Qwen3ForCausalLM(Qwen3Config(**shape)), seed)


def mistral(seed: int = 0, **more: Any) -> Any:
    """Attends to the last 16 positions."""
    return lively(MistralForCausalLM(MistralConfig(**{**SHAPE, **HEADS, "sliding_window": 16, **more})), seed)


def qwen2_moe(seed: int = 0, **more: Any) -> Any:
    """Two of eight experts for each token, and one that all share."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = {**SHAPE, **HEADS, **experts, "shared_expert_intermediate_size": 64}
    return lively(Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**shape, **more})), seed)


def llama(seed: int = 0, **more: Any) -> Any:
    """Grouped heads, a head of its own for the output."""
    return lively(LlamaForCausalLM(LlamaConfig(**{**SHAPE, **HEADS, "tie_word_embeddings": False, **more})), seed)


def qwen3_5(seed: int = 0, **more: Any) -> Any:
    """Three of four layers keep a state: the gated delta rule."""
    linear = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    shape = {**SHAPE, **HEADS, **linear, "num_hidden_layers": 4, "layer_types": kinds, "linear_num_value_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for decay rates, which are drawn and no matrix
        return lively(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**shape, **more})), seed)


def lfm2(seed: int = 0, **more: Any) -> Any:
    """Short convolutions around one layer of attention."""
    kinds = ["conv", "full_attention", "conv"]
    shape = {**SHAPE, **HEADS, "num_hidden_layers": 3, "layer_types": kinds, "block_auto_adjust_ff_dim": False}
    return lively(Lfm2ForCausalLM(Lfm2Config(**{**shape, **more})), seed)


def gemma3(seed: int = 0, **more: Any) -> Any:
    """A layer that attends to the last 16 positions, then one that attends to all."""
    kinds = ["sliding_attention", "full_attention"]
    shape = {**SHAPE, **HEADS, "sliding_window": 16, "layer_types": kinds, "query_pre_attn_scalar": 32}
    return lively(Gemma3ForCausalLM(Gemma3TextConfig(**{**shape, **more})), seed)


MODELS: dict[str, Callable[..., Any]] = {
    "qwen": qwen,
    "llama": llama,
    "mistral": mistral,
    "qwen2_moe": qwen2_moe,
    "qwen3_5": qwen3_5,
    "lfm2": lfm2,
    "gemma3": gemma3,
}


def lively(model: Any, seed: int = 0, deviation: float = 1.5) -> Any:
    """Weights large enough that attention and the next token depend strongly on what came before. deviation: times
    the square root of what is summed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, deviation * parameter[0].numel() ** -0.5, generator=generator)
    return model.eval()


def naive_logprobs(model: Any, context: Sequence[int], written: Sequence[int], sampling: Sampling) -> list[float]:
    """The log-probability of each written token after temperature, whatever top-k and top-p cut off."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *written]]), use_cache=False).logits[0].double()
    laws = torch.log_softmax(logits[len(context) - 1 : -1] / (sampling.temperature or 1.0), -1)
    return laws.gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1).tolist()


def resident() -> int:
    """Bytes of main memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def saved(model: nn.Module, folder: Any, version: int) -> Weights:
    """The model's weights as a learner publishes them."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return Weights(version=version, folder=str(folder), canary=(canary(model),))


def canary(model: nn.Module) -> Canary:
    row = [token * 7 % VOCAB for token in range(24)]
    return Canary(
        token_ids=tuple(row), logprobs=tuple(naive_logprobs(model, row[:1], row[1:], Sampling(max_new_tokens=1)))
    )
