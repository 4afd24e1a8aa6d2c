"""How many useful tokens does a CPU-second of the torch engine give, beside the engine of another checkout?

    python benchmarks/decode.py [--against CHECKOUT] [--sizes 0.34M 3.7M 11M] [--dtype float32] [--rounds 5]

Each size has its requests: groups of siblings that share a prompt, go on for two turns with a tool's reply between
them, and stop after uneven numbers of tokens (drawn once, the same for all). Useful tokens are those that requests
asked for. One thread; every measurement is a process of its own, the two checkouts alternate, and the ratio is taken
round by round. Prints a table and last one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Size(NamedTuple):
    """A Qwen3 shape and the requests it is measured with."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    prompts: int
    siblings: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    """Of one turn."""


SIZES = {
    "0.34M": Size(96, 3, 3, 1, 256, 512, 12, 32, (40, 80), (8, 48)),
    "3.7M": Size(256, 4, 4, 2, 768, 2048, 16, 4, (32, 128), (16, 96)),
    "11M": Size(384, 7, 6, 2, 1024, 2048, 16, 4, (32, 128), (16, 96)),
}


def main() -> None:
    options = parsed()
    if options.worker:
        sys.path[0] = options.worker  # the checkout to measure, instead of this script's folder
        print(json.dumps(asyncio.run(measured(options.sizes[0], options.dtype))))
        return
    checkouts = {"this": str(ROOT), **({"against": options.against} if options.against else {})}
    figures: dict[str, Any] = {"dtype": options.dtype, "rounds": options.rounds}
    for size in options.sizes:
        rounds = [
            {name: one(path, size, options.dtype) for name, path in checkouts.items()} for _ in range(options.rounds)
        ]
        figures[size] = summary(rounds)
        print(size, *(f"{name} {value}" for name, value in figures[size].items()), sep="  ", flush=True)
    print(json.dumps(figures))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="another checkout of rocstar")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def one(checkout: str, size: str, dtype: str) -> float:
    """Tokens per CPU-second, in a process of its own."""
    command = [sys.executable, __file__, "--worker", checkout, "--sizes", size, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median, least and most of each checkout, and of the ratio."""
    columns = {name: [each[name] for each in rounds] for name in rounds[0]}
    if "against" in columns:
        columns["ratio"] = [each["this"] / each["against"] for each in rounds]
    return {name: [round(f(values), 2) for f in (median, min, max)] for name, values in columns.items()}


async def measured(name: str, dtype: str) -> float:
    from rocstar.launch import quiet_torch

    quiet_torch(threads=1)
    import torch

    from rocstar.engines.torch_engine import TorchEngine

    torch.set_num_threads(1)
    size = SIZES[name]
    engine = TorchEngine(random_model(size, getattr(torch, dtype)), rows=size.prompts * size.siblings, positions=512)
    await asyncio.gather(*(session(engine, size, number, 4) for number in range(8)))  # warm
    began = time.process_time()
    useful = await asyncio.gather(
        *(session(engine, size, number, None) for number in range(size.prompts * size.siblings))
    )
    spent = time.process_time() - began
    await engine.close()
    return sum(useful) / spent


async def session(engine: Any, size: Size, number: int, at_most: int | None) -> int:
    """Two turns of one attempt; returns the tokens asked for."""
    from rocstar.types import Sampling

    prompt_draw, draw, useful = random.Random(number // size.siblings), random.Random(-1 - number), 0
    ids = [prompt_draw.randrange(size.vocab) for _ in range(prompt_draw.randint(*size.prompt_tokens))]
    for turn in range(2):
        count = at_most or draw.randint(*size.new_tokens)
        sampling = Sampling(max_new_tokens=count, seed=1000 * number + turn)
        key = f"{at_most}/{number}"
        completion = await engine.generate(ids, sampling, request_id=f"{key}/{turn}", session_id=key)
        useful += len(completion.token_ids)
        ids = [*ids, *completion.token_ids, *(draw.randrange(size.vocab) for _ in range(12))]
    await engine.close_session(key)
    return useful


def random_model(size: Size, dtype: Any) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype)


if __name__ == "__main__":
    main()
