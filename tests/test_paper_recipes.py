"""The recipes of the paper and of its release say what their sources say, and where each value comes from."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.layers import load
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import BY_EPOCHS, BenchmarkSection, Recipe
from rocstar.data.pool.config import PoolConfig
from rocstar.data.sft.recipe import MixRecipe
from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.kinds import KINDS
from rocstar.run.benchmarks import read_benchmarks
from rocstar.run.rows import with_steps

RECIPES = Path(__file__).parent.parent / "recipes"
FILES = [*sorted(RECIPES.glob("paper/*.toml")), RECIPES / "release.toml", RECIPES / "7b-8gpu.toml"]

# arXiv 2508.20722, section: what it says.
PAPER = {
    "model.path": "Qwen/Qwen3-14B-Base",  # §5.1
    "rollout.problems_per_step": 512,  # §5.1
    "rollout.attempts_per_problem": 32,  # §5.1: 2G
    "resample.keep": 16,  # §5.1: G
    "resample.method": "roc",  # §2.2.3
    "rollout.temperature": 1.0,  # §5.1
    "rollout.tool_name": "execute_python_code_with_standard_io",  # Fig. 3
    "rollout.truncated": "wrong",  # §4.3.1
    "learning.learning_rate": 1e-6,  # §5.1
    "learning.warmup_steps": 20,  # §5.1
    "learning.clip_low": 0.2,  # §2.2.1
    "learning.clip_high": 0.28,  # §2.2.1
    "learning.kl_coefficient": 0.0,  # §2.2.1
    "learning.entropy_coefficient": 0.0,  # §2.2.1
    "evaluate.attempts": 16,  # §5.1
    "evaluate.temperature": 0.6,  # §5.1
    "stage.sft.sft.batch_rows": 128,  # §5.1
    "stage.sft.sft.adamw_learning_rate": 5e-6,  # §5.1
    "stage.sft.sft.decay": "cosine",  # §5.1
    "stage.stage1.rollout.max_response_tokens": 8192,  # §4.3
    "stage.stage2.rollout.max_response_tokens": 12288,  # §4.3
    "stage.stage3.rollout.max_response_tokens": 12288,  # §4.3
    "stage.stage1.rollout.max_turns": 10,  # §5.1
    "stage.stage2.rollout.max_turns": 10,  # §5.1
    "stage.stage3.rollout.max_turns": 15,  # §5.1
    "stage.stage1.data.drop_solved_attempts": None,  # §4.3: filtering in stage 3 only
    "stage.stage2.data.drop_solved_attempts": None,
    "stage.stage3.data.drop_solved_attempts": 8,  # §4.3
    "stage.stage1.learning.reset_optimizer": False,
    "stage.stage2.learning.reset_optimizer": False,
    "stage.stage3.learning.reset_optimizer": True,  # §4.3
}
RELEASE = {
    "rollout.problems_per_step": 128,
    "rollout.attempts_per_problem": 32,
    "rollout.max_response_tokens": 8192,
    "rollout.max_turns": 5,
    "rollout.max_parallel_calls": 1,
    "rollout.tool_name": "python_code_with_standard_io",
    "rollout.feedback_max_chars": 256,
    "rollout.feedback_truncate": "middle",
    "sandbox.timeout_seconds": 4.0,
    "sandbox.output_bytes": 1000,
    "resample.method": "roc_release",
    "resample.keep": 16,
    "resample.min_positive": 2,
    "resample.min_negative": 2,
    "learning.learning_rate": 1e-6,
    "learning.warmup_steps": 20,
    "learning.updates_per_step": 1,
    "evaluate.verifier": "boxed",
    "evaluate.temperature": 0.0,
    "evaluate.every_steps": 5,
    "stage.stage1.steps": 200,
}


def value(recipe: Recipe, key: str) -> Any:
    names = key.split(".")
    found: Any = recipe
    if names[0] == "stage":
        found = next(stage for stage in recipe.stage if stage.name == names[1])
        names = names[2:]
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("file", "known"), [("paper/stage3.toml", PAPER), ("release.toml", RELEASE)])
def test_a_recipe_has_the_values_of_its_source(file: str, known: Mapping[str, Any]) -> None:
    recipe = load_recipe(RECIPES / file)
    assert {key: value(recipe, key) for key in known} == known


def test_steps_add_up_to_those_of_the_paper() -> None:
    """§4.3: 300, 385 and 510 RL steps; §5.1: three epochs, whatever rows there are, and a warm-up over 4% of them."""
    recipe = load_recipe(RECIPES / "paper/stage3.toml")
    assert (recipe.stage[0].model_dump()["epochs"], recipe.stage[0].steps) == (3, BY_EPOCHS)
    stages = [stage.steps for stage in recipe.stage[1:]]
    assert [sum(stages[: n + 1]) for n in range(3)] == [300, 385, 510]
    (sft, *_), _ = with_steps(recipe.stage, {"sft": 222_000})
    assert sft.steps == ceil(3 * 222_000 / 128)
    assert value(recipe, "stage.sft.sft.warmup_steps") == round(0.04 * sft.steps)


def test_the_mix_of_the_paper_has_its_rows_and_rewrites_what_the_paper_rewrites() -> None:
    """§4.1: 165K, 30K and 27K rows; responses of Tulu 3, prompts of Nemotron."""
    mix = load(RECIPES / "data/paper_sft_mix.toml", MixRecipe)
    assert mix.mix.rows == 222_000 == 1000 * sum(source.weight or 0 for source in mix.source)
    assert {source.name: source.rewrite for source in mix.source if source.rewrite} == {
        "tulu3": ["response"],
        "nemotron": ["prompt"],
    }


def test_the_32b_variant_has_no_sft_and_700_steps_in_two_stages() -> None:
    recipe = load_recipe(RECIPES / "paper/qwen2.5-32b.toml")
    assert recipe.model.path == "Qwen/Qwen2.5-32B-Instruct"
    assert [stage.kind for stage in recipe.stage] == ["rl", "rl"]
    assert sum(stage.steps for stage in recipe.stage) == 700


def test_the_reproduction_is_the_release_with_another_model() -> None:
    release, other = (load_recipe(RECIPES / name).model_dump() for name in ("release.toml", "7b-8gpu.toml"))
    assert other["model"]["path"] == "Qwen/Qwen2.5-7B-Instruct"
    assert other["stage"][0]["steps"] == 150
    differ = {name for name in release if release[name] != other[name]}
    assert differ == {"run", "model", "stage", "cluster", "engine"}  # the larger model needs more learners


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_says_where_it_comes_from(path: Path) -> None:
    plain = re.compile(r"^(name|kind|extends|source) = |^\[|^#|^$")
    lines = path.read_text().splitlines()
    sources = re.compile(r"# (§\d|Fig\. \d|release|ours|RLinf)")
    assert [line for line in lines if not plain.match(line) and not sources.search(line)] == []


def test_the_stages_that_end_by_rule_are_the_same_otherwise() -> None:
    by_rule, whole = (load_recipe(RECIPES / f"paper/{name}.toml") for name in ("by_rule", "stage3"))
    for ours, papers in zip(by_rule.stage, whole.stage, strict=True):
        assert ours.model_dump(exclude={"end", "steps"}) == papers.model_dump(exclude={"end", "steps"})


def test_the_pool_of_the_paper_is_kept_clear_of_all_its_mathematics() -> None:
    """§5.1; at f664d51 of two of four. Each is one that rocstar asks, from the place that rocstar reads."""
    config = load(RECIPES / "data/paper_pool.toml", PoolConfig)
    files = {benchmark.name: benchmark.file for benchmark in find_benchmarks("aime24,aime25,hmmt_feb_2025,math500")}
    assert {section.name for section in config.benchmark} == set(files)
    for section in config.benchmark:
        file = files[section.name]
        assert section.path in (*file.files, file.hub) and section.question == [file.question]
    assert config.agreement.sources == ["openmathreasoning"]  # §4.2


ASKED = ["aime24", "aime25", "hmmt_feb_2025", "math500", "gpqa_diamond"]


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3", "by_rule", "qwen2.5-32b"])
def test_the_paper_is_judged_by_its_five_benchmarks_under_its_own_protocol(name: str, tmp_path: Path) -> None:
    """§5.1; at f664d51 by AIME 2024 alone, at most 12,288 tokens and 15 turns."""
    recipe = load_recipe(RECIPES / f"paper/{name}.toml")
    assert [section.name for section in recipe.evaluate.benchmark] == ASKED
    assert recipe.evaluate.problems == 0  # no second figure at a stage's limits
    here = {"folder": str(tmp_path), "accept_rows": True}
    there = [section.model_copy(update=here) for section in sections_with_rows(recipe, tmp_path)]
    evaluate = recipe.evaluate.model_copy(update={"benchmark": there})
    for benchmark in read_benchmarks(recipe.model_copy(update={"evaluate": evaluate})):
        rollout, protocol = benchmark.recipe.rollout, benchmark.protocol
        assert (rollout.max_response_tokens, rollout.max_turns) == (30 * 1024, 30)
        assert (protocol.attempts, protocol.temperature) == (16, 0.6)


def sections_with_rows(recipe: Recipe, folder: Path) -> list[BenchmarkSection]:
    """Those of the recipe, each of which has a place to get its rows from; here they get one row each in `folder`."""
    for section in recipe.evaluate.benchmark:
        (benchmark,) = find_benchmarks(section.name)
        assert section.folder or benchmark.file.hub
        path = folder / benchmark.file.files[0]
        path.parent.mkdir(exist_ok=True)
        row = dict.fromkeys(KINDS[benchmark.file.kind].columns(benchmark.file), "1")
        text = ",".join(row) + "\n" + ",".join(row.values()) if path.suffix == ".csv" else json.dumps(row)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return list(recipe.evaluate.benchmark)
