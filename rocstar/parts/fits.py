"""Whether a recipe fits the memory there is: of a GPU, or of this machine where it computes on CPUs. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rocstar.config.sections import Recipe, RlStage, SftStage
from rocstar.engines.memory import host_bytes
from rocstar.errors import ConfigError
from rocstar.parts.memory import LEFT_FREE, HostMemory, learner_bytes, most_kv_tokens, total
from rocstar.parts.shape import Shape


def refuse_on_gpu(recipe: Recipe, shape: Shape, memory_bytes: float) -> None:
    """memory_bytes: of each GPU. Raises ConfigError with the first reason."""
    learner = learner_bytes(recipe, shape, recipe.cluster.learners)
    kv_tokens = kv_tokens_of(recipe, shape, memory_bytes, learner)
    for reason in refusals("a GPU here", memory_bytes, learner, kv_tokens, longest_response(recipe)):
        raise ConfigError(reason)


def refuse_here(memory: HostMemory) -> None:
    """Raises ConfigError."""
    if memory.bytes > host_bytes():
        raise ConfigError(
            f"on CPUs the run takes {beside_what_is_there(memory)}; take a smaller model, fewer [[engine]] processes, "
            "a lower rollout.kv_tokens, model.gradient_checkpointing or a larger machine"
        )


def beside_what_is_there(memory: HostMemory) -> str:
    """In a sentence's words, beside what can be taken."""
    there = host_bytes() / 1e9
    return f"up to {memory.bytes / 1e9:.1f} GB ({memory}) and {there:.1f} GB of memory are available"


def idle_learners(recipe: Recipe, learners: int) -> str | None:
    """Why some of so many would have nothing to learn from, in words."""
    for stage in recipe.stage:
        if isinstance(stage, SftStage):
            rows, what = stage.sft.batch_rows, "sft.batch_rows"
        else:
            rows = stage.kept_attempts // stage.learning.updates_per_step
            what = "rollout.problems_per_step x resample.keep / learning.updates_per_step"
        if learners > rows:
            return f"{learners} learners are more than the {rows} rows of an update of stage {stage.name} ({what})"
    return None


def idle_engines(recipe: Recipe, engines: int) -> str | None:
    """Why some of so many would have nothing to write, in words."""
    for stage in recipe.stage:
        if isinstance(stage, RlStage):
            attempts = stage.rollout.problems_per_step * stage.rollout.attempts_per_problem
            if engines > attempts:
                return f"{engines} engines are more than the {attempts} attempts of a step of stage {stage.name}"
    return None


def kv_tokens_of(recipe: Recipe, shape: Shape, memory_bytes: float, learner: Mapping[str, float]) -> float:
    """Of one engine. Without [[engine]] it lies on the first learner's GPU and has what that one leaves."""
    there = most_kv_tokens(shape, memory_bytes - (0 if recipe.engine else total(learner)))
    asked = recipe.rollout.kv_tokens
    return there if asked is None else min(there, float(asked))


def longest_response(recipe: Recipe) -> int:
    """Tokens that RL allows after a prompt; 0 without RL."""
    return max((stage.rollout.max_response_tokens for stage in recipe.stage if isinstance(stage, RlStage)), default=0)


def refusals(
    name: str, memory_bytes: float, learner: Mapping[str, float], kv_tokens: float, longest: int
) -> Iterator[str]:
    """Why these do not fit a GPU, in words."""
    most = (1 - LEFT_FREE) * memory_bytes
    if total(learner) > most:
        part = max(learner, key=lambda key: learner[key])
        yield (
            f"a learner needs {total(learner) / 1e9:.0f} GB and {name} gives {most / 1e9:.0f} GB; the "
            f"largest part is {part} with {learner[part] / 1e9:.0f} GB: take more GPUs, model.gradient_checkpointing, "
            "cluster.offload_optimizer or smaller learning.tokens_per_microbatch"
        )
    if kv_tokens < 2 * longest:
        yield (
            f"an engine's KV cache would hold {max(0.0, kv_tokens):,.0f} tokens beside the weights on {name}, "
            f"less than two attempts of {longest} tokens; take GPUs with more memory"
        )
