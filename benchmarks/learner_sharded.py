"""Several learner ranks against one: the same 20 updates, then one rank killed and the run resumed on another number.

    python benchmarks/learner_sharded.py                # 1, 2 and 4 gloo ranks: about two minutes on two cores

Rows of uneven length, packed, in micro-batches that differ between the runs; FSDP2 over child processes, fp32. "Padded"
is the naive form: every row padded to the longest, all logits, one process, torch's own AdamW. Each run is a process of
its own. Prints a table and last one JSON line; exits 4 where losses differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

UPDATES = 20
SAVED_AFTER = 10
KILLED_AFTER = 13
TOLERANCE = 1e-5
RATE = 1e-3
WARM_UP = 5
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_layers": 3,
    "num_heads": 3,
    "num_kv_heads": 1,
    "intermediate_size": 256,
    "rope_theta": 1000.0,
    "max_positions": 256,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=("ranks", "padded"), help="one run (internal)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(padded() if arguments.one == "padded" else ranked(arguments)))
        return 0
    return compare()


def compare() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "1 rank": run("--ranks=1"),
            "padded": run("--one=padded"),
            "2 ranks": run("--ranks=2"),
            "4 ranks": run("--ranks=4"),
            "4 ranks, one killed": run("--ranks=4", "--kill", f"--folder={folder}"),
            "resumed on 2": run("--ranks=2", "--resume", f"--folder={folder}"),
            "resumed on 1": run("--ranks=1", "--resume", f"--folder={folder}"),
        }
    expected = runs["1 rank"]["losses"]
    print(f"{UPDATES} updates, checkpoint after {SAVED_AFTER}, a rank killed after {KILLED_AFTER}\n")
    print(f"{'run':22}{'updates':>8}{'largest loss difference':>25}{'CPU s':>7}{'wall s':>8}")
    for name, each in runs.items():
        begin = UPDATES - len(each["losses"]) if "resumed" in name else 0
        pairs = zip(each["losses"], expected[begin:], strict=False)
        each["largest_difference"] = max(abs(mine - other) for mine, other in pairs)
        figures = f"{each['largest_difference']:25.1e}{each['cpu_seconds']:7.1f}{each['wall_seconds']:8.1f}"
        print(f"{name:22}{len(each['losses']):8}{figures}")
    print(f"\nwhat rank 0 said {runs['4 ranks, one killed']['ended_after_seconds']:.1f} s after the kill:")
    print(runs["4 ranks, one killed"]["message"])
    print(json.dumps(runs))
    return 0 if all(each["largest_difference"] <= TOLERANCE for each in runs.values()) else 4


def run(*options: str) -> dict[str, Any]:
    """One run in a process of its own, with the CPU time of all its ranks."""
    before, begin = os.times(), time.monotonic()
    command = [sys.executable, __file__, *(() if "--one=padded" in options else ("--one=ranks",)), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    after = os.times()
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    figures["wall_seconds"] = time.monotonic() - begin
    figures["cpu_seconds"] = sum(after[2:4]) - sum(before[2:4])
    return figures


def rows_of(update: int) -> Any:
    from rocstar.types import BatchRow

    rng = random.Random(update)
    return tuple(
        BatchRow(
            token_ids=[rng.randrange(SHAPE["vocab_size"]) for _ in range(length)],
            loss_mask=[t >= 8 and not 20 <= t < 26 for t in range(length)],
            sampled_logprobs=[0.0] * length,
            advantage=rng.choice((-1.0, -0.5, 0.5, 1.5)),
        )
        for length in (rng.randint(12, 120) for _ in range(16))
    )


def model() -> Any:
    import torch

    from rocstar.config.sections import ModelSection
    from rocstar.learning.models import random_model

    made = random_model(ModelSection(**SHAPE), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # zero at the start, which would hide the layers
                parameter.normal_(0, 0.1, generator=generator)
    return made


def ranked(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from rocstar.config.places import ClusterSection
    from rocstar.config.sections import LearningSection, ModelSection
    from rocstar.errors import RunHalted
    from rocstar.learning.learner import GrpoLearner
    from rocstar.learning.policy import Policy
    from rocstar.learning.ranks import start
    from rocstar.types import Batch

    torch.set_num_threads(1)
    ranks = start(ClusterSection(learners=arguments.ranks), ModelSection(), {})
    nothing: Any = None
    section = LearningSection(learning_rate=RATE, warmup_steps=WARM_UP, tokens_per_microbatch=300 * arguments.ranks)
    learner = GrpoLearner(Policy(model(), nothing, "", ranks=ranks), section)
    if arguments.resume:
        learner.restore(arguments.folder)
    losses: list[float] = []
    found: dict[str, Any] = {"losses": losses}
    killed_at = 0.0
    try:
        for update in range(SAVED_AFTER if arguments.resume else 0, UPDATES):
            if arguments.kill and update == SAVED_AFTER:
                learner.save(arguments.folder)
            if arguments.kill and update == KILLED_AFTER:
                ranks.children[-1].kill()
                killed_at = time.monotonic()
            losses.append(learner.update(Batch(rows=rows_of(update))).metrics["loss"])
    except RunHalted as error:
        found |= {"message": str(error), "ended_after_seconds": time.monotonic() - killed_at}
    finally:
        ranks.close()
    return found


def padded() -> dict[str, Any]:
    """The naive form."""
    import torch

    torch.set_num_threads(1)
    policy = model()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.01)
    losses = []
    for update in range(UPDATES):
        rows = rows_of(update)
        longest = max(len(row.token_ids) for row in rows)
        ids = torch.tensor([[*row.token_ids, *[0] * (longest - len(row.token_ids))] for row in rows])
        mask = torch.tensor([[*row.loss_mask, *[False] * (longest - len(row.token_ids))] for row in rows])[:, 1:]
        logits = policy(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(ratio * torch.tensor([[row.advantage] for row in rows]) * mask).sum() / mask.sum()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (update + 1) / WARM_UP)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


if __name__ == "__main__":
    raise SystemExit(main())
