"""How many useful tokens does a CPU-second of the torch engine give, beside other engines on the same requests?

    python benchmarks/decode.py [--requests 1024] [--fewer 50M:generate=256 ...] [--sizes 1M 3.7M 11M 50M]
                                [--engines torch generate continuous vllm] [--against CHECKOUT]
                                [--dtypes float32 bfloat16] [--bfloat16-engines torch vllm] [--rounds 1]

The requests are attempts of one to four turns: sixteen siblings share a prompt, each turn asks for an uneven number of
tokens (drawn once, the same for all), and a tool that takes up to TOOL_SECONDS answers between turns. Contestants, all
with ROWS attempts at once and keys and values for ROWS attempts of POSITIONS tokens:

    torch        the torch engine of this checkout
    against      the torch engine of another checkout, if one is given
    generate     transformers `generate`, ROWS attempts at a time, padded, turn by turn, nothing kept between turns
    continuous   transformers continuous batching, turn by turn, its prefix cache on
    vllm         a vLLM server behind our engine, one thread, its prefix cache on; left out with a message where
                 ROCSTAR_VLLM_PYTHON names no environment (scripts/vllm_env). The CPU of the server's processes counts,
                 that of this process does not

Useful tokens are those that were asked for. Each measurement is a process of its own with one thread, contestants take
turns, and ratios are taken round by round. `--fewer` gives a slow contestant the first so many of the requests, at one
size. The share of the peak is the arithmetic of the tokens that have to go through the model once (each prompt for all
its siblings), over what the faster of torch's two products of square matrices gives in the same process. `fed` counts
the tokens that went through the model, padding included, `passes` the forward passes they took; the fewer tokens a
pass has, the slower its products are. Says on stderr what is measured, prints a table, the ratios and last a JSON line.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from frame import ROOT, by_turns, of_child, parser, qwen3, report, spread

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
    requests: int
    detail: dict[str, int]


class Contestant(NamedTuple):
    run: Callable[[list[Attempt]], Awaitable[None]]
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
    for size in options.sizes:
        for dtype in options.dtypes:
            engines = contestants(options, dtype)
            measures = {name: partial(one, name, size, dtype, options) for name in engines}
            rounds = by_turns(measures, range(options.rounds)) if engines else []
            for row in rows_of(size, dtype, rounds, engines):
                table.append(row)
                print(line(row), flush=True)
    ratios = list(bfloat16_gains(table))
    for gain in ratios:
        print(gain, flush=True)
    report(requests=options.requests, rounds=options.rounds, rows=table, bfloat16=ratios)


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=1024)
    arguments.add_argument("--fewer", nargs="+", default=[], metavar="SIZE:ENGINE=COUNT")
    arguments.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "3.7M", "11M", "50M"])
    arguments.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    arguments.add_argument("--engines", nargs="+", choices=CONTESTANTS, default=["torch"])
    arguments.add_argument("--bfloat16-engines", nargs="+", choices=CONTESTANTS, help="those that run in bfloat16")
    arguments.add_argument("--against", help="another checkout of rocstar")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return arguments.parse_args()


def contestants(options: argparse.Namespace, dtype: str) -> list[str]:
    names = [*options.engines, *(["against"] if options.against and "against" not in options.engines else [])]
    if dtype == "bfloat16" and options.bfloat16_engines is not None:
        names = [name for name in names if name in options.bfloat16_engines]
    if "vllm" in names and not os.environ.get("ROCSTAR_VLLM_PYTHON"):
        print("vllm is left out: ROCSTAR_VLLM_PYTHON names no environment; scripts/vllm_env makes one", file=sys.stderr)
        names.remove("vllm")
    return names


def one(engine: str, size: str, dtype: str, options: argparse.Namespace) -> Figure:
    """Measured in a process of its own."""
    checkout = options.against if engine == "against" else str(ROOT)
    fewer = dict(each.rsplit("=", 1) for each in options.fewer)
    count = fewer.get(f"{size}:{engine}", options.requests)
    work = ("--sizes", size, "--dtypes", dtype, "--requests", count)
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
            "requests": figures[0].requests,
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
        f"{row['peak_share']:>6.1%} of peak  {row['requests']} requests  {ratio}  {row['detail']}"
    )


def bfloat16_gains(table: list[Row]) -> Iterator[Row]:
    """How many times as fast torch in bfloat16 is as torch, and as the other checkout, in float32."""
    speed = {(row["size"], row["dtype"], row["engine"]): row["tokens_per_cpu_second"][0] for row in table}
    for size in SIZES:
        if half := speed.get((size, "bfloat16", "torch")):
            single = {name: speed.get((size, "float32", name)) for name in ("torch", "against")}
            yield {"size": size, **{f"bfloat16_to_float32_of_{n}": round(half / s, 2) for n, s in single.items() if s}}


# -- one measurement ------------------------------------------------------------------------------------------------


async def measured(engine: str, size_name: str, dtype_name: str, requests: int) -> Figure:
    from rocstar.support.threads import quiet_torch

    quiet_torch(threads=1)
    import torch

    torch.set_num_threads(1)
    size, dtype = SIZES[size_name], getattr(torch, dtype_name)
    work, model = attempts(size, requests), random_model(size).to(dtype)
    operations = 2 * sum(parameter.numel() for parameter in model.parameters()) * necessary(work)
    async with CONTESTANTS[engine](model) as contestant:
        await contestant.run([attempt._replace(number=-1 - attempt.number, turns=(4,)) for attempt in work[:8]])  # warm
        began, before = contestant.cpu_seconds(), contestant.counted()
        await contestant.run(work)
        spent = contestant.cpu_seconds() - began
        detail = {name: count - before[name] for name, count in contestant.counted().items()}
    detail["necessary"] = necessary(work)
    return Figure(
        sum(sum(attempt.turns) for attempt in work) / spent, operations / spent / peak(dtype), requests, detail
    )


def attempts(size: Size, count: int) -> list[Attempt]:
    return [attempt(size, number) for number in range(count)]


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


def random_model(size: Size) -> Any:
    return qwen3(**size._asdict(), max_position_embeddings=2 * POSITIONS)


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

    yield Contestant(partial(converse_all, partial(say_to, engine)), counted)
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
            yield Contestant(partial(converse_all, partial(say_to, engine)), cpu_seconds=server.cpu_seconds)
        finally:
            await engine.close()
            await server.close()


async def say_to(engine: Any, attempt: Attempt, turn: int, ids: list[int]) -> list[int]:
    """One turn, with any engine of rocstar's."""
    from rocstar.types import Sampling

    sampling = Sampling(max_new_tokens=attempt.turns[turn], seed=abs(10 * attempt.number + turn))
    key = str(attempt.number)
    completion = await engine.generate(ids, sampling, request_id=f"{key}/{turn}", session_id=key)
    if turn == len(attempt.turns) - 1:
        await engine.close_session(key)
    return list(completion.token_ids)


