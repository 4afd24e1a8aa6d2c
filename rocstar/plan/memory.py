"""What lies in the memory of one learner's and one engine's GPU, bytes by part. Formulas are printed with the plan."""

from __future__ import annotations

from collections.abc import Mapping

from rocstar.config import Recipe, RlStage, SftStage
from rocstar.plan.shape import Shape

LEFT_FREE = 0.08
"""Share of a GPU's memory that is left to kernels, the allocator's gaps and communication."""
LAYER_BYTES = 34
"""Activations of one token in one layer, in units of its hidden size, when nothing is computed again (bf16, flash
attention; Korthikanti et al., arXiv 2205.05198, without the attention scores)."""
CHECKPOINT_BYTES = 2
"""The same where layers are computed again: their input alone."""
HEAD_CHUNK = 1024
"""Tokens whose logits are in memory at once (`learning/head.py`), fp32."""


def learner_bytes(recipe: Recipe, shape: Shape, ranks: int) -> dict[str, float]:
    """Of one of `ranks` learners on GPUs (FSDP2: weights, gradients and optimizer state in equal parts)."""
    each = shape.parameters / ranks
    tokens = _micro_batch(recipe)
    layer = shape.parameters / (shape.layers + 2)
    kept = CHECKPOINT_BYTES if recipe.model.gradient_checkpointing else LAYER_BYTES
    reference = any(isinstance(stage, RlStage) and stage.learning.kl_coefficient for stage in recipe.stage)
    return {
        "weights (fp32, 4 N / ranks)": 4 * each,
        "gradients (fp32, 4 N / ranks)": 4 * each,
        "optimizer (fp32, 8 N / ranks)": 0.0 if recipe.cluster.offload_optimizer else 8 * each,
        "reference (fp32, 4 N / ranks)": 4 * each if reference else 0.0,
        "two gathered layers (bf16)": 2 * 2 * layer if ranks > 1 else 2 * shape.parameters,
        f"activations ({kept} x hidden x layers x tokens)": kept * shape.hidden * shape.layers * tokens
        + (0 if kept == LAYER_BYTES else LAYER_BYTES * shape.hidden * tokens),
        "logits of a chunk (fp32, three times)": 3 * 4 * HEAD_CHUNK * shape.vocabulary,
    }


def engine_bytes(shape: Shape, kv_tokens: float) -> dict[str, float]:
    """Of one engine on one GPU, in bf16."""
    return {
        "weights (bf16, 2 N)": 2.0 * shape.parameters,
        f"KV cache ({kv_tokens:,.0f} tokens x {shape.kv_bytes(2):,} bytes)": kv_tokens * shape.kv_bytes(2),
    }


def most_kv_tokens(shape: Shape, memory_bytes: float) -> float:
    """Tokens whose keys and values fit beside the weights; below zero where these alone do not fit."""
    return ((1 - LEFT_FREE) * memory_bytes - 2 * shape.parameters) / shape.kv_bytes(2)


def total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def _micro_batch(recipe: Recipe) -> int:
    """Tokens of the largest forward and backward pass: the setting, or the longest row, which gets one of its own."""
    passes = [0]
    for stage in recipe.stage:
        if isinstance(stage, SftStage):
            passes.append(stage.sft.tokens_per_microbatch)
        else:
            passes += [stage.learning.tokens_per_microbatch, stage.rollout.max_response_tokens]
    return max(passes)
