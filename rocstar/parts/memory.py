"""What lies in memory, bytes by part: of one learner's and one engine's GPU, with formulas that are printed with the
plan, and of this machine where it computes on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rocstar.config.places import TorchEngines
from rocstar.config.sections import Recipe, RlStage, SftStage
from rocstar.engines.memory import cache_bytes, kv_pages
from rocstar.engines.pages import PAGE
from rocstar.learning.memory import CHUNK_ELEMENTS, FP32, PassShape
from rocstar.parts.shape import Shape

LEFT_FREE = 0.08
"""Share of a GPU's memory that is left to kernels, the allocator's gaps and communication."""
LAYER_BYTES = 34
"""Activations of one token in one layer, in units of its hidden size, when nothing is computed again (bf16, flash
attention; Korthikanti et al., arXiv 2205.05198, without the attention scores)."""
CHECKPOINT_BYTES = 2
"""The same where layers are computed again: their input alone."""
LOGITS = 3
"""How often those of a chunk are in memory at once (`learning/head.py`): with their logprobs and probabilities."""
PROCESS_BYTES = 0.42e9
"""Of Python with torch, transformers and what else a run loads (measured)."""
DEMONSTRATION_BYTES = 50
"""Python's objects for a token of a demonstration: its id, and whether it counts."""
ATTEMPT_BYTES = 250
"""Python's objects for a token of an attempt: its id and its numbers."""
MUON_BYTES = 12
"""Of a parameter in the matrices that Muon makes orthogonal at once: momentum, and the products in bf16."""
TOLD_BYTES = 5e7
"""Parts below it are not told."""


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
        "logits of a chunk (fp32, three times)": LOGITS * FP32 * CHUNK_ELEMENTS,
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


# -- this machine, where it computes on CPUs --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What memory follows from besides a recipe and a shape."""

    positions: int
    """Tokens of the longest attempt."""
    problems: Mapping[str, int]
    """By RL stage."""
    heldout: int
    """Of an evaluation."""
    rows: Mapping[str, Sequence[int]]
    """Tokens of the demonstrations of SFT stages, where they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The most that a run takes of main memory, bytes by part: attempts that are as long as their caps allow."""

    always: Mapping[str, float]
    learning: Mapping[str, float]
    """Besides, while it learns."""
    writing: Mapping[str, float]
    """Besides, while attempts are made."""
    others: Mapping[str, float]
    """Of engines and learners in processes of their own, and of what they read from."""
    overlaps: bool
    """Attempts are made while it learns."""

    @property
    def run(self) -> float:
        """Of the run's own process, at its peak."""
        learning, writing = total(self.learning), total(self.writing)
        return total(self.always) + (learning + writing if self.overlaps else max(learning, writing))

    @property
    def bytes(self) -> float:
        return self.run + total(self.others)

    def __str__(self) -> str:
        named = {"": self.always, "to learn ": self.learning, "to write ": self.writing, "elsewhere ": self.others}
        return "; ".join(name + told for name, parts in named.items() if (told := _told(parts)))


def host_memory(recipe: Recipe, shape: Shape, load: Load) -> HostMemory:
    """Of a run on CPUs, all on this machine."""
    weights = FP32 * float(shape.parameters)
    engine, cache = _engine_parts(recipe, shape, load)
    written = max(attempts for attempts, _ in _rollouts(recipe, load)) * load.positions * ATTEMPT_BYTES
    passes = max((_pass_bytes(recipe, shape, load, stage) for stage in recipe.stage), default=0.0)
    reference = any(isinstance(stage, RlStage) and stage.learning.kl_coefficient for stage in recipe.stage)
    ranks, engines = recipe.cluster.learners - 1, engines_here(recipe)
    own = 0 if recipe.engine else 1
    return HostMemory(
        always={
            "Python and its libraries": PROCESS_BYTES,
            "weights": weights,
            "optimizer": max((_moments(stage, shape) for stage in recipe.stage), default=0.0),
            "KL reference": weights * reference,
            "demonstrations": float(sum(sum(lengths) for lengths in load.rows.values())) * DEMONSTRATION_BYTES,
            "the engine's weights": own * engine,
        },
        learning={"gradients": weights, "one pass": passes, "attempts": written},
        writing={"keys and values": own * cache, "attempts": written},
        others={
            "learners": ranks * (PROCESS_BYTES + passes + 2.0 * FP32 * shape.hidden * shape.vocabulary),
            "engines": (engines - own) * (PROCESS_BYTES + engine + cache),
            "published weights": (1 - own) * 2.0 * itemsize_of(recipe) * shape.parameters,
        },
        overlaps=any(isinstance(stage, RlStage) and stage.rollout.max_staleness_steps for stage in recipe.stage),
    )


