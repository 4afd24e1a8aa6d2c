"""Assigns the processes of a run to GPUs and estimates their memory: one table, from a recipe and the machines.
Training, Ray's placement, `plan` and the checks before a start all use it. `place` is pure.

Learners come first, one GPU each, then engines. A GPU is shared by the embedded engine and learner-0, and where both
take turns (`cluster.colocate`) by a learner and an engine: then one computes with its full memory, and the other keeps
only its sleeping part there. An engine's KV cache gets the rest of its GPUs' memory, unless `rollout.kv_tokens` asks
for less. Formulas are estimates: a learner's was within 3% of two measured on an H100 (docs/results.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rocstar.config.places import Engines, VllmEngines
from rocstar.config.sections import Recipe, RolloutSection
from rocstar.errors import ConfigError
from rocstar.learning.memory import FP32, GPU_CHUNK_ELEMENTS
from rocstar.parts.memory import LOGITS, moments
from rocstar.parts.shape import Shape, known_shape
from rocstar.support.exits import need

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers; with none of them there is no cuda."""
LEFT_FREE = 0.08
"""Share of a GPU's memory that is left to kernels, the allocator's gaps, graphs and communication."""
CONTEXT_BYTES = 6e8
"""Memory of CUDA and its libraries on a GPU for each process (ours: usual for H100)."""
FED_TOKENS = 8192
"""Tokens of prompts that vLLM feeds at once."""
KINDS = ("weights", "gradients", "moments", "gathered head", "activations", "KV cache", "CUDA context")
EMBEDDED: Literal["embedded"] = "embedded"
HERE = "here"