@asynccontextmanager
async def continuous(model: Any) -> AsyncIterator[Contestant]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1, use_cache=True)
    pages = ContinuousBatchingConfig(page_size=256, num_blocks=ROWS * POSITIONS // 256, max_batch_tokens=256)
    model.set_attn_implementation("sdpa")
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=pages)
    manager.start()
    gate, loop = asyncio.Semaphore(ROWS), asyncio.get_running_loop()

    async def say(attempt: Attempt, turn: int, ids: list[int]) -> list[int]:
        done, key = loop.create_future(), f"{attempt.number}/{turn}"

        def deliver(output: Any) -> None:
            if output.is_finished():
                loop.call_soon_threadsafe(done.set_result, list(output.generated_tokens))

        async with gate:
            manager.register_result_handler(key, deliver)
            manager.add_request(ids, request_id=key, max_new_tokens=attempt.turns[turn])
            return await done

    yield Contestant(partial(converse_all, say))
    await asyncio.to_thread(manager.stop, block=True)


Say = Callable[[Attempt, int, list[int]], Awaitable[list[int]]]


async def converse_all(say: Say, work: list[Attempt]) -> None:
    await asyncio.gather(*(converse(attempt, say) for attempt in work))


async def converse(attempt: Attempt, say: Say) -> None:
    """All turns of one attempt. Raises SystemExit where fewer tokens came than were asked for."""
    ids = list(attempt.prompt)
    for turn, count in enumerate(attempt.turns):
        written = await say(attempt, turn, ids)
        if len(written) != count:
            raise SystemExit(f"attempt {attempt.number} got {len(written)} tokens in turn {turn} instead of {count}")
        if turn < len(attempt.turns) - 1:
            await asyncio.sleep(attempt.waits[turn])
            ids += [*written, *attempt.replies[turn]]


@asynccontextmanager
async def generate(model: Any) -> AsyncIterator[Contestant]:
    import torch

    model.set_attn_implementation("sdpa")
    fed = passes = 0

    async def run(work: list[Attempt]) -> None:
        nonlocal fed, passes
        for begin in range(0, len(work), ROWS):
            batch = work[begin : begin + ROWS]
            texts = {attempt.number: list(attempt.prompt) for attempt in batch}
            for turn in range(4):
                asking = [attempt for attempt in batch if turn < len(attempt.turns)]
                if not asking:
                    break
                width, count = max(len(texts[a.number]) for a in asking), max(a.turns[turn] for a in asking)
                padded = torch.tensor([[0] * (width - len(texts[a.number])) + texts[a.number] for a in asking])
                mask = torch.tensor([[0] * (width - len(texts[a.number])) + [1] * len(texts[a.number]) for a in asking])
                settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
                with torch.inference_mode():
                    out = model.generate(padded, attention_mask=mask, max_new_tokens=count, **settings)
                fed, passes = fed + len(asking) * (width + count - 1), passes + count
                for each, row in zip(asking, out[:, width:].tolist(), strict=True):
                    reply = each.replies[turn] if turn < len(each.replies) else ()
                    texts[each.number] += [*row[: each.turns[turn]], *reply]

    yield Contestant(run, lambda: {"fed": fed, "passes": passes})


CONTESTANTS: dict[str, Callable[[Any], AbstractAsyncContextManager[Contestant]]] = {
    "torch": torch_engine,
    "against": torch_engine,
    "generate": generate,
    "continuous": continuous,
    "vllm": vllm,
}

if __name__ == "__main__":
    main()
