from pathlib import Path

import pytest

from rocstar.config.layers import load
from rocstar.data.pool.config import PoolConfig
from rocstar.errors import ConfigError

TEXT = """data = "here"

[limits]
max_answer_digits = 9

[[source]]
name = "s"
path = "rows.jsonl"
question = "ask"
"""
RECIPE = Path(__file__).parents[3] / "recipes" / "data" / "math_pool.toml"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, PoolConfig, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(TEXT)
    return path


def test_overrides_change_keys_and_one_text_is_a_list_of_one(recipe: Path) -> None:
    config = load(recipe, PoolConfig, ["data=/there", "limits.max_answer_digits=3", "rules.skip=picture"])
    assert (config.data, config.limits.max_answer_digits) == ("/there", 3)
    assert (config.rules.skip, config.source[0].question) == (["picture"], ["ask"])


def test_an_entry_is_changed_by_its_name(recipe: Path) -> None:
    (source,) = load(recipe, PoolConfig, ["source.s.path=other.jsonl", 'source.s.question=["a", "b"]']).source
    assert (source.path, source.question) == ("other.jsonl", ["a", "b"])
    assert "the recipe has no source 't'; did you mean" not in refusal(recipe, "source.t.path=x")
    assert "no source 't'; there are s" in refusal(recipe, "source.t.path=x")
    assert "override 'source.s.pth=x': unknown key source.s.pth; did you mean path?" in refusal(
        recipe, "source.s.pth=x"
    )


def test_the_recipe_of_the_repository_names_every_benchmark_of_the_project() -> None:
    expected = "aime24 amc22_23 amc23 math500 math_test olympiadbench olymmath_easy olymmath_hard hmmt_feb_2024"
    names = {benchmark.name for benchmark in load(RECIPE, PoolConfig).benchmark}
    assert names >= {*expected.split(), "cmimc_2024", "gsm8k_test"}
