"""The kinds of engine that the contract suite runs over. A further kind is one entry of KINDS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.torch_engine import TorchEngine
from rocstar.protocols import Engine, ForwardingEngine
from rocstar.rollout.fleet import Fleet
from rocstar.rollout.kv_scheduler import KvScheduler
from tests.engines.models import MODELS, VOCAB
from tests.engines.vllm_server import POSITIONS as VLLM_POSITIONS
from tests.engines.vllm_server import vllm_engine
from tests.scripted import ScriptedEngine

POSITIONS = 512


class Letters:
    """A codec with one token per letter; letters are below VOCAB after a shift."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 64 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token + 64) for token in token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How an engine is had, and what it promises beyond the protocol."""

    open: Callable[[], AbstractAsyncContextManager[Engine]]
    """An engine that holds version 0 and no session; sequences are at most `positions` long."""
    model: Callable[[int], Any] | None = None
    """Seed -> the transformers model it runs: seed 0 at first, others come as new weights. None: it runs none, and
    nothing that needs time, weights or real logprobs is asked of it."""
    seeded: bool = True
    """The same seed, the same completion."""
    rows: int = 4
    """Requests that decode at once at most; a further one waits."""
    places: tuple[str, ...] = ("folder", "memory")
    """Where it takes new weights from."""
    truncates: bool = True
    """It obeys `top_p` and `top_k`; otherwise it refuses them."""
    tight: Callable[[], AbstractAsyncContextManager[Engine]] | None = None
    """The same with room for at most half of `rows` sequences of POSITIONS tokens, so that caches are given up."""
    block: int = 1
    """Tokens of cache that are given out at once."""
    positions: int = POSITIONS
    """Tokens of the longest sequence."""
    long: int = 250
    """Tokens of a completion that does not end before it is interrupted, by a caller who sees `load` as late as it is.
    Beside an engine in another process the caller may stand still for seconds: there it must last for many more."""


@asynccontextmanager
async def scripted() -> AsyncIterator[Engine]:
    yield ScriptedEngine(Letters(), ["HELLOWORLD", "AGAIN", "MORE"])


@asynccontextmanager
async def forwarding() -> AsyncIterator[Engine]:
    async with scripted() as inner:
        yield ForwardingEngine(inner)


@asynccontextmanager
async def torch_engine(name: str, kv_tokens: int | None = None) -> AsyncIterator[Engine]:
    made = TorchEngine(MODELS[name](0), rows=4, positions=POSITIONS, kv_tokens=kv_tokens)
    yield made
    await made.close()


@asynccontextmanager
async def process() -> AsyncIterator[Engine]:
    """In a process of its own; one without a model, since the torch engine takes seconds to start in each test."""
    made = ProcessEngine(
        EngineSettings(folder="none", rows=4, positions=POSITIONS, vocab_size=VOCAB), module="tests.engines.plain_child"
    )
    await made.restart(None)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def fleet_of(open_inner: Callable[[], AbstractAsyncContextManager[Engine]]) -> AsyncIterator[Engine]:
    async with open_inner() as inner:
        made = Fleet({"only": inner}, KvScheduler(), vocab_size=VOCAB)
        yield made
        await made.close()


QWEN, LLAMA = partial(torch_engine, "qwen"), partial(torch_engine, "llama")
TIGHT = partial(torch_engine, "qwen", kv_tokens=2 * POSITIONS)
KINDS: dict[str, Kind] = {
    "scripted": Kind(open=scripted),
    "forwarding": Kind(open=forwarding),
    "torch_qwen": Kind(open=QWEN, model=MODELS["qwen"], tight=TIGHT),
    "process": Kind(open=process, places=("folder",)),
    "fleet": Kind(open=partial(fleet_of, LLAMA), model=MODELS["llama"]),
    "vllm": Kind(
        open=vllm_engine,
        model=MODELS["qwen"],
        seeded=False,
        places=("folder",),
        truncates=False,
        block=128,
        positions=VLLM_POSITIONS,
        long=VLLM_POSITIONS - 200,
    ),
}
