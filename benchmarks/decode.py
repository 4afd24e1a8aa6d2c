"""How many useful tokens does a CPU-second of the torch engine give, beside other engines on the same requests?

    python benchmarks/decode.py [--requests 1024] [--sizes 1M 3.7M 11M 50M] [--dtypes float32 bfloat16]
                                [--engines torch vllm] [--against CHECKOUT] [--rounds 1]

The requests are attempts of one to four turns: sixteen siblings share a prompt, each turn asks for an uneven number of
tokens (drawn once, the same for all), and a tool that takes up to TOOL_SECONDS answers between turns. Contestants, all
with ROWS attempts at once and keys and values for ROWS attempts of POSITIONS tokens:

    torch        the torch engine of this checkout
    against      the torch engine of another checkout, if one is given
    vllm         a vLLM server behind our engine, one thread, its prefix cache on; left out with a message where
                 ROCSTAR_VLLM_PYTHON names no environment (scripts/vllm_env). The CPU of the server's processes counts,
                 that of this process does not

Useful tokens are those that were asked for. Each measurement is a process of its own with one thread, contestants take
turns, and ratios are taken round by round. The share of the peak is the arithmetic of the tokens that have to go
through the model once (each prompt for all its siblings), over what the faster of torch's two products of square
matrices gives in the same process. `fed` counts the tokens that went through the model, `passes` the forward passes
they took; the fewer tokens a pass has, the slower its products are. Says on stderr what is measured, prints a table and
last a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from frame import ROOT, by_turns, cpu_seconds, of_child, parser, qwen3, report, spread

ROWS = 64  # attempts that decode at once
POSITIONS = 1024  # of the longest attempt
SIBLINGS = 16
TOOL_SECONDS = 0.05


class Size(NamedTuple):
    """A Qwen3 shape with heads of its width / heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


SIZES = {
    "0.34M": Size(96, 3, 3, 1, 256, 512),
    "1M": Size(128, 4, 4, 2, 384, 2048),
    "3.7M": Size(256, 4, 4, 2, 768, 2048),
    "11M": Size(384, 7, 6, 2, 1024, 2048),
    "50M": Size(640, 10, 10, 2, 1920, 4096),
    "135M": Size(576, 30, 9, 3, 1536, 49152),
}


class Attempt(NamedTuple):
    number: int
    prompt: tuple[int, ...]
    turns: tuple[int, ...]
    """Tokens to sample in each."""
    replies: tuple[tuple[int, ...], ...]
    """What the tool says after each turn but the last."""
    waits: tuple[float, ...]
    """Seconds that it takes for it."""


class Figure(NamedTuple):
    """What one contestant did in one process."""

    tokens_per_cpu_second: float
    peak_share: float
    detail: dict[str, int]


class Contestant(NamedTuple):
    engine: Any
    counted: Callable[[], dict[str, int]] = dict
    """Since it was opened."""
    cpu_seconds: Callable[[], float] = time.process_time


Row = dict[str, Any]


def main() -> None:
    options = parsed()
    if options.worker:
        engine, checkout = options.worker
        sys.path[0] = checkout
        print(json.dumps(asyncio.run(measured(engine, options.sizes[0], options.dtypes[0], options.requests))))
        return
    table: list[Row] = []
    engines = contestants(options)
    for size in options.sizes:
        for dtype in options.dtypes:
            measures = {name: partial(one, name, size, dtype, options) for name in engines}
            rounds = by_turns(measures, range(options.rounds)) if engines else []
            for row in rows_of(size, dtype, rounds, engines):
                table.append(row)
                print(line(row), flush=True)
    report(requests=options.requests, rounds=options.rounds, rows=table)


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=1024)
    arguments.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "3.7M", "11M", "50M"])
    arguments.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    arguments.add_argument("--engines", nargs="+", choices=CONTESTANTS, default=["torch"])
    arguments.add_argument("--against", help="another checkout of rocstar")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return arguments.parse_args()


def contestants(options: argparse.Namespace) -> list[str]:
    names = [*options.engines, *(["against"] if options.against and "against" not in options.engines else [])]
    if "vllm" in names and not os.environ.get("ROCSTAR_VLLM_PYTHON"):
        print("vllm is left out: ROCSTAR_VLLM_PYTHON names no environment; scripts/vllm_env makes one", file=sys.stderr)
        names.remove("vllm")
    return names


def one(engine: str, size: str, dtype: str, options: argparse.Namespace) -> Figure:
    """Measured in a process of its own."""
    checkout = options.against if engine == "against" else str(ROOT)
    work = ("--sizes", size, "--dtypes", dtype, "--requests", options.requests)
    figure = Figure(*of_child("--worker", engine, checkout, *work))
    print(f"{size} {dtype} {engine}: {figure.tokens_per_cpu_second:.0f} tokens/CPU-s", file=sys.stderr, flush=True)
    return figure


def rows_of(size: str, dtype: str, rounds: list[dict[str, Figure]], engines: list[str]) -> Iterator[Row]:
    """One for each contestant: medians, and how many times as fast the torch engine was."""
    for name in engines:
        figures = [each[name] for each in rounds]
        ratios = [each["torch"][0] / each[name][0] for each in rounds] if "torch" in engines else []
        yield {
            "size": size,
            "dtype": dtype,
            "engine": name,
            "tokens_per_cpu_second": spread([figure[0] for figure in figures], 0),
            "peak_share": round(median(figure[1] for figure in figures), 3),
            "torch_is_faster_by": spread(ratios, 2) if ratios else None,
            "detail": figures[0].detail,
        }


