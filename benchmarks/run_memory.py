"""What `--dry-run` says a run takes of main memory, beside what its process then takes.

    python benchmarks/run_memory.py                                # three random shapes, SFT and RL: about five minutes
    python benchmarks/run_memory.py --model FOLDER --only rl       # a Hugging Face folder, one of the two
    python benchmarks/run_memory.py --tokens 512 --attempts 128    # longer attempts, more of them

Every run is a step or two. A coin decides which attempts are right, so that RL learns whatever the model writes. Prints
a table and last one JSON line; ends with 1 where a plan is off by more than a quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.25
SHAPES = {
    "0.3M": {"hidden_size": 96, "num_layers": 3, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 256},
    "28M": {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "intermediate_size": 1536},
    "43M, wide": {"hidden_size": 1024, "num_layers": 3, "num_heads": 16, "num_kv_heads": 4, "intermediate_size": 3584},
}
REWARD = """\
def coin(prompts, completions, **columns):
    return [float(sum(text.encode()) % 2) for text in completions]
"""
STAGES = {
    "sft": ['[[stage]]\nname = "sft"\nkind = "sft"\nsteps = 2\n'],
    "rl": [
        '[[stage]]\nname = "sft"\nkind = "sft"\nsteps = 1\n',
        '[[stage]]\nname = "rl"\nkind = "rl"\nsteps = 2\n',
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder, in place of the random shapes")
    parser.add_argument("--only", choices=list(STAGES))
    parser.add_argument("--rows", type=int, default=32, help="demonstrations of a step")
    parser.add_argument("--tokens", type=int, default=128, help="cap of an attempt")
    parser.add_argument("--attempts", type=int, default=32, help="of a step, at two problems")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings")
    options = parser.parse_args()
    print(f"{'model':12}{'run':6}{'planned, GB':>12}{'measured, GB':>14}{'ratio':>7}", flush=True)
    found = []
    for name, shape in {str(options.model): None}.items() if options.model else SHAPES.items():
        for kind in [options.only] if options.only else STAGES:
            planned, measured = compared(kind, shape, options)
            row = {"model": name, "run": kind, "planned": planned, "measured": measured, "ratio": planned / measured}
            print(f"{name[-11:]:12}{kind:6}{planned / 1e9:12.2f}{measured / 1e9:14.2f}{row['ratio']:7.2f}", flush=True)
            found.append(row)
    print(json.dumps({"rows": options.rows, "tokens": options.tokens, "attempts": options.attempts, "runs": found}))
    raise SystemExit(0 if all(abs(row["ratio"] - 1) <= GOAL for row in found) else 1)


def compared(kind: str, shape: dict[str, int] | None, options: argparse.Namespace) -> tuple[float, float]:
    """Bytes of the run's process at its peak: planned, measured."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "coin.py").write_text(REWARD)
        stages = STAGES[kind] if shape or kind == "sft" else STAGES[kind][1:]  # random weights need a tokenizer first
        (Path(place) / "recipe.toml").write_text("\n".join([base(shape, options), *stages]))
        command = [
            sys.executable,
            "-c",
            "from rocstar.cli.main import main; main()",
            "train",
            "recipe.toml",
            *options.set,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        said = subprocess.run(
            [*command, "--dry-run", "--json"], cwd=place, env=environment, capture_output=True, text=True
        )
        if said.returncode:
            raise SystemExit(said.stderr)
        planned = json.loads(said.stdout)["memory"]["run"]
        with (Path(place) / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit((Path(place) / "log").read_text())
        return planned, used.ru_maxrss * 1024


def base(shape: dict[str, int] | None, options: argparse.Namespace) -> str:
    model = {**shape, "max_positions": 2048, "vocab_size": 512} if shape else {"path": str(options.model.resolve())}
    sections = {
        "run": {"name": "memory"},
        "model": {"device": "cpu", **model},
        "sft": {"batch_rows": options.rows, "warmup_steps": 0},
        "rollout": {
            "problems_per_step": 2,
            "attempts_per_problem": options.attempts // 2,
            "max_response_tokens": options.tokens,
            "max_turns": 2,
            "truncated": "graded",
            "engine_rows": options.attempts,
            "template": "compact" if shape else "paper",
        },
        "sandbox": {"slots": 1, "preload": []},
        "resample": {"keep": 8},
        "learning": {"warmup_steps": 0},
        "evaluate": {"problems": 0, "greedy": False, "verifier": "coin:coin"},
    }
    lines = []
    for name, keys in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