def pass_shape(recipe: Recipe, shape: Shape) -> PassShape:
    return PassShape(
        parameters=shape.parameters,
        hidden=shape.hidden,
        layers=shape.layers,
        queries=shape.heads * shape.head_width,
        keys=shape.kv_heads * shape.head_width,
        inner=shape.intermediate,
        normed=shape.normed,
        recomputed=recipe.model.gradient_checkpointing,
    )


def engines_here(recipe: Recipe) -> int:
    """Engines that compute on this machine."""
    if not recipe.engine:
        return 1
    torch = sum(entry.count for entry in recipe.engine if isinstance(entry, TorchEngines))
    return torch + (sum(entry.count for entry in recipe.servers) if recipe.cluster.launcher == "processes" else 0)


def itemsize_of(recipe: Recipe) -> int:
    """Of an engine's numbers on CPUs."""
    return 2 if recipe.model.dtype == "bfloat16" else 4


def _engine_parts(recipe: Recipe, shape: Shape, load: Load) -> tuple[float, float]:
    """Bytes of one engine's weights, whose head is no longer the embedding, and of its cache when most of it is in
    use, with the logits of a step."""
    size, rollout = itemsize_of(recipe), recipe.rollout
    weights = size * (shape.parameters + shape.tied * shape.hidden * shape.vocabulary)
    room = kv_pages(rollout.kv_tokens, rollout.engine_rows, load.positions) * PAGE
    attempts, tokens = max(_rollouts(recipe, load), key=lambda pair: pair[1])
    cache = cache_bytes((shape.layers, shape.kv_heads, shape.head_width), min(room, tokens), size)
    return float(weights), cache + float(LOGITS * FP32 * min(attempts, rollout.engine_rows) * shape.vocabulary)


def _rollouts(recipe: Recipe, load: Load) -> Iterator[tuple[int, int]]:
    """(attempts at once, tokens that they have in a cache at their longest) of steps and evaluations."""
    caps = [stage.rollout.max_response_tokens for stage in recipe.stage if isinstance(stage, RlStage)]
    prompt = load.positions - max(caps, default=recipe.rollout.max_response_tokens)
    groups = [(load.heldout, recipe.evaluate.attempts, max(caps, default=0))]
    for stage in recipe.stage:
        if isinstance(stage, RlStage):
            rollout = stage.rollout
            problems = min(rollout.problems_per_step, load.problems.get(stage.name, rollout.problems_per_step))
            groups.append((problems, rollout.attempts_per_problem, rollout.max_response_tokens))
    for problems, attempts, cap in groups:
        yield problems * attempts, problems * (max(0, prompt) + attempts * (cap + PAGE))


def _pass_bytes(recipe: Recipe, shape: Shape, load: Load, stage: SftStage | RlStage) -> float:
    """Of the stage's largest pass, and of the logits of its chunks; of Muon's products where they are more."""
    if isinstance(stage, SftStage):
        lengths = load.rows.get(stage.name) or [load.positions]
        row, most = max(lengths), stage.sft.batch_rows * sum(lengths) // len(lengths)
        tokens, muon = stage.sft.tokens_per_microbatch, stage.sft.optimizer == "muon"
    else:
        learning, row = stage.learning, load.positions
        most = stage.rollout.problems_per_step * stage.resample.keep // learning.updates_per_step * row
        tokens, muon = learning.tokens_per_microbatch, False
    passes = pass_shape(recipe, shape)
    left = passes.largest(min(tokens, most), row)
    logits = LOGITS * FP32 * min(CHUNK_ELEMENTS, left // passes.left(1, 1) * shape.vocabulary)
    return float(max(left + logits, muon * MUON_BYTES * _matrices(shape)))


def _moments(stage: SftStage | RlStage, shape: Shape) -> float:
    """AdamW keeps two for each parameter, Muon one for those in its matrices."""
    muon = isinstance(stage, SftStage) and stage.sft.optimizer == "muon"
    return FP32 * (2.0 * shape.parameters - muon * _matrices(shape))


def _matrices(shape: Shape) -> int:
    """Parameters inside layers."""
    return shape.parameters - shape.hidden * shape.vocabulary * (1 if shape.tied else 2)


def _told(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts.items() if size >= TOLD_BYTES)
