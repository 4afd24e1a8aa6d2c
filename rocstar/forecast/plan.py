"""Plans a recipe on given GPUs: the time of a step in each stage, and reasons why it is impossible. Pure, except for
reading config.json.

Rollouts go through rocstar's own simulator (`forecast/simulate.py`), on a part of the engines with the same part of the
problems, so that a plan takes seconds. Learning time is operations over the reachable share of the GPUs' peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import mul
from statistics import fmean

from rocstar.config.sections import Recipe, RlStage, Stage
from rocstar.engines.pages import kv_pages
from rocstar.errors import ConfigError
from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.simulate import alike, simulate
from rocstar.forecast.workload import TurnLengths, synthetic_workload, with_mean
from rocstar.parts.memory import moments
from rocstar.parts.placement import NOWHERE, Placement, place, refuse_wide
from rocstar.parts.shape import Shape, shape_of
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.support.screen import plural

SIMULATED_ENGINES = 2
EACH = 8
"""GPUs of a machine."""
MOST = 1e12  # GB, teraflops or GB/s of a GPU: beyond any, and no product of it overflows
TOKEN_BYTES, LEARNT_BYTES = 8.0, 7.6
"""Of one token of a response in rollouts/*.parquet: its id, logprob and text, compressed; besides, where it is learnt
from, its entropy and the learner's logprob. Numbers hardly compress (measured: SmolLM2 on solutions of GSM8K)."""
CHECKPOINT_BYTES = 8.0
"""Bytes of one parameter in a checkpoint besides optimizer state: fp32 weights, and the model as a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU by its maker's data sheet; operations are dense ones, without sparsity."""

    name: str
    memory_bytes: float
    flops: float
    """bf16 operations a second."""
    bandwidth: float
    """Bytes a second of its memory."""


GPUS: Mapping[str, tuple[float, float, float]] = {
    "b200": (180, 2250, 8000),
    "h200": (141, 989, 4800),
    "h100": (80, 989, 3350),
    "h20": (96, 148, 4000),
    "a100": (80, 312, 2040),
    "a100-40": (40, 312, 1555),
    "l40s": (48, 362, 864),
    "l4": (24, 121, 300),
    "a10": (24, 125, 600),
    "a6000": (48, 155, 768),
    "6000ada": (48, 364, 960),
    "pro6000": (96, 504, 1792),
    "5090": (32, 210, 1792),
    "4090": (24, 165, 1010),
    "3090": (24, 71, 936),
    "mi300x": (192, 1307, 5300),
    "mi325x": (256, 1307, 6000),
    "mi355x": (288, 2517, 8000),
}
"""Memory, dense bf16 operations and bandwidth, in the units of data sheets: GB, TFLOPS and GB/s."""


WITHOUT_GPUS = "for a machine without GPUs rocstar train RECIPE --dry-run tells the memory that a run takes"


def gpu_named(name: str) -> GpuSpec:
    """One of GPUS, or any other by its `GB:TFLOPS:GB/s`. Raises ConfigError."""
    try:
        gigabytes, teraflops, gigabytes_a_second = GPUS.get(name) or map(float, name.split(":"))
        if not all(0 < value < MOST for value in (gigabytes, teraflops, gigabytes_a_second)):
            raise ValueError(name)
    except ValueError:
        raise ConfigError(
            f"--gpu {name} is not known; choose of {', '.join(GPUS)}, or give memory, dense bf16 operations and "
            f"bandwidth of another as GB:TFLOPS:GB/s, for instance 48:362:864; {WITHOUT_GPUS}"
        ) from None
    return GpuSpec(name=name, memory_bytes=gigabytes * 1e9, flops=teraflops * 1e12, bandwidth=gigabytes_a_second * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Quantities unknown before a run. Each can be given; `GpuPlan.matters` shows the most important one."""

    length_share: float = 0.4
    """Mean response over its cap. The paper's stages: 0.13 to 0.5, 0.33 to 0.5, 0.5 to 0.67 (§5.2)."""
    bandwidth_share: float = 0.6
    """Share of the memory's bandwidth that decoding reaches."""
    learning_share: float = 0.45
    """Share of peak operations that learning reaches."""
    prefill_share: float = 0.5
    """Share of peak operations that feeding a prompt reaches."""
    decode_seconds: float = 0.004
    """Of a decode step beside reading memory: launching, scheduling."""
    sequence_seconds: float = 2e-5
    """Of a decode step for each sequence in it: scheduling, sampling, answering."""
    prompt_tokens: float = 300.0
    """Mean of a prompt."""
    exchange_bandwidth: float = 5e9
    """Bytes of weights a second that reach the engines."""
    tool_calls: float = 2.7
    """Per attempt (45K a step of 16,384, §3.1)."""
    program_cpu_seconds: float = 0.03
    """CPU of one program in the sandbox, numpy loaded."""
    demonstration_tokens: float = 600.0
    """Tokens of one row of SFT."""
    step_overhead_seconds: float = 20.0
    """Seconds of a step beyond rollouts, learning and weights: verifying, preparing, recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    name: str
    steps: int
    tokens: float
    """Learnt from or written in a step."""
    rollout_seconds: float = 0.0
    """Seconds of a step for its attempts."""
    learning_seconds: float
    """Seconds of a step for learning."""
    exchange_seconds: float = 0.0
    """Seconds of a step until engines have new weights."""
    calls: float = 0.0
    """Tool calls of a step."""
    recorded_bytes: float = 0.0
    """Of a step's attempts on the disk."""
    cores: float = 0.0
    """Cores that the sandbox needs so that programs do not wait: four times their mean use."""
    step_seconds: float

    @property
    def hours(self) -> float:
        return self.steps * self.step_seconds / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    gpu: str
    engines: int
    """Engines that write."""
    learners: int
    """GPUs that learn."""
    parameters: int
    placement: Placement
    """Which process takes which GPU, and what lies in its memory."""
    kv_tokens: float
    """Tokens that the KV cache of one engine holds."""
    sequences: float
    """At their mean length that one engine's KV cache holds."""
    stages: Sequence[StagePlan]
    disk_bytes: float
    """Of the run's rollouts, and of the checkpoints that are there at once, at most."""
    refusals: Sequence[str]
    """Why this cannot run; empty where it can."""
    limit: str
    """What most of the time goes into."""
    matters: Mapping[str, float] = field(default_factory=dict)
    """By assumption: hours in all when it is a quarter larger, over hours as planned (`Planner.weighed`)."""

    @property
    def hours(self) -> float:
        return sum(stage.hours for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans a recipe on so many GPUs of a kind. Each method raises ConfigError for a model that is not known."""

    recipe: Recipe
    gpu: GpuSpec
    gpus: int

    def weighed(self, assumed: Assumptions) -> GpuPlan:
        """The plan with what `matters`."""
        plan = self.plan(assumed)
        names = ("length_share", "bandwidth_share", "learning_share", "step_overhead_seconds")
        more = {name: replace(assumed, **{name: 1.25 * getattr(assumed, name)}) for name in names}
        hours = {name: self.plan(other).hours for name, other in more.items()}
        return replace(plan, matters={name: hours[name] / plan.hours if plan.hours else 1.0 for name in names})

    def plan(self, assumed: Assumptions) -> GpuPlan:
        """The plan without what `matters`, which takes several plans."""
        shape, placement = shape_of(self.recipe.model), self.placement()
        learners, engines = len(placement.learners), len(placement.engines)
        kv_tokens = min((engine.kv_tokens or 0 for engine in placement.engines), default=0)
        stages: list[StagePlan] = []
        if not placement.refusals:
            several = sum(engine.needs for engine in placement.engines) / engines
            together = replace(self.gpu, flops=self.gpu.flops * several, bandwidth=self.gpu.bandwidth * several)
            model = engine_model(shape, together, kv_tokens, self.recipe.rollout.engine_rows, assumed)
            learned_flops = learners * self.gpu.flops * assumed.learning_share
            stages = [self._stage(stage, shape, model, engines, learned_flops, assumed) for stage in self.recipe.stage]
        return GpuPlan(
            gpu=self.gpu.name,
            engines=engines,
            learners=learners,
            parameters=shape.parameters,
            placement=placement,
            kv_tokens=kv_tokens,
            sequences=kv_tokens / max(1.0, assumed.length_share * self.recipe.longest_response),
            stages=stages,
            disk_bytes=self._disk(shape, stages),
            refusals=placement.refusals,
            limit=_limit(stages),
        )

    def placement(self) -> Placement:
        """EACH of the GPUs are in a machine; with refusals alone where they are too few or some would have nothing to
        do."""
        shape, longest, rollout = shape_of(self.recipe.model), self.recipe.longest_response, self.recipe.rollout
        try:
            recipe = self.shared_out()
            kv_pages(rollout.kv_tokens, rollout.engine_rows, longest + 1)  # a prompt has a token at least
            engines = sum(entry.count for entry in recipe.engine)
            idle = (recipe.idle_learners(recipe.cluster.learners), recipe.idle_engines(engines))
            if reasons := [f"{one}; take fewer GPUs" for one in idle if one]:
                return replace(NOWHERE, refusals=reasons)
            machines = {
                f"machine {number}": tuple(map(str, range(min(EACH, self.gpus - number * EACH))))
                for number in range(-(-self.gpus // EACH))
            }
            said = f"a GPU of kind {self.gpu.name}"
            return place(recipe, shape, machines, self.gpu.memory_bytes, positions=longest, gpu=said)
        except ConfigError as error:
            return replace(NOWHERE, refusals=[str(error)])

    def shared_out(self) -> Recipe:
        """The recipe with as many engines and learners as the GPUs hold, in its own proportion, at least one of each;
        where they take turns (`Recipe.takes_turns`) all learn and all write. Without `[[engine]]` all learn, and one
        engine lies on the first learner's GPU. Raises ConfigError where there are too few."""
        recipe, gpus = self.recipe, self.gpus
        turns = recipe.takes_turns(recipe.cluster.learners, gpus)
        each = [entry.tensor_parallel for entry in recipe.engine]
        wanted = sum(entry.count * several for entry, several in zip(recipe.engine, each, strict=True))
        least = sum(each) + (not turns)
        refuse_wide(recipe.engine, EACH)
        if gpus < least:
            reason = f"{plural(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} too few: at least {least} are needed for "
            reason += f"{'' if turns else 'a learner and '}one of each [[engine]]; take more, or leave [[engine]] out"
            shared = not turns and gpus == sum(each) and not recipe.stale_steps
            raise ConfigError(reason + ", or set cluster.colocate" * shared)
        share = gpus / (wanted + recipe.cluster.learners * (not turns) or 1)
        counts = [max(1, round(share * entry.count)) for entry in recipe.engine]
        while sum(map(mul, counts, each)) > gpus - (not turns):
            counts[counts.index(max(counts))] -= 1  # all were rounded up, and no learner is left
        engines = [
            entry.model_copy(update={"count": count, **({"url": None} if entry.url else {})})
            for entry, count in zip(recipe.engine, counts, strict=True)
        ]
        learners = gpus - sum(map(mul, counts, each)) * (not turns)
        cluster = {"learners": learners, "launcher": "processes", "colocate": turns}
        return recipe.model_copy(update={"engine": engines, "cluster": recipe.cluster.model_copy(update=cluster)})

    def differences(self) -> str | None:
        """The settings with which training takes as many learners and engines as are planned for, in words; None where
        the recipe has them already. Raises ConfigError like `shared_out`."""
        asked, planned = (
            {"cluster.learners": one.cluster.learners}
            | {f"engine.{entry.name}.count": entry.count for entry in one.engine}
            | {f"engine.{entry.name}.url": entry.url or "none" for entry in one.engine}
            for one in (self.recipe, self.shared_out())
        )
        changed = [key for key, value in planned.items() if value != asked[key]]
        has, takes = (" ".join(f"{key}={values[key]}" for key in changed) for values in (asked, planned))
        return f"the recipe has {has}; to train as planned: {takes}" if changed else None

    def _stage(
        self,
        stage: Stage,
        shape: Shape,
        model: EngineModel,
        engines: int,
        learned_flops: float,
        assumed: Assumptions,
    ) -> StagePlan:
        passes = 2.0 + (not self.recipe.model.lora_rank)  # forward, backward, and the gradients of weights that learn
        passes += self.recipe.model.gradient_checkpointing  # forward again
        if isinstance(stage, RlStage):
            return _rl_stage(stage, shape, model, engines, assumed, passes, learned_flops)
        tokens = stage.sft.batch_rows * assumed.demonstration_tokens
        seconds = tokens * passes * shape.forward_flops(assumed.demonstration_tokens / 2) / learned_flops
        return StagePlan(
            name=stage.name,
            steps=max(0, stage.steps),  # epochs whose rows have not been read count no steps
            tokens=tokens,
            learning_seconds=seconds,
            step_seconds=seconds,
        )

    def _disk(self, shape: Shape, stages: Sequence[StagePlan]) -> float:
        run, trained = self.recipe.run, self.recipe.model
        recorded = sum(stage.recorded_bytes * stage.steps for stage in stages) if run.save_rollouts else 0.0
        newest = sum(stage.hours for stage in stages) * 3600 // max(1.0, run.checkpoint_seconds)
        kept = min(run.keep_checkpoints, newest) + len(stages)
        merged = 2.0 * shape.parameters * len(stages) * (trained.lora_rank > 0)
        checkpoint = CHECKPOINT_BYTES * shape.trained(trained) + moments(self.recipe.stage, shape, trained)
        return recorded + kept * checkpoint + merged


def _rl_stage(
    stage: RlStage,
    shape: Shape,
    model: EngineModel,
    engines: int,
    assumed: Assumptions,
    passes: float,
    learned_flops: float,
) -> StagePlan:
    rollout = stage.rollout
    attempts = rollout.problems_per_step * rollout.attempts_per_problem
    few = min(SIMULATED_ENGINES, engines)  # with their part of the problems
    response, seconds = _rollout(
        problems=max(1, round(rollout.problems_per_step * few / engines)),
        siblings=rollout.attempts_per_problem,
        limit=rollout.max_response_tokens,
        has_tools=rollout.has_tools,
        model=model,
        engines=few,
        mean_tokens=assumed.length_share * rollout.max_response_tokens,
        prompt_tokens=assumed.prompt_tokens,
    )
    tokens = response + assumed.prompt_tokens
    kept = 1.0 if stage.resample.method == "all" else min(1.0, stage.resample.keep / rollout.attempts_per_problem)
    passes += stage.learning.kl_coefficient > 0  # by the reference
    passes = passes * stage.learning.epochs + stage.learning.scores_first
    head = 2.0 * shape.hidden * shape.vocabulary * stage.learning.takes_attempts  # of a response's tokens, once more
    row = tokens * passes * shape.forward_flops(tokens / 2) + response * head * stage.learning.epochs
    learning = attempts * kept * row / learned_flops
    exchange = 2 * shape.parameters / assumed.exchange_bandwidth
    calls = attempts * assumed.tool_calls if rollout.has_tools else 0.0
    beside = max(seconds, learning) if rollout.max_staleness_steps else seconds + learning
    return StagePlan(
        name=stage.name,
        steps=stage.steps,
        tokens=attempts * response,
        rollout_seconds=seconds,
        learning_seconds=learning,
        exchange_seconds=exchange,
        calls=calls,
        recorded_bytes=attempts * response * (TOKEN_BYTES + LEARNT_BYTES * kept),
        cores=4 * calls * assumed.program_cpu_seconds / max(seconds, 1e-9),
        step_seconds=beside + exchange + assumed.step_overhead_seconds,
    )


def engine_model(shape: Shape, gpu: GpuSpec, kv_tokens: float, rows: int, assumed: Assumptions) -> EngineModel:
    """Decoding reads the weights and the caches; feeding computes."""
    bandwidth = gpu.bandwidth * assumed.bandwidth_share
    return EngineModel(
        capacity_tokens=int(kv_tokens),
        step_seconds=2 * shape.computed / bandwidth + assumed.decode_seconds,
        seconds_per_cached_token=shape.kv_bytes(2) / bandwidth,
        seconds_per_sequence=assumed.sequence_seconds + 2 * shape.computed / (gpu.flops * assumed.prefill_share),
        most_running=rows,
        seconds_per_prefill_token=2 * shape.computed / (gpu.flops * assumed.prefill_share),
    )


@lru_cache(maxsize=64)  # of the plans that are compared most differ in nothing that this depends on
def _rollout(
    *,
    problems: int,
    siblings: int,
    limit: int,
    has_tools: bool,
    model: EngineModel,
    engines: int,
    mean_tokens: float,
    prompt_tokens: float,
) -> tuple[float, float]:
    """(mean response tokens, seconds) of a step, simulated."""
    work = synthetic_workload("even", problems=problems, attempts=siblings, limit=limit, seed=0)
    if not has_tools:
        work = [replace(attempt, turns=(TurnLengths(attempt.response_tokens, 0, 0.0),)) for attempt in work]
    work = with_mean(work, mean_tokens, prompt_tokens)
    # A cache for the cap and a token may lack room for the prompts that are assumed here; those of the run may fit.
    room = max(model.capacity_tokens, 1 + max(attempt.tokens for attempt in work))
    seconds = simulate(work, alike(replace(model, capacity_tokens=room), engines), KvScheduler()).makespan
    return fmean(attempt.response_tokens for attempt in work), seconds


def _limit(stages: Sequence[StagePlan]) -> str:
    if not stages:
        return "memory"
    parts = {
        "writing attempts": sum(stage.steps * stage.rollout_seconds for stage in stages),
        "learning": sum(stage.steps * stage.learning_seconds for stage in stages),
    }
    whole = sum(stage.steps * stage.step_seconds for stage in stages)
    parts["what steps take besides (weights, step_overhead_seconds)"] = whole - sum(parts.values())
    return max(parts, key=lambda name: parts[name])