def line(row: Row) -> str:
    speed, least, most = row["tokens_per_cpu_second"]
    ratio = "" if row["torch_is_faster_by"] is None else f"torch is x {row['torch_is_faster_by']}"
    return (
        f"{row['size']:>5} {row['dtype']:<9} {row['engine']:<11} {speed:>6.0f} tokens/CPU-s ({least:.0f}-{most:.0f})  "
        f"{row['peak_share']:>6.1%} of peak  {ratio}  {row['detail']}"
    )


# -- one measurement ------------------------------------------------------------------------------------------------


async def measured(engine: str, size_name: str, dtype_name: str, requests: int) -> Figure:
    from rocstar.support.threads import quiet_torch

    quiet_torch(threads=1)
    import torch

    torch.set_num_threads(1)
    size, dtype = SIZES[size_name], getattr(torch, dtype_name)
    work = [attempt(size, number) for number in range(requests)]
    model = qwen3(**size._asdict(), max_position_embeddings=2 * POSITIONS).to(dtype)
    operations = 2 * sum(parameter.numel() for parameter in model.parameters()) * necessary(work)
    async with CONTESTANTS[engine](model) as contestant:
        await converse_all(contestant.engine, [a._replace(number=-1 - a.number, turns=(4,)) for a in work[:8]])  # warm
        began, before = contestant.cpu_seconds(), contestant.counted()
        await converse_all(contestant.engine, work)
        spent = contestant.cpu_seconds() - began
        detail = {name: count - before[name] for name, count in contestant.counted().items()}
    detail["necessary"] = necessary(work)
    return Figure(sum(sum(attempt.turns) for attempt in work) / spent, operations / spent / peak(dtype), detail)


def attempt(size: Size, number: int) -> Attempt:
    group, draw = random.Random(number // SIBLINGS), random.Random(-1 - number)
    turns = tuple(min(8 + int(draw.expovariate(1 / 32)), 160) for _ in range(draw.randint(1, 4)))
    return Attempt(
        number,
        prompt=tuple(group.randrange(size.vocab) for _ in range(group.randint(32, 128))),
        turns=turns,
        replies=tuple(tuple(draw.randrange(size.vocab) for _ in range(draw.randint(8, 40))) for _ in turns[1:]),
        waits=tuple(draw.uniform(0, TOOL_SECONDS) for _ in turns[1:]),
    )


def necessary(work: list[Attempt]) -> int:
    """Tokens that have to go through the model; the last of each attempt does not."""
    prompts = {attempt.number // SIBLINGS: len(attempt.prompt) for attempt in work}
    own = (sum(attempt.turns) + sum(map(len, attempt.replies)) - 1 for attempt in work)
    return sum(prompts.values()) + sum(own)


def peak(dtype: Any) -> float:
    """Operations a second of a large product on one thread, the faster of a plain one and one over packed weights."""
    import torch

    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(b, 1024)
    best = float("inf")
    for product in (lambda: a @ b, lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")):
        for _ in range(8):
            began = time.thread_time()
            product()
            best = min(best, time.thread_time() - began)
    return 2 * 1024**3 / best


# -- contestants ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def torch_engine(model: Any) -> AsyncIterator[Contestant]:
    from rocstar.engines.torch_engine import TorchEngine

    engine = TorchEngine(model, rows=ROWS, positions=POSITIONS)
    decoder, passes = engine._decoder, 0
    forward = decoder._forward

    def counting(*arguments: Any, **more: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*arguments, **more)

    decoder._forward = counting

    def counted() -> dict[str, int]:
        load = engine.load()
        more = {name: getattr(load, name) for name in ("evictions", "recomputed_tokens") if hasattr(load, name)}
        return {"fed": decoder.fed_tokens, "passes": passes, **more}

    yield Contestant(engine, counted)
    await engine.close()


@asynccontextmanager
async def vllm(model: Any) -> AsyncIterator[Contestant]:
    from rocstar.engines.vllm import VllmEngine
    from rocstar.engines.vllm_server import VllmServer, VllmSettings

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        settings = VllmSettings(
            model=folder / "model",
            python=Path(os.environ["ROCSTAR_VLLM_PYTHON"]),
            log=folder / "log",
            max_tokens=POSITIONS,
            rows=ROWS,
            capacity_tokens=ROWS * POSITIONS,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        server = await VllmServer.start(settings)
        engine = VllmEngine(server.url, vocab_size=model.config.vocab_size)
        try:
            await engine.restart(None)
            yield Contestant(engine, cpu_seconds=lambda: cpu_seconds(server.pid))
        finally:
            await engine.close()
            await server.close()


async def converse_all(engine: Any, work: list[Attempt]) -> None:
    await asyncio.gather(*(converse(engine, attempt) for attempt in work))


async def converse(engine: Any, attempt: Attempt) -> None:
    """All turns of one attempt, with any engine of rocstar's. Raises SystemExit where fewer tokens came than were asked
    for."""
    from rocstar.types import Sampling

    ids, key = list(attempt.prompt), str(attempt.number)
    for turn, count in enumerate(attempt.turns):
        sampling = Sampling(max_new_tokens=count, seed=abs(10 * attempt.number + turn))
        completion = await engine.generate(ids, sampling, request_id=f"{key}/{turn}", session_id=key)
        written = list(completion.token_ids)
        if len(written) != count:
            raise SystemExit(f"attempt {key} got {len(written)} tokens in turn {turn} instead of {count}")
        if turn < len(attempt.turns) - 1:
            await asyncio.sleep(attempt.waits[turn])
            ids += [*written, *attempt.replies[turn]]
    await engine.close_session(key)


CONTESTANTS: dict[str, Callable[[Any], AbstractAsyncContextManager[Contestant]]] = {
    "torch": torch_engine,
    "against": torch_engine,
    "vllm": vllm,
}

if __name__ == "__main__":
    main()
