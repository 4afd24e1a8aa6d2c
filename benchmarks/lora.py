"""Adapters beside all weights: memory, CPU time and bytes of a checkpoint of the same updates.

    python benchmarks/lora.py models/smollm2-135m --rank 32        # 135M: some minutes on one core

Each form runs in a process of its own: three SFT updates of the same made-up rows, of which the last two are timed,
weights for an engine in the same process after each, and a checkpoint. Peaks are of its resident set, with the
engine's model. Prints a table and last one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from frame import Table, of_child, parser, peak_bytes, report, spent

from rocstar.config.sections import ModelSection, SftSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.templates import template_named
from rocstar.engines.torch_forward import take_weights
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy
from rocstar.learning.sft import SftLearner
from rocstar.types import SftRow

MIB = 2**20
FORMS = ("all weights", "adapters")
UPDATES = 3


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--rank", type=int, default=32)
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--tokens", type=int, default=128, help="of each row")
    options.add_argument("--form", choices=FORMS, help="run one form and print its figures (internal)")
    arguments = options.parse_args()
    if arguments.form:
        print(json.dumps(measured(arguments)))
        return
    found = {form: of_child(*sys.argv[1:], "--form", form) for form in FORMS}
    print(
        f"{arguments.model.name}, rank {arguments.rank}, {arguments.rows} rows of {arguments.tokens} tokens, one thread"
    )
    table = Table("form", "learns, M", "peak, MiB", "CPU s an update", "CPU s to engine", "checkpoint, MiB")
    for form, one in found.items():
        sizes = one["trained"] / 1e6, one["peak_bytes"] // MIB, one["update_cpu"], one["publish_cpu"]
        table.row(form, *sizes, one["checkpoint_bytes"] // MIB)
    report(rank=arguments.rank, rows=arguments.rows, tokens=arguments.tokens, **found)


def measured(arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    section = ModelSection(device="cpu", lora_rank=arguments.rank if arguments.form == "adapters" else 0)
    engine, codec = load_model(arguments.model), Codec.load(arguments.model)
    policy = Policy(load_model(arguments.model), codec, template_named("compact"), section)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    learner = SftLearner(policy, SftSection(adamw_learning_rate=1e-5, warmup_steps=0), steps=UPDATES)
    chance = random.Random(0)
    rows = [row([chance.randrange(1000) for _ in range(arguments.tokens)]) for _ in range(arguments.rows)]
    update, publish = 0.0, 0.0
    for number in range(UPDATES):
        with spent() as seconds:
            learner.update(rows, seed=0)
        update += seconds.cpu * (number > 0)
        with spent() as seconds:
            take_weights(engine, policy.publish())
        publish += seconds.cpu * (number > 0)
    peak = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "model", merged=False)
        learner.save(Path(folder))
        saved = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "trained": sum(parameter.numel() for parameter in policy.parameters if parameter.requires_grad),
        "peak_bytes": peak,
        "update_cpu": update / (UPDATES - 1),
        "publish_cpu": publish / (UPDATES - 1),
        "checkpoint_bytes": saved,
    }


def row(ids: list[int]) -> SftRow:
    return SftRow(token_ids=tuple(ids), loss_mask=(True,) * len(ids))


if __name__ == "__main__":
    main()