Machines = Mapping[str, tuple[str, ...]]
"""The GPUs of each machine as CUDA_VISIBLE_DEVICES names them, in the order in which a process counts them. The first
machine is this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A process of a run."""

    name: str
    """learner-0, or an engine's name in events and messages."""
    kind: Literal["learner", "torch", "vllm", "embedded"]
    asked_by: str
    """The setting that asks for it, with its value."""
    needs: int = 1
    """GPUs; 0 on CPUs."""
    threads: int = 1
    """Cores that Ray is asked for."""
    bytes: Mapping[str, float]
    """By kind (KINDS), on each of its GPUs."""
    asleep: float = 0.0
    """Bytes of them that it keeps while another process has its turn there."""
    kv_tokens: int | None = None
    """Tokens of an engine's KV cache; None if the engine decides itself: on CPUs, and for a model of unknown shape."""
    room_tokens: int = 0
    """Tokens that its GPUs have room for."""
    machine: str = ""
    gpus: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The table."""

    processes: Sequence[Placed]
    machines: Machines
    gpu: str
    """The name of a GPU in messages."""
    gpu_bytes: float
    """Memory of each GPU, of the smallest where they differ; 0 on CPUs."""
    colocate: bool = False
    """Engines sleep while learners compute, and the other way round."""
    refusals: Sequence[str] = ()
    """Reasons why this cannot run; empty if it can."""

    def __getitem__(self, name: str) -> Placed:
        return next(process for process in self.processes if process.name == name)

    @property
    def learners(self) -> list[Placed]:
        return [process for process in self.processes if process.kind == "learner"]

    @property
    def engines(self) -> list[Placed]:
        return [process for process in self.processes if process.kind != "learner"]

    @property
    def servers(self) -> list[Placed]:
        """Those that Ray may place: vLLM servers."""
        return [process for process in self.processes if process.kind == "vllm"]

    @property
    def local_ranks(self) -> list[int]:
        """By learner: the number of its GPU among those that a process of its machine sees; 0 on CPUs."""
        return [
            self.machines[one.machine].index(one.gpus[0]) if one.gpus else rank
            for rank, one in enumerate(self.learners)
        ]

    @property
    def usable(self) -> float:
        """Bytes of a GPU that are shared out."""
        return (1 - LEFT_FREE) * self.gpu_bytes

    def taken(self) -> dict[tuple[str, str], list[Placed]]:
        """Processes by machine and GPU."""
        found: dict[tuple[str, str], list[Placed]] = {
            (name, gpu): [] for name, gpus in self.machines.items() for gpu in gpus
        }
        for process in self.processes:
            for gpu in process.gpus:
                found[process.machine, gpu].append(process)
        return found

    def share(self, process: Placed) -> float | None:
        """The share of each of its GPUs' memory that a process takes; None if unknown."""
        return process.total / self.gpu_bytes if process.bytes and self.gpu_bytes else None

    def refuse(self) -> Placement:
        """Raises ConfigError with the first reason why this cannot run."""
        for reason in self.refusals:
            raise ConfigError(reason)
        return self

    def on(self, machines: Machines) -> Placement:
        """The same processes on these machines; several GPUs of a process are of one machine, and each has at most one
        learner and one engine, one in all unless they take turns. Raises ConfigError if there are too few."""
        learners, engines = ({name: list(gpus) for name, gpus in machines.items()} for _ in range(2))
        placed: list[Placed] = []
        for process in self.processes:
            if process.kind == EMBEDDED and placed:
                placed.append(replace(process, machine=placed[0].machine, gpus=placed[0].gpus))
                continue
            free = engines if self.colocate and process.kind != "learner" else learners
            there = next((name for name, gpus in free.items() if len(gpus) >= process.needs), None)
            if there is None:
                raise ConfigError(self._too_few(machines, self.processes if free is learners else self.engines))
            taken = tuple(free[there][: process.needs])
            del free[there][: process.needs]
            placed.append(replace(process, machine=there, gpus=taken))
        return replace(self, processes=placed, machines=machines)

    def _too_few(self, machines: Machines, processes: Sequence[Placed]) -> str:
        turns = self.colocate and processes is self.processes
        own = self.learners if turns else [process for process in processes if process.kind != EMBEDDED]
        asking = " and ".join(dict.fromkeys(process.asked_by for process in own))
        there = " and ".join(f"{len(gpus)} {name if name == HERE else f'on {name}'}" for name, gpus in machines.items())
        need = sum(process.needs for process in own)
        return f"{asking} need {need} GPUs and there are {there}; lower one of them, or take more GPUs"

    def notes(self) -> Iterator[str]:
        """Sentences about GPUs that would be idle, always or while attempts are written or learners compute."""
        taken = self.taken()
        idle = [gpu for (_, gpu), processes in taken.items() if not processes]
        if idle and self.learners:
            yield f"warning: GPU {', '.join(idle)} has nothing to do; raise cluster.learners, or count of an [[engine]]"
        others = len(self.learners) - 1
        alone = [gpu for process in self.processes if process.kind == EMBEDDED for gpu in process.gpus]
        waits = "learner's GPU waits" if others == 1 else f"{others} learners' GPUs wait"
        for gpu in alone if others > 0 else ():
            yield (
                f"warning: without [[engine]] one engine on GPU {gpu} writes all attempts while the other {waits}; "
                "give some of the GPUs to [[engine]] entries"
            )
        turns = (
            ("attempts are written; raise count of an [[engine]]", self.engines),
            ("learners compute; raise cluster.learners", self.learners),
        )
        for turn, working in turns if self.colocate and not alone else ():
            waiting = len(taken) - len(idle) - sum(process.needs for process in working)
            if working and waiting:
                does = "does" if waiting == 1 else "do"
                yield f"warning: {waiting} of {len(taken)} GPUs {does} nothing while {turn}"

    def table(self) -> str:
        """For people: a line a process, in GB on each of its GPUs, and what is left of them."""
        names = ("weights", "gradients", "moments", "head", "activ.", "KV cache", "context")
        width = max([7, *(len(process.name) for process in self.processes)]) + 2
        place = max([7, *(len(process.machine) for process in self.processes)]) + 2
        lines = [f"{'process':{width}}{'machine':{place}}{'GPU':8}{''.join(f'{name:>10}' for name in names)}{'GB':>8}"]
        for process in self.processes:
            sizes = "".join(f"{process.bytes.get(kind, 0) / 1e9:10.1f}" for kind in KINDS)
            where = f"{process.name:{width}}{process.machine:{place}}{','.join(process.gpus):8}"
            lines.append(f"{where}{sizes}{process.total / 1e9:8.1f}")
        lines.append(f"of {self.usable / 1e9:.1f} GB: {LEFT_FREE:.0%} of {self.gpu} stay free")
        first = [*self.learners[:1], *self.engines[:1]] if self.colocate and self.gpu_bytes else ()
        kept = " and ".join(f"{process.name} keeps {process.asleep / 1e9:.1f} GB" for process in first)
        return "\n".join([*lines, *([f"they take turns: asleep {kept}"] if kept else ())])


