"""Memory of a run on CPUs, bytes by part, and whether it fits. Of GPUs: placement.py. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocstar.config.sections import ModelSection, Recipe, RolloutSection, Stage
from rocstar.engines.pages import PAGE, cache_bytes, kv_pages
from rocstar.errors import ConfigError
from rocstar.learning.memory import CHUNK_ELEMENTS, FP32, PassShape
from rocstar.parts.shape import Shape
from rocstar.sandbox.container import host_bytes

LOGITS = 3
"""Copies of a chunk's logits in memory at once (`learning/head.py`): with their logprobs and probabilities."""
PROCESS_BYTES, OTHER_BYTES = 0.54e9, 0.42e9
"""Memory of Python with torch, transformers and what else a run loads, 0.16 GB of it files (measured after a step), and
of the process of an engine or of another learner."""
DEMONSTRATION_BYTES = 50
"""Python's objects for a token of a demonstration: its id, and whether it counts."""
ATTEMPT_BYTES = 250
"""Python's objects for a token of an attempt: its id and its numbers."""
PROBLEM_BYTES = 600
"""Python's objects for a problem of one line."""
TOLD_BYTES = 5e7  # smaller parts are left out of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The most that a run takes of main memory, bytes by part: attempts that are as long as their caps allow."""

    always: Mapping[str, float]
    learning: Mapping[str, float]
    """Additional, while it learns."""
    writing: Mapping[str, float]
    """Additional, while attempts are made."""
    publishing: Mapping[str, float]
    """Additional, while a model with adapters is written as a whole, as each stage ends."""
    others: Mapping[str, float]
    """Of engines and learners in other processes, and of the weights that they read."""
    overlaps: bool
    """Attempts are made while it learns."""

    @property
    def run(self) -> float:
        """Memory of the run's own process at its peak."""
        always, learning, writing, publishing = (
            sum(parts.values()) for parts in (self.always, self.learning, self.writing, self.publishing)
        )
        return always + max(learning + writing if self.overlaps else max(learning, writing), publishing)

    @property
    def bytes(self) -> float:
        return self.run + sum(self.others.values())

    def __str__(self) -> str:
        named = {"": self.always, "to learn ": self.learning, "to write ": self.writing}
        named |= {"to save ": self.publishing, "elsewhere ": self.others}
        lines = {
            name: ", ".join(f"{part} {size / 1e9:.1f} GB" for part, size in parts.items() if size >= TOLD_BYTES)
            for name, parts in named.items()
        }
        return "; ".join(name + parts for name, parts in lines.items() if parts)


def host_memory(
    recipe: Recipe,
    shape: Shape,
    *,
    positions: int,
    problems: Mapping[str, int],
    heldout: int,
    rows: Mapping[str, Sequence[int]],
) -> HostMemory:
    """The memory of a run on CPUs, all on this machine. positions: tokens of the longest attempt. problems, heldout:
    numbers of problems, of each RL stage and held out. rows: tokens of demonstrations by SFT stage, where known."""
    itemsize, trained = recipe.model.cpu_itemsize, FP32 * float(shape.trained(recipe.model))
    weights = trained + itemsize * shape.parameters * (recipe.model.lora_rank > 0)
    rounded = itemsize * trained / FP32 * (itemsize < FP32)  # autocast keeps them through a pass
    prompt = max(0, positions - max(rollout.max_response_tokens for rollout in recipe.rollouts))
    at_once = [_at_once(heldout, recipe.evaluate.attempts, prompt, recipe.longest_response)]
    for stage in recipe.rollout_stages:
        rollout = stage.rollout
        asked = min(rollout.problems_per_step, problems.get(stage.name, rollout.problems_per_step))
        at_once.append(_at_once(asked, rollout.attempts_per_problem, prompt, rollout.max_response_tokens))
    engine, cache = _engine_parts(recipe.rollout, shape, itemsize, positions, at_once)
    written = max(attempts for attempts, _ in at_once) * positions * ATTEMPT_BYTES
    written *= 1 + max((stage.rollout.refill for stage in recipe.rollout_stages), default=0)
    lengths = {stage.name: rows.get(stage.name) or [positions] for stage in recipe.stage}
    passes = max((_pass_bytes(one, shape, lengths[one.name], recipe.model) for one in recipe.stage), default=0.0)
    reference = any(stage.learning.kl_coefficient for stage in recipe.rl_stages)
    ranks, engines = recipe.cluster.learners - 1, recipe.engines_here
    own = 0 if recipe.engine else 1
    return HostMemory(
        always={
            "Python and its libraries": PROCESS_BYTES,
            "weights": weights,
            "optimizer": moments(recipe.stage, shape, recipe.model),
            "KL reference": trained * reference,
            "demonstrations": float(sum(sum(lengths) for lengths in rows.values())) * DEMONSTRATION_BYTES,
            "problems": float(PROBLEM_BYTES * sum(problems.values())),
            "the engine's weights": own * engine,
        },
        learning={"gradients": trained, "rounded weights": rounded, "one pass": passes, "attempts": written},
        writing={"keys and values": own * cache, "attempts": written},
        publishing={"merged model": FP32 * float(shape.parameters) * (recipe.model.lora_rank > 0)},
        others={
            "learners": ranks * (OTHER_BYTES + passes + 2.0 * FP32 * shape.hidden * shape.vocabulary),
            "engines": (engines - own) * (OTHER_BYTES + engine + cache),
            "published weights": (1 - own) * 2.0 * itemsize * shape.parameters,
        },
        overlaps=any(stage.rollout.max_staleness_steps for stage in recipe.rollout_stages),
    )


