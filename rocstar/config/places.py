"""The sections of a recipe that say where a run computes: sandboxes, learners, engines. All others: `sections.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rocstar.config.values import Count, Place, Section, Word


def _sandbox_url(url: str) -> str:
    if not re.fullmatch(r"http://[^\s/?#@]+/?", url):
        raise ValueError(f"{url!r} is no address of a sandbox; write http://host:port")
    return url


SandboxUrl = Annotated[str, AfterValidator(_sandbox_url)]


class SandboxSection(Section):
    tools: list[str] = ["python"]
    """Tools of the model. python: each call is a program of its own (§2.1); notebook: the calls of an attempt are cells
    that share names and files; a Tool of your own as `package.module:name`; or all tools of an MCP server, one for each
    attempt, as `mcp:COMMAND ARGUMENTS` or `mcp:URL` (`mcp-shared:`: one for all attempts)."""
    urls: list[SandboxUrl] = []
    """Sandbox services (`rocstar sandbox serve`) that run the programs, as http://host:port; empty: a sandbox that the
    run starts itself. Services have their own `slots` and `preload`. Their token is read from the environment variable
    ROCSTAR_SANDBOX_TOKEN."""
    preload: list[str] = ["numpy", "sympy"]
    """Modules that are imported once, before programs start, so that no program waits for them."""
    slots: int = Field(default=2, ge=1, le=4096)
    """Programs that run at once."""
    timeout_seconds: float = Field(default=5.0, ge=0.01, le=86400)
    """Wall time of one program, or of one call of a tool of your own; waiting for a slot is not counted, nor is a
    program's waiting for a CPU that others have."""
    cpu_seconds: float = Field(default=5.0, ge=0.01, le=86400)
    """CPU time of any one process of a program, rounded up to a whole second."""
    memory_bytes: int = Field(default=512 * 2**20, ge=16 * 2**20, le=2**40)
    """Memory of one program with all its processes."""
    output_bytes: int = Field(default=64 * 1024, ge=256, le=4 * 2**20)
    """Standard output and standard error of one program together, or the text of one call of a function of your own."""
    processes: int = Field(default=16, ge=1, le=1024)
    """Processes and threads of one program that may be alive at once, the first one included."""
    min_isolation: Literal["L1", "L2", "L3"] = "L3"
    """The run does not start where the sandbox reaches less than this level (docs/sandbox.md)."""


class ClusterSection(Section):
    learners: Count = 1
    """Processes that share the weights and the work of learning (FSDP2), on GPUs one for each. Under torchrun, 1 means
    as many as torchrun started; any other number must equal theirs."""
    launcher: Literal["processes", "ray"] = "processes"
    """processes: the run's process starts learners and vLLM servers as its children, on its machine (under torchrun the
    learners are there already). ray: Ray places them, on as many machines as it has."""
    sandbox_nodes: int = Field(default=0, ge=0, le=4096)
    """Sandbox services, each with `sandbox.slots` slots, that Ray places and the run ends; 0: the sandbox that
    `[sandbox]` describes."""
    offload_optimizer: bool = False
    """Keep weights, gradients and optimizer state in main memory instead of on the GPU."""
    colocate: bool | None = None
    """Engines and learners take turns on the same GPUs: engines sleep while learners compute, and wake for rollouts.
    Unset: where GPUs are as many as learners and the run starts all engines, and for the engine inside its own process;
    not with `rollout.max_staleness_steps`, with which both work at once."""

    weights: Literal["files", "sent"] = "files"
    """How engines in other processes get a step's weights. files: rank 0 gathers them and writes a folder, in memory
    (/dev/shm) where it can. sent: learners send them layer by layer to the workers of vLLM servers that the run starts,
    by NCCL, or CUDA IPC on the same GPU (on CPUs: gloo, or memory that both see); no process holds the model whole."""

    def complaints(self) -> Iterator[str]:
        if self.sandbox_nodes and self.launcher != "ray":
            yield (
                f"cluster.sandbox_nodes {self.sandbox_nodes} are placed by Ray; set cluster.launcher to 'ray' or leave "
                "cluster.sandbox_nodes out"
            )


class EngineSection(Section):
    name: Word
    """Name in events and messages, followed by a number; `engine.NAME.key=value` changes a key on the command line."""
    count: int = Field(default=1, ge=1, le=1024)

    @property
    def names(self) -> list[str]:
        """Their names, as events and messages call them."""
        return [f"{self.name}-{number}" for number in range(self.count)]


class TorchEngines(EngineSection):
    """Engines in processes of their own on this machine: one that dies costs no attempt while another is left."""

    kind: Literal["torch"]
    """The kind of engine."""
    count: int = Field(default=1, ge=1, le=1024)
    """Processes; each holds the model, `rollout.engine_rows` sequences and its share of `run.threads`."""
    tensor_parallel: ClassVar[int] = 1
    url: ClassVar[None] = None


class VllmEngines(EngineSection):
    """vLLM servers: `count` of them started as `cluster.launcher` says, or one that runs at `url` already."""

    kind: Literal["vllm"]
    """The kind of engine."""
    count: int = Field(default=1, ge=1, le=1024)
    """Servers to start; each decodes `rollout.engine_rows` sequences at once. On GPUs its KV cache has what the weights
    leave unless `rollout.kv_tokens` asks for less, on CPUs room for so many sequences of the greatest length."""
    tensor_parallel: Count = 1
    """GPUs that each server is spread over (`--tensor-parallel-size`)."""
    url: str | None = None
    """Address of a server that runs already, was started as docs/vllm.md describes, and can read the folders in which
    weights are passed on. Unset: the run starts `count` servers."""
    python: Place | None = None
    """Python interpreter of the environment that has vLLM; unset: the one in the environment variable
    ROCSTAR_VLLM_PYTHON."""
    threads: Count = 1
    """Threads that each server computes with, on CPUs."""

    def complaints(self) -> Iterator[str]:
        own = self.count > 1 or self.python is not None or self.threads > 1 or self.tensor_parallel > 1
        if self.url is not None and own:
            yield ("url names one server that runs already; leave count, python, threads and tensor_parallel out")


Engines = Annotated[TorchEngines | VllmEngines, Field(discriminator="kind")]
