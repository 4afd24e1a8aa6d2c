"""examples/word_problems as a user starts it: a shortened run on real rows, named by the recipe and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.published import WORD_PROBLEMS, needs_word_problems
from tests.tiny_run import Command

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "word_problems" / "word_problems.toml"
SHORT = (
    *("model.hidden_size=32", "model.num_layers=1", "model.num_heads=2", "model.vocab_size=700"),
    *("data.options.pool=40", "data.options.redraws=2", "data.options.wordings=2", "sft.batch_rows=8"),
    *("rollout.problems_per_step=2", "rollout.attempts_per_problem=4", "resample.keep=4", "evaluate.problems=4"),
    *("stage.sft.steps=3", "stage.rl.steps=1"),
)


@needs_word_problems
def test_a_shortened_run_of_the_recipe(tmp_path: Path) -> None:
    """From a folder that is not the recipe's: its package is found beside it, when resumed as well."""
    train, test = (WORD_PROBLEMS / f"cv_mawps_fold0_{part}.csv.gz" for part in ("train", "dev"))
    trained(tmp_path, str(RECIPE), f"data.train_files={train}", f"data.test_files={test}", *SHORT)
    summary = tmp_path / "runs" / "word_problems" / "summary.json"
    accuracy = json.loads(summary.read_text())["accuracy_after"]
    assert accuracy["n"] == 4
    summary.unlink()
    trained(tmp_path, "--resume", "word_problems")
    assert json.loads(summary.read_text())["accuracy_after"] == accuracy


def trained(folder: Path, *arguments: str) -> None:
    ended = Command.start(folder, "train", *arguments).wait()
    assert ended.code == 0, ended.told