def refuse_here(memory: HostMemory) -> None:
    """Raises ConfigError."""
    if memory.bytes > host_bytes():
        raise ConfigError(
            f"on CPUs the run takes {beside_what_is_there(memory)}; take a smaller model, fewer [[engine]] processes, "
            "a lower rollout.kv_tokens, model.gradient_checkpointing or a larger machine"
        )


def beside_what_is_there(memory: HostMemory) -> str:
    """Describes the memory a run needs and the available memory."""
    there = host_bytes() / 1e9
    return f"up to {memory.bytes / 1e9:.1f} GB ({memory}) and {there:.1f} GB of memory are available"


def _engine_parts(
    rollout: RolloutSection, shape: Shape, itemsize: int, positions: int, at_once: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """Bytes of one engine's weights, whose head is no longer the embedding, and of its cache when most of it is in
    use, with logits and states of a step. at_once: of `_at_once`, by step and evaluation."""
    weights = itemsize * (shape.parameters + shape.tied * shape.hidden * shape.vocabulary)
    room = kv_pages(rollout.kv_tokens, rollout.engine_rows, positions) * PAGE
    attempts, tokens = max(at_once, key=lambda pair: pair[1])
    cache = cache_bytes((shape.layers, shape.kv_heads, shape.head_width), min(room, tokens), itemsize)
    layers, _, state = shape.rules  # states are in fp64 (`torch_states.py`)
    row = LOGITS * FP32 * shape.vocabulary + 2 * FP32 * layers * state
    return float(weights), cache + float(row * min(attempts, rollout.engine_rows))


def _at_once(problems: int, attempts: int, prompt: int, cap: int) -> tuple[int, int]:
    """(attempts at once, tokens that they have in a cache at their longest). attempts: at each problem. prompt, cap:
    tokens of a prompt and of a response."""
    return problems * attempts, problems * (prompt + attempts * (cap + PAGE))


def _pass_bytes(stage: Stage, shape: Shape, lengths: Sequence[int], model: ModelSection) -> float:
    """Bytes of the stage's largest pass, and of the logits of its chunks. lengths: of rows."""
    most = stage.update_rows * sum(lengths) // len(lengths)
    passes = PassShape(
        parameters=shape.parameters,
        hidden=shape.hidden,
        layers=shape.layers,
        queries=shape.heads * shape.head_width,
        keys=shape.kv_heads * shape.head_width,
        inner=shape.intermediate,
        normed=shape.normed,
        rules=shape.rules[0],
        rule=shape.rules[1],
        recomputed=model.gradient_checkpointing,
    )
    left = passes.largest(min(stage.learner.tokens_per_microbatch, most), max(lengths))
    logits = LOGITS * FP32 * min(CHUNK_ELEMENTS, left // passes.left(1, 1) * shape.vocabulary)
    return float(left + logits)


def moments(stages: Sequence[Stage], shape: Shape, model: ModelSection) -> float:
    """Bytes of optimizer state in the stage that has most: AdamW keeps two numbers for each parameter that learns, Muon
    one in fp32 for those in its matrices."""
    most = 0.0
    for stage in stages:
        both = 2.0 * (FP32 if stage.learner.moments_dtype == "float32" else 2)
        muon = (both - FP32) * shape.matrices if stage.learner.optimizer == "muon" else 0.0
        most = max(most, both * shape.trained(model) - muon)
    return most
