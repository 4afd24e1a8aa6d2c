"""A vLLM server as a child of this process: on a free port, with the options that `vllm.py` relies on. It ends with
this process. Anyone who reaches the port can drive it; on loopback that is every user of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from rocstar.engines.pages import cache_bytes
from rocstar.engines.process import visible
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.support.processes import how_ended

INSIDE = Path(__file__).parent / "inside_vllm"
START_SECONDS = 600.0  # until it answers; 20 to 60 are usual on two quiet cores
END_SECONDS = 20.0  # from the request to end until a server is killed; it kills itself after 10
GROUP_SECONDS = 10.0  # for processes that outlive a killed server to free its shared memory
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}  # vLLM's default block sizes
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGPROBS_MODE = "processed_logprobs"  # those after temperature
SCHEDULING = "priority"  # canary rows come before waiting requests
CANARY_ROWS = 1  # that decode beside the engine's requests
SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+$", re.MULTILINE)
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On CPUs vLLM runs the model in a separate process and spins for a second after each message to it; naming an executor
explicitly prevents that."""
NAME = "ROCSTAR_SERVER_NAME"  # variable that inside_vllm/rocstar_vllm_worker.py reads
LOG_LINES = 15  # of the log, in the error about a server that did not start
CAUSE = re.compile(r"(^|\] )[\w.]+(Error|Exception): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Options of a server."""

    model: Path
    """Hugging Face folder; its tokenizer is not read."""
    python: Path
    """Interpreter of an environment that has vLLM: scripts/vllm_env makes one."""
    log: Path
    """File for the server's output, after that of earlier starts, which may say why they ended."""
    max_tokens: int
    """Longest sequence, prompt included."""
    rows: int | None = None
    """Requests that decode at once at most; None for vLLM's own limit."""
    capacity_tokens: int | None = None
    """Tokens that the KV cache holds; None for all that vLLM finds free, on GPUs only."""
    dtype: str = "bfloat16"
    """Number type of weights, keys and values."""
    device: str = "cpu"
    """cpu or cuda."""
    threads: int = 1
    """Threads that compute, on CPUs."""
    gpus: tuple[str, ...] = ()
    """GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; none: all that this process sees."""
    tensor_parallel: int = 1
    """GPUs that it is spread over."""
    memory_share: float | None = None
    """Share of each GPU's memory that it may take, cache included; None for vLLM's own."""
    place: int = -1
    """Number among the servers that a run starts; -1: any."""
    name: str = ""
    """Random name of this start; the workers report it, so that another server at its address is detected."""
    environment: Mapping[str, str] | None = None
    """Variables beyond those of this process."""
    host: str = "127.0.0.1"
    """Address of this machine that it listens on."""
    sleeps: bool = False
    """Whether it lends its GPUs to learners."""
    reads_weights: bool = True
    """False: it starts with random weights, and gets others before the first request."""


class RunningServer(Protocol):
    """A running server, as seen by the engine that started it."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        ...

    async def close(self) -> None:
        """End the server and all that it started. Harmless when they are gone."""
        ...


StartServer = Callable[[VllmSettings], Awaitable[RunningServer]]
"""Returns when the server answers. Raises ConfigError for settings that can't be obeyed, EngineUnavailable if it ends
instead."""


class VllmServer:
    """A running server, from `start`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process, self.url = process, url
        self._memory: set[Path] = set()

    @classmethod
    async def start(cls, settings: VllmSettings) -> VllmServer:
        """A StartServer; if the server ends instead of answering, the error quotes the last lines of its log."""
        port, before = _free_port(settings.host), settings.log.stat().st_size if settings.log.exists() else 0
        command = [str(settings.python), str(INSIDE / "rocstar_vllm_serve.py"), *_options(settings, port)]
        process = _begin(command, settings)
        server = cls(process, f"http://{settings.host}:{port}")
        try:
            await server._until_it_answers(settings, before)
            server._memory |= _shared_memory(process.pid)
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    async def close(self) -> None:
        self._memory |= _shared_memory(self._process.pid)
        if self._process.stdin:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, END_SECONDS)
        await _end_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, GROUP_SECONDS)
        for file in self._memory:  # of a killed server
            file.unlink(missing_ok=True)

    async def _until_it_answers(self, settings: VllmSettings, before: int) -> None:
        """before: bytes of the log that are of earlier starts."""
        started = time.monotonic()
        async with httpx.AsyncClient(trust_env=False) as http:
            while not await _answers(http, f"{self.url}/health"):
                if (code := self._process.poll()) is not None:
                    lines = settings.log.read_bytes()[before:].decode(errors="replace").strip().splitlines()
                    causes = list(filter(CAUSE.search, lines[:-LOG_LINES]))[-LOG_LINES:]  # of vLLM's other processes
                    log_end = "\n".join((f"the end of {settings.log} says", *causes, *lines[-LOG_LINES:]))
                    raise EngineUnavailable(f"vLLM {how_ended(code)} as it started: {log_end}")
                if time.monotonic() - started > START_SECONDS:
                    raise EngineUnavailable(f"vLLM did not answer within {START_SECONDS:.0f} s; see {settings.log}")
                await asyncio.sleep(0.2)


