"""How long a demonstration is in tokens of the quickstart's kind, with and without fixed phrases as single tokens.

    python benchmarks/tokens_per_demonstration.py            # about two minutes of CPU: it runs all the programs

The table of docs/dialogue.md: mean (longest) tokens, vocabulary 512, trained on the demonstrations measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rocstar.config.recipe import load_recipe
from rocstar.data.sft.render import from_demonstration, pieces
from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.templates import template_named
from rocstar.parts.build import AttemptParts
from rocstar.run.material import task_of
from rocstar.run.tasks import require_demonstrations
from rocstar.sandbox.client import SandboxClient

QUICKSTART = str(Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml")
FOUR = ["gcd", "powmod", "digsum", "fib"]
EIGHT = [*FOUR, "mul", "lin", "count", "primes"]
CASES = {
    "gcd powmod digsum fib, majority_wrong": (FOUR, "majority_wrong"),
    "gcd powmod digsum fib, majority_right": (FOUR, "majority_right"),
    "all eight one-call families, majority_wrong": (EIGHT, "majority_wrong"),
    "all eight one-call families, majority_right": (EIGHT, "majority_right"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="demonstrations per case")
    arguments = parser.parse_args()
    with SandboxClient.start(slots=2, preload=()) as sandbox:
        cells = {name: measured(case, arguments.count, sandbox) for name, case in CASES.items()}
    print(f"{'families, mix':46} {'with fixed phrases':>20} {'merges alone':>16}")
    for name, cell in cells.items():
        print(f"{name:46} {cell['fixed']['mean']:13.1f} ({cell['fixed']['longest']:3d})"
              f" {cell['merges']['mean']:10.1f} ({cell['merges']['longest']:3d})")  # fmt: skip
    print(json.dumps(cells))


def measured(case: tuple[list[str], str], count: int, sandbox: SandboxClient) -> dict[str, Any]:
    families, mix = case
    recipe = load_recipe(QUICKSTART, [f"data.families={json.dumps(families)}", f"data.demo_mix={mix}"])
    task, template = task_of(recipe, recipe), template_named(recipe.rollout.template)
    parts = AttemptParts(recipe)
    tools = parts.tools(sandbox)
    demonstrations = require_demonstrations(task, "measured").demonstrations(count)
    feedback = parts.feedback
    texts = [
        "".join(piece.text for piece in pieces(from_demonstration(one, feedback), template, tools.specs))
        for one in demonstrations
    ]
    phrases = (*task.atoms, *fixed_phrases(template, recipe.rollout.tool_name))
    return {"fixed": lengths(texts, template.markers, phrases), "merges": lengths(texts, template.markers, ())}


def lengths(texts: list[str], markers: Any, atoms: Any) -> dict[str, Any]:
    codec = train_bpe(texts, vocab_size=512, markers=markers, word_merges=False, atoms=atoms)
    counts = [len(codec.encode(text)) for text in texts]
    return {"mean": sum(counts) / len(counts), "longest": max(counts)}


if __name__ == "__main__":
    main()
