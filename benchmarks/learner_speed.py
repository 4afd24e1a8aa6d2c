"""Speed of the learner against the machine's own matrix products, and against another checkout.

    python benchmarks/learner_speed.py
    python benchmarks/learner_speed.py --against ../rocstar-before        # a git worktree of another commit
    python benchmarks/learner_speed.py --cases 135m --dtypes float32

Cases, one torch thread, CPU seconds, the best of several updates:

    rl    8 prompts of 32 tokens with 8 attempts of 128 each, Qwen3 shape of 3.7M parameters, one update
    135m  4 prompts of 45 tokens with 8 attempts of 75 each, the shape of SmolLM2-135M, one update

FLOP are 6 for each weight of the layers and token that must be computed (a prompt once for its attempts), 6 for each
weight of the LM head and token that it must predict, and causal attention; what a form computes beside that (padding,
logits of prompts, prompts again) is not counted. "Peak" is the best fp32 product of 1,024 x 1,024 matrices, measured
between the updates. Every form is a process that stays; they take turns until `--seconds` are over, and the round that
has begun then is finished: below three minutes on two busy cores. Prints a table and last one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from frame import ROOT, Table, Worker, by_turns, parser, report, spent

SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "max_positions")
RL = {**dict(zip(SIZES, (2048, 256, 4, 4, 2, 768, 256), strict=True)), "rope_theta": 1000.0}
SMOLLM2 = {**dict(zip(SIZES, (49152, 576, 30, 9, 3, 1536, 256), strict=True)), "rope_theta": 1e5}
CASES = {"rl": (RL, 8, 32, 128), "135m": (SMOLLM2, 4, 45, 75)}
"""Shape, prompts, tokens of a prompt and of an attempt."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--against", help="root of another checkout")
    options.add_argument("--seconds", type=float, default=90, help="wall time after which no new round begins")
    options.add_argument("--cases", nargs="+", choices=CASES, default=["rl"])
    options.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    options.add_argument("--worker", nargs=2, help="one form, a turn for each line on stdin (internal)")
    arguments = options.parse_args()
    if arguments.worker:
        sys.path[0], dtype = arguments.worker
        take_turns(dtype)
        return
    forms = {f"own {dtype}": (str(ROOT), dtype) for dtype in arguments.dtypes}
    if arguments.against:
        forms = {"against float32": (arguments.against, "float32"), **forms}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker([sys.executable, __file__, "--worker", *form]))
            for name, form in forms.items()
        }
        rounds = by_turns(
            {name: all_of(arguments.cases, worker) for name, worker in workers.items()}, until(arguments.seconds)
        )
    found = {case: {name: best([each[name][case] for each in rounds]) for name in forms} for case in arguments.cases}
    for case, results in found.items():
        print_case(case, results)
    report(**found)


def until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def all_of(cases: list[str], worker: Worker) -> Callable[[], dict[str, dict[str, float]]]:
    return lambda: {case: json.loads(worker.ask(case)) for case in cases}


def best(turns: list[dict[str, float]]) -> dict[str, float]:
    """Least time and highest peak of all rounds."""
    seconds, peak = min(turn["seconds"] for turn in turns), max(turn["peak"] for turn in turns)
    return {"gflop": turns[0]["gflop"], "seconds": seconds, "peak": peak}


def print_case(case: str, results: dict[str, dict[str, float]]) -> None:
    peak = max(each["peak"] for each in results.values())
    first = next(iter(results.values()))["seconds"]
    print(f"\n{case}: fp32 matrix products reach {peak:.0f} GFLOP/s")
    table = Table("form", "CPU s", "GFLOP/s", "of peak", "ratio")
    for name, each in results.items():
        rate = each["gflop"] / each["seconds"]
        each["share_of_peak"] = rate / peak
        table.row(name, each["seconds"], rate, f"{rate / peak:.0%}", each["seconds"] / first)


def take_turns(dtype: str) -> None:
    """Updates of the case that each line names, with products between them."""
    import torch

    torch.set_num_threads(1)
    cases: dict[str, tuple[Callable[[], Any], float]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in cases:
            cases[case] = rl(*CASES[case], dtype)
        update, gflop = cases[case]
        with spent() as taken:
            update()
        print(json.dumps({"seconds": taken.cpu, "peak": product_rate(), "gflop": gflop}), flush=True)


def product_rate(size: int = 1024, repeats: int = 5) -> float:
    """GFLOP/s of one product."""
    import torch

    matrix = torch.randn(size, size)
    with spent() as taken:
        for _ in range(repeats):
            matrix @ matrix
    return 2e-9 * size**3 * repeats / taken.cpu


def gflop_of(shape: dict[str, Any], lengths: list[int], computed: int, predicted: int) -> float:
    """Of one forward and backward pass: attention over rows of `lengths`, layers over the tokens `computed`, the head
    over those `predicted`."""
    hidden, head_size = shape["hidden_size"], shape["hidden_size"] // shape["num_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * head_size * shape["num_kv_heads"]
    weights = shape["num_layers"] * (attention + 3 * hidden * shape["intermediate_size"])
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    scores = shape["num_layers"] * pairs * 2 * hidden  # multiplications of q with k and of p with v
    return 6e-9 * (weights * computed + hidden * shape["vocab_size"] * predicted + scores)


def rl(shape: dict[str, Any], count: int, asked: int, written: int, dtype: str) -> tuple[Callable[[], Any], float]:
    """One update of `count` prompts of `asked` tokens with eight attempts each of `written`."""
    from rocstar.types import BatchRow

    rng = random.Random(0)
    tokens = asked + written
    prompts = [[rng.randrange(shape["vocab_size"]) for _ in range(asked)] for _ in range(count)]
    old: dict[str, Any] = {"old_logprobs": [-7.6] * tokens, "entropies": [0.0] * tokens}
    rows = tuple(
        BatchRow(
            token_ids=[*prompts[row // 8], *(rng.randrange(shape["vocab_size"]) for _ in range(written))],
            loss_mask=[t >= asked for t in range(tokens)],
            sampled_logprobs=[0.0] * tokens,
            advantage=rng.choice((-1.0, 1.0)),
            **old,
        )
        for row in range(8 * count)
    )
    learner = learner_of(shape, dtype)
    learnt = 8 * count * written
    gflop = gflop_of(shape, [tokens - 1] * 8 * count, count * (asked - 1) + learnt, learnt)
    return lambda: learner.update(rows), gflop


def learner_of(shape: dict[str, Any], dtype: str) -> Any:
    from rocstar.config.sections import LearningSection, ModelSection
    from rocstar.learning.learner import GrpoLearner
    from rocstar.learning.models import random_model
    from rocstar.learning.policy import Policy

    model = random_model(ModelSection(**shape), 0)
    return GrpoLearner(Policy(model, None, "", ModelSection(dtype=dtype)), LearningSection())  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