def kv_bytes(config: Mapping[str, Any], tokens: int, dtype: str, several: int = 1) -> int:
    """Bytes of keys and values for so many tokens, on each of `several` GPUs. config: of a Qwen2, Qwen3 or Llama
    folder."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = -(-(config.get("num_key_value_heads") or heads) // several)
    shape = (config["num_hidden_layers"], kv_heads, width)
    return cache_bytes(shape, tokens, ITEM_BYTES[dtype])


def _options(settings: VllmSettings, port: int) -> list[str]:
    options = {
        "model": settings.model,
        "host": settings.host,
        "port": port,
        "runner": "generate",
        "dtype": settings.dtype,
        "max-model-len": settings.max_tokens,
        "logprobs-mode": LOGPROBS_MODE,
        "scheduling-policy": SCHEDULING,
        "worker-extension-cls": "rocstar_vllm_worker.RocstarWorker",
        **({} if settings.reads_weights else {"load-format": "dummy"}),
        **({} if settings.rows is None else {"max-num-seqs": settings.rows + CANARY_ROWS}),
        **({} if settings.tensor_parallel == 1 else {"tensor-parallel-size": settings.tensor_parallel}),
        **({} if settings.memory_share is None else {"gpu-memory-utilization": f"{settings.memory_share:.3f}"}),
        **_cache(settings),
    }
    flags = ["skip-tokenizer-init", "enable-scale-out", "enable-prompt-tokens-details"]
    if settings.device == "cpu":
        flags.append("enforce-eager")
        if settings.tensor_parallel == 1:
            options["distributed-executor-backend"] = ONE_PROCESS
    elif settings.sleeps:
        flags.append("enable-sleep-mode")
    return [*(f"--{name}={value}" for name, value in options.items()), *(f"--{name}" for name in flags)]


def _cache(settings: VllmSettings) -> dict[str, int]:
    if settings.dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {settings.dtype}")
    if settings.capacity_tokens is None:
        if settings.device == "cpu":
            raise ConfigError("a vLLM server on CPUs needs capacity_tokens; it would take nearly all memory otherwise")
        return {}
    block = BLOCK_TOKENS[settings.device]
    blocks = settings.capacity_tokens // block
    if blocks * block < settings.max_tokens:
        raise ConfigError(
            f"capacity_tokens {settings.capacity_tokens} must hold max_tokens {settings.max_tokens}, in blocks of "
            f"{block}"
        )
    config = json.loads((settings.model / "config.json").read_bytes())
    needed = kv_bytes(config, (blocks + 1) * block, settings.dtype, settings.tensor_parallel)
    return {"block-size": block, "kv-cache-memory-bytes": needed}


def _begin(command: list[str], settings: VllmSettings) -> subprocess.Popen[bytes]:
    """Raises ConfigError if there is no such interpreter."""
    on_cpu = {
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server binds itself to the same first cores
        "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles a counting kernel, for half a minute
    }
    variables = {
        "PYTHONPATH": str(INSIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that exchange weights
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **(on_cpu if settings.device == "cpu" else {}),
        **visible(settings.gpus),
        NAME: settings.name,
        **(settings.environment or {}),
    }
    settings.log.parent.mkdir(parents=True, exist_ok=True)
    with settings.log.open("ab") as log:
        try:
            return subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{settings.python} can't be started: {error}; scripts/vllm_env makes one") from error


def _shared_memory(group: int) -> set[Path]:
    """Files of Python's multiprocessing in /dev/shm for a process group: killed processes leave them behind."""
    found: set[str] = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(file.read_text().rpartition(")")[2].split()[2]) == group:
                found.update(SHARED_MEMORY.findall((file.parent / "maps").read_text()))
    return set(map(Path, found))


async def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + GROUP_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.HTTPError:
        return False