NOWHERE = Placement(processes=(), machines={}, gpu="", gpu_bytes=0.0)
"""A table without processes."""


def place(
    recipe: Recipe,
    shape: Shape | None,
    machines: Machines,
    gpu_bytes: float,
    *,
    positions: int = 0,
    learns: bool = True,
    ranks_here: int | str | None = None,
    gpu: str = "a GPU here",
) -> Placement:
    """The table for a recipe. No GPUs on the machines: it computes on CPUs. shape: None for a model whose memory is not
    known. gpu_bytes: of each GPU. positions: tokens of the longest attempt, prompt included, as far as known. learns:
    whether there are learners. ranks_here: of those learners, how many torchrun has started on this machine.

    Raises ConfigError where there are too few GPUs, and for engines that no GPU can be kept for; what does not fit is
    in `refusals`."""
    cluster, on_gpus = recipe.cluster, any(machines.values())
    if on_gpus and cluster.launcher == "ray" and any(entry.kind == "torch" for entry in recipe.engine):
        raise ConfigError(
            "Ray keeps no GPU for engines of kind 'torch'; take kind 'vllm' or cluster.launcher 'processes'"
        )
    if on_gpus:
        refuse_wide(recipe.engine, max(map(len, machines.values())))
    usable, needs = (1 - LEFT_FREE) * gpu_bytes, int(on_gpus)
    known = shape if on_gpus else None
    here = cluster.learners if ranks_here is None else int(ranks_here)
    turns = learns and recipe.takes_turns(here, sum(map(len, machines.values())))
    item = 4 if recipe.model.dtype == "float32" else 2
    learner, kept, smaller = ({}, 0.0, []) if known is None else _learner(recipe, known, cluster.learners, item)
    asked = f"cluster.learners {cluster.learners}"
    first = Placed(name="learner-0", kind="learner", asked_by=asked, needs=needs, bytes=learner, asleep=kept)
    found = [replace(first, name=f"learner-{rank}") for rank in range(here * learns)]
    started = [entry for entry in recipe.engine if not entry.url]
    engines: list[tuple[str, Engines | None]] = [(EMBEDDED, None)] * (not recipe.engine)
    engines += [(name, entry) for entry in started for name in entry.names]
    for name, entry in engines:
        vllm = entry if isinstance(entry, VllmEngines) else None
        several, threads = (vllm.tensor_parallel, vllm.threads) if vllm else (1, 1)
        asked = "the embedded engine" if entry is None else f"engine.{entry.name}.count {entry.count}"
        asked += f" x tensor_parallel {several}" if several > 1 else ""
        kind: Any = EMBEDDED if entry is None else entry.kind
        made = Placed(name=name, kind=kind, asked_by=asked, needs=needs * several, threads=threads, bytes={})
        if known is not None:
            room = usable - (kept if turns else sum(learner.values()) * (entry is None and learns))
            most = None if vllm else recipe.rollout.engine_rows * positions or None
            made = _engine(made, recipe.rollout, known, item, room, most)
        found.append(made)
    table = Placement(processes=found, machines=machines, gpu=gpu, gpu_bytes=gpu_bytes * on_gpus, colocate=turns)
    if known is not None:
        refusals = _refusals(table, known, recipe.rollout.kv_tokens or 0, recipe.longest_response, smaller)
        table = replace(table, refusals=tuple(dict.fromkeys(refusals)))
    return table.on(machines)


def refuse_wide(engines: Sequence[Engines], most: int) -> None:
    """Raises ConfigError for a server over more GPUs than the `most` that a machine has."""
    for entry in engines:
        if entry.tensor_parallel > most:
            raise ConfigError(
                f"engine.{entry.name}.tensor_parallel {entry.tensor_parallel} takes GPUs of one machine, and none has "
                f"more than {most}; lower it"
            )


