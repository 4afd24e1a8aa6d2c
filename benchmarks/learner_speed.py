"""Speed of the learner against the machine's own matrix products, and against another checkout.

    python benchmarks/learner_speed.py
    python benchmarks/learner_speed.py --against ../rocstar-d725079        # a git worktree of that commit

Two cases, one torch thread, CPU seconds, the best of several updates:

    rl    8 prompts of 32 tokens with 8 attempts of 128 each, Qwen3 shape of 3.7M parameters, one update
    sft   the cold start of recipes/quickstart.toml: 32 rows of 25 to 70 tokens, 0.34M parameters, Muon

FLOP are 6 for each weight of the layers and token that must be computed (a prompt once for its attempts), 6 for each
weight of the LM head and token that it must predict, and causal attention; what a form computes beside that (padding,
logits of prompts, prompts again) is not counted. "Peak" is the best fp32 product of 1,024 x 1,024 matrices, measured
between the updates. Every form is a process that stays; they take turns until `--seconds` are over, and the round that
has begun then is finished: below three minutes on two busy cores. Prints a table and last one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 768,
    "rope_theta": 1000.0,
    "max_positions": 256,
}
SFT = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_layers": 3,
    "num_heads": 3,
    "num_kv_heads": 1,
    "intermediate_size": 256,
    "rope_theta": 1000.0,
    "max_positions": 256,
}
UPDATES = {"rl": 1, "sft": 15}  # of one turn
Worker = subprocess.Popen[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="root of another checkout")
    parser.add_argument("--seconds", type=float, default=90, help="wall time after which no new round begins")
    parser.add_argument("--worker", metavar="DTYPE", help="one form, a turn for each line on stdin (internal)")
    arguments = parser.parse_args()
    if arguments.worker:
        take_turns(arguments.worker)
        return
    own = HERE.parents[1]
    forms = {"own float32": (own, "float32"), "own bfloat16": (own, "bfloat16")}
    if arguments.against:
        forms = {"against float32": (arguments.against.resolve(), "float32"), **forms}
    found: dict[str, dict[str, dict[str, float]]] = {case: {name: {} for name in forms} for case in UPDATES}
    end = time.monotonic() + arguments.seconds
    with started(forms) as workers:
        while time.monotonic() < end:
            for case in UPDATES:
                for name, worker in workers.items():
                    merge(found[case][name], turn(worker, case))
    for case, results in found.items():
        report(case, results)
    print(json.dumps(found))


@contextmanager
def started(forms: dict[str, tuple[Path, str]]) -> Iterator[dict[str, Worker]]:
    """A process of each form, on the rocstar of its checkout."""
    workers = {
        name: subprocess.Popen(
            [sys.executable, "-P", str(HERE), "--worker", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for name, (root, dtype) in forms.items()
    }
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def turn(worker: Worker, case: str) -> dict[str, float]:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(case + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        sys.exit("a form ended; its words stand above")
    figures: dict[str, float] = json.loads(line)
    return figures


def merge(best: dict[str, float], new: dict[str, float]) -> None:
    """Least time and highest peak of all rounds."""
    best["gflop"] = new["gflop"]
    best["seconds"] = min(best.get("seconds", new["seconds"]), new["seconds"])
    best["peak"] = max(best.get("peak", 0.0), new["peak"])


def report(case: str, results: dict[str, dict[str, float]]) -> None:
    peak = max(each["peak"] for each in results.values())
    first = next(iter(results.values()))["seconds"]
    print(f"\n{case}: fp32 matrix products reach {peak:.0f} GFLOP/s")
    print(f"{'form':20}{'CPU s':>8}{'GFLOP/s':>9}{'of peak':>9}{'ratio':>7}")
    for name, each in results.items():
        rate = each["gflop"] / each["seconds"]
        each["share_of_peak"] = rate / peak
        print(f"{name:20}{each['seconds']:8.3f}{rate:9.1f}{rate / peak:9.0%}{each['seconds'] / first:7.2f}")


def take_turns(dtype: str) -> None:
    """Updates of the case that each line names, with products between them."""
    import torch

    torch.set_num_threads(1)
    cases = {"rl": rl(dtype), "sft": sft(dtype)}
    for line in sys.stdin:
        case = line.strip()
        update, gflop = cases[case]
        seconds, peaks = [], []
        for _ in range(UPDATES[case]):
            begin = time.process_time()
            update()
            seconds.append(time.process_time() - begin)
            peaks.append(product_rate())
        print(json.dumps({"seconds": min(seconds), "peak": max(peaks), "gflop": gflop}), flush=True)


def product_rate(size: int = 1024, repeats: int = 5) -> float:
    """GFLOP/s of one product."""
    import torch

    matrix = torch.randn(size, size)
    begin = time.process_time()
    for _ in range(repeats):
        matrix @ matrix
    return 2e-9 * size**3 * repeats / (time.process_time() - begin)


def gflop_of(shape: dict[str, Any], lengths: list[int], computed: int, predicted: int) -> float:
    """Of one forward and backward pass: attention over rows of `lengths`, layers over the tokens `computed`, the head
    over those `predicted`."""
    hidden, head_size = shape["hidden_size"], shape["hidden_size"] // shape["num_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * head_size * shape["num_kv_heads"]
    weights = shape["num_layers"] * (attention + 3 * hidden * shape["intermediate_size"])
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    scores = shape["num_layers"] * pairs * 2 * hidden  # multiplications of q with k and of p with v
    return 6e-9 * (weights * computed + hidden * shape["vocab_size"] * predicted + scores)


def rl(dtype: str) -> tuple[Callable[[], Any], float]:
    from rocstar.types import Batch, BatchRow

    rng = random.Random(0)
    prompts = [[rng.randrange(RL["vocab_size"]) for _ in range(32)] for _ in range(8)]
    old: dict[str, Any] = {"old_logprobs": [-7.6] * 160, "entropies": [0.0] * 160}
    rows = tuple(
        BatchRow(
            token_ids=[*prompts[row // 8], *(rng.randrange(RL["vocab_size"]) for _ in range(128))],
            loss_mask=[t >= 32 for t in range(160)],
            sampled_logprobs=[0.0] * 160,
            advantage=rng.choice((-1.0, 1.0)),
            **old,
        )
        for row in range(64)
    )
    learner = rl_learner(dtype)
    return lambda: learner.update(Batch(rows=rows)), gflop_of(RL, [159] * 64, 8 * 31 + 64 * 128, 64 * 128)


def rl_learner(dtype: str) -> Any:
    from rocstar.learning import learner, policy

    if hasattr(learner, "LearnerSettings"):  # at d725079
        made = policy.Policy(policy.random_model(policy.Shape(**RL), 0), None, "")
        return learner.GrpoLearner(made, learner.LearnerSettings(), None)
    from rocstar.config.sections import LearningSection, ModelSection
    from rocstar.learning.models import random_model

    made = policy.Policy(random_model(ModelSection(**RL), 0), None, "", ModelSection(dtype=dtype))  # type: ignore[arg-type]
    return learner.GrpoLearner(made, LearningSection())


def sft(dtype: str) -> tuple[Callable[[], Any], float]:
    from rocstar.types import SftRow

    rng = random.Random(0)
    lengths = [rng.randint(25, 70) for _ in range(32)]
    rows = [
        SftRow(
            token_ids=tuple(rng.randrange(SFT["vocab_size"]) for _ in range(length)),
            loss_mask=tuple(t > 12 for t in range(length)),
        )
        for length in lengths
    ]
    lengths = [length - 1 for length in lengths]  # the last token of a row predicts nothing
    predicted = sum(lengths)
    learner = sft_learner(dtype)
    return lambda: learner.update(rows, seed=1), gflop_of(SFT, lengths, predicted, predicted)


def sft_learner(dtype: str) -> Any:
    from rocstar.learning import policy, sft

    if hasattr(sft, "SftSettings"):  # at d725079
        made = policy.Policy(policy.random_model(policy.Shape(**SFT), 0), None, "")
        return sft.SftLearner(made, sft.SftSettings(steps=900, tokens_per_microbatch=768))
    from rocstar.config.sections import ModelSection, SftSection
    from rocstar.learning.models import random_model

    made = policy.Policy(random_model(ModelSection(**SFT), 0), None, "", ModelSection(dtype=dtype))  # type: ignore[arg-type]
    section = SftSection(
        optimizer="muon", adamw_learning_rate=3e-3, context_loss_weight=0.1, tokens_per_microbatch=1536
    )
    return sft.SftLearner(made, section, steps=900)


if __name__ == "__main__":
    main()
