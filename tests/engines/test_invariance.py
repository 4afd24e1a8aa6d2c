"""The same requests give the same tokens and the same logprobs, bit for bit on CPU, whoever decodes beside them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines import torch_cache
from rocstar.engines.torch_engine import TorchEngine
from rocstar.types import Completion, Sampling, seed_for
from tests.engines.models import MODELS, VOCAB

LENGTHS = (2, 75, 75, 200, 280, 130)  # of prompts: two requests share one, and one is fed in several steps
REQUESTS, POSITIONS = len(LENGTHS), 352
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 5},
)

Turns = tuple[Completion, ...]


def prompt_of(number: int) -> list[int]:
    rng = random.Random(LENGTHS[number])
    return [rng.randrange(VOCAB) for _ in range(LENGTHS[number])]


async def session(engine: TorchEngine, number: int, pauses: Sequence[int] = (0, 0, 0)) -> Turns:
    """Three turns with tool replies, some of them long, between them; `pauses` are turns of the event loop."""
    rng = random.Random(seed_for("tool", number))
    ids, turns = prompt_of(number), []
    for turn, pause in enumerate(pauses):
        for _ in range(pause):
            await asyncio.sleep(0)
        sampling = Sampling(
            max_new_tokens=rng.randrange(1, 20),
            seed=seed_for(number, turn),
            stop_token_ids=(3,),
            **SETTINGS[number % 4],
        )
        completion = await engine.generate(ids, sampling, request_id=f"{number}/{turn}", session_id=str(number))
        turns.append(completion)
        ids = [*ids, *completion.token_ids, *(rng.randrange(VOCAB) for _ in range(rng.choice((1, 4, 40))))]
    await engine.close_session(str(number))
    return tuple(turns)


WIDE: dict[str, Any] = {"hidden_size": 640, "intermediate_size": 1920}
EXPERTS = {"moe_intermediate_size": 640, "shared_expert_intermediate_size": 768}


def made(name: str) -> Any:
    """name: an architecture and what follows of dtype and "wide"."""
    architecture, *more = name.split()
    shape = {**WIDE, **(EXPERTS if architecture == "qwen2_moe" else {})} if "wide" in more else {}
    return MODELS[architecture](0, **shape).to(torch.bfloat16 if "bfloat16" in more else torch.float32)


async def one_by_one(name: str) -> list[Turns]:
    engine = TorchEngine(made(name), rows=4, positions=POSITIONS)
    turns = [await session(engine, number) for number in range(REQUESTS)]
    await engine.close()
    return turns


async def together(name: str, rows: int, seed: int, kv_tokens: int | None = None) -> list[Turns]:
    """All at once, in a shuffled order and with pauses between turns; with few tokens of cache evicted."""
    engine = TorchEngine(made(name), rows=rows, positions=POSITIONS, kv_tokens=kv_tokens)
    order, rng = list(range(REQUESTS)), random.Random(seed)
    rng.shuffle(order)
    pauses = [[rng.randrange(120) for _ in range(3)] for _ in range(REQUESTS)]
    tasks = {n: asyncio.create_task(session(engine, n, pauses[n])) for n in order}
    turns = [await tasks[n] for n in range(REQUESTS)]
    assert (engine.load().evictions > 0) == (kv_tokens is not None)
    await engine.close()
    return turns


COMPILED = ("qwen bfloat16", "llama", "mistral", "qwen2_moe bfloat16", "qwen3_5", "lfm2 bfloat16", "gemma3 bfloat16")
"""Each family in one dtype: attention in both is the same for all of them."""
IN_TILES = ("llama bfloat16 wide", "qwen2_moe bfloat16 wide", "qwen3_5 bfloat16 wide")
"""Of widths from which on products with AMX round a row by how many rows stand beside it."""
IN_TORCH = ("gemma3", "llama bfloat16")
"""Windows and grouped heads; what other families add to attention is computed alike in either form."""


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "compiled") for name in (*COMPILED, *IN_TILES)), *((name, "torch") for name in IN_TORCH)],
)
async def test_alone_together_shuffled_or_evicted_a_request_gets_the_same_bits(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer rows than requests some wait; with less room than the sequences take, some lose their cache while they
    decode or wait, and are fed again."""
    if attention == "torch":
        monkeypatch.setattr("rocstar.engines.torch_cache._compiled", lambda: None)
    elif torch_cache._compiled() is None:
        pytest.skip("the attention was not compiled")
    alone = await one_by_one(name)
    assert sum(len(turn.token_ids) for turns in alone for turn in turns) > 120
    assert await together(name, rows=32, seed=1) == alone
    assert await together(name, rows=5, seed=2, kv_tokens=POSITIONS) == alone