def _learner(recipe: Recipe, shape: Shape, ranks: int, item: int) -> tuple[dict[str, float], float, list[str]]:
    """One of `ranks` learners (FSDP2: weights, gradients and moments in equal parts), bytes of it between updates: fp32
    weights, and moments; and what would make it smaller. item: bytes of a number in forward passes."""
    offload = recipe.cluster.offload_optimizer
    sharded = ranks > 1 or offload  # the LM head and its gradient are then gathered, as embeddings and two layers are
    adapts, trained = recipe.model.lora_rank > 0, shape.trained(recipe.model)
    each = 0.0 if offload else FP32 * trained / ranks
    kept = 0.0 if offload else item * shape.parameters * adapts / ranks  # what does not learn
    head = shape.hidden * shape.vocabulary
    layer = shape.matrices / shape.layers
    copies = item * (2 * layer + head) if sharded else item * trained * (item < FP32)
    # Tokens of the largest pass: the setting, or the longest row, which gets a pass of its own.
    passes = max((stage.learner.tokens_per_microbatch for stage in recipe.stage), default=0)
    tokens = max(passes, recipe.longest_response)
    recomputed = recipe.model.gradient_checkpointing
    left = _left(shape, item) + 3 * item * shape.hidden * adapts  # adapters each take an input of their own
    layers = FP32 * shape.hidden * shape.layers * recomputed + left * (1 if recomputed else shape.layers)
    reference = any(stage.learning.kl_coefficient for stage in recipe.rl_stages)
    optimizer = 0.0 if offload else moments(recipe.stage, shape, recipe.model) / ranks
    parts = {
        "weights": kept + each * (1 + reference) + copies,
        "gradients": each,
        "moments": optimizer,
        "gathered head": (item if adapts else 2.0 * FP32) * head * sharded,
        "activations": (layers + 2 * FP32 * shape.hidden) * tokens + LOGITS * FP32 * GPU_CHUNK_ELEMENTS,
        "CUDA context": CONTEXT_BYTES,
    }
    smaller = {
        "more GPUs": not offload,
        "GPUs with more memory": True,
        "model.gradient_checkpointing": not recomputed,
        'moments_dtype = "bfloat16"': not offload and any(s.learner.moments_dtype == "float32" for s in recipe.stage),
        "cluster.offload_optimizer": not offload,
        "model.lora_rank": not adapts,
        "smaller learning.tokens_per_microbatch": passes > recipe.longest_response,
        "a lower rollout.max_response_tokens": passes <= recipe.longest_response,
    }
    return (
        parts,
        kept + each * (1 + reference) + optimizer + CONTEXT_BYTES,
        [one for one, helps in smaller.items() if helps],
    )


def _left(shape: Shape, item: int) -> float:
    """Bytes that a token leaves in a layer for its backward pass: fp32 sums before both norms, what the norms give,
    queries, keys, values, what attention gives, gate, its SiLU, up, and their product; norms of heads besides. Source:
    ours, counted by saved tensors and measured on a GPU (docs/results.md)."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    norms = (FP32 + item) * (queries + keys) * shape.normed
    return 2 * FP32 * shape.hidden + item * (2 * shape.hidden + 3 * queries + 2 * keys + 4 * shape.intermediate) + norms


def _engine(made: Placed, rollout: RolloutSection, shape: Shape, item: int, room: float, most: int | None) -> Placed:
    """An engine with the KV cache that its GPUs have room for. item: bytes of a number. room: bytes of each GPU. most:
    tokens that it can use. Asleep it has neither cache nor weights, which come anew (vLLM's level 2)."""
    rows, several = rollout.engine_rows, made.needs
    parts = {
        "weights": item * shape.parameters / several,
        "activations": item * FED_TOKENS * (2 * shape.intermediate + 4 * shape.hidden) / several
        + LOGITS * FP32 * rows * shape.vocabulary,
        "CUDA context": 0.0 if made.kind == EMBEDDED else CONTEXT_BYTES,
    }
    each = replace(shape, kv_heads=-(-shape.kv_heads // several)).kv_bytes(item)
    there = max(0, int((room - sum(parts.values())) / each))
    tokens = min(there, rollout.kv_tokens or most or there)
    sizes = {**parts, "KV cache": float(each * tokens)}
    return replace(made, bytes=sizes, asleep=parts["CUDA context"], kv_tokens=tokens, room_tokens=there)


def _refusals(table: Placement, shape: Shape, asked: int, longest: int, smaller: Sequence[str]) -> Iterator[str]:
    """asked: tokens of a cache. longest: tokens of a response. smaller: what would make a learner smaller."""
    beside = max((process.asleep for process in table.engines), default=0.0) * table.colocate
    for process in table.learners:
        if process.total + beside > table.usable:
            part = max(process.bytes, key=lambda kind: process.bytes[kind])
            shared = f" beside {beside / 1e9:.1f} GB of an engine asleep" if beside else ""
            yield (
                f"a learner needs {process.total / 1e9:.0f} GB{shared} and {table.gpu} gives "
                f"{table.usable / 1e9:.0f} GB; the largest part is {part} with {process.bytes[part] / 1e9:.0f} GB: "
                f"take {', '.join(smaller[:-1])} or {smaller[-1]}"
            )
    least = max(2 * longest if table.learners else 1, asked)
    for process in table.engines:
        wider = "engine.NAME.tensor_parallel"
        if process.kind != "vllm":
            wider = "an [[engine]] of kind 'vllm' with tensor_parallel"
        if shape.heads % process.needs:
            yield (
                f"engine.{process.name.rpartition('-')[0]}.tensor_parallel {process.needs} cannot share the model's "
                f"{shape.heads} attention heads; take a number of GPUs that divides them"
            )
        elif not process.room_tokens:
            alone = process.total - process.bytes["KV cache"]
            there = table.learners[:1] if table.colocate or process.kind == EMBEDDED else []
            size = sum(learner.asleep if table.colocate else learner.total for learner in there)
            shared = f" beside {size / 1e9:.1f} GB of a learner" if there else ""
            yield (
                f"an engine needs {alone / 1e9:.0f} GB without its KV cache{shared} and {table.gpu} gives "
                f"{table.usable / 1e9:.0f} GB; take GPUs with more memory or {wider}"
            )
        elif process.room_tokens < least:
            wanted, lower = f"two attempts of {longest} tokens", "rollout.max_response_tokens"
            if asked == least:
                wanted, lower = f"rollout.kv_tokens {asked}", "rollout.kv_tokens"
            yield (
                f"an engine's KV cache would hold {process.room_tokens:,} tokens beside the weights on {table.gpu}, "
                f"less than {wanted}; take GPUs with more memory, {wider} or a lower {lower}"
            )


# -- this machine ------------------------------------------------------------------------------------------------------


def placed_here(recipe: Recipe, model: Path | None, positions: int, *, learns: bool = True) -> Placement:
    """The table for the GPUs that this process sees; for Ray, which is not asked yet, as if it had as many machines
    like this one as are needed. model: folder; None for random weights. positions, learns: of `place`. Raises
    ConfigError."""
    names, least = _gpus_here(recipe.model.device)
    ranks_here: str | None = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        size = os.environ["WORLD_SIZE"]
        cluster = recipe.cluster.model_copy(update={"learners": int(size)})
        recipe, ranks_here = recipe.model_copy(update={"cluster": cluster}), os.environ.get("LOCAL_WORLD_SIZE", size)
    machines = {HERE: names}
    if recipe.cluster.launcher == "ray":
        processes = recipe.cluster.learners + sum(entry.count for entry in recipe.engine)
        machines |= {f"machine {number}": names for number in range(1, processes)}
    shape = known_shape(recipe.model, model)
    return place(recipe, shape, machines, least, positions=positions, learns=learns, ranks_here=ranks_here)


def _gpus_here(device: str) -> tuple[tuple[str, ...], float]:
    """Names of the GPUs that a model of this `model.device` may use, and the memory of the smallest."""
    if device == "cpu" or (device == "auto" and not any(Path(file).exists() for file in ACCELERATORS)):
        return (), 0.0
    need("train")
    from rocstar.engines.torch_gpus import gpus  # torch, which is loaded for nothing less than this question

    cards = gpus()
    return tuple(card.id for card in cards), min((card.bytes for card in cards), default=0.0)
