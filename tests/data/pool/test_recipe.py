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


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest(recipe: Path) -> None:
    recipe.write_text(TEXT.replace("path =", "pth ="))
    assert "a.toml line 8: unknown key source.s.pth; did you mean path?" in refusal(recipe)
    recipe.write_text(TEXT.replace("max_answer_digits", "max_digits"))
    assert "line 4: unknown key limits.max_digits; did you mean limits.max_answer_digits?" in refusal(recipe)


def test_a_wrong_override_is_named(recipe: Path) -> None:
    assert refusal(recipe, "dta=x").startswith("override 'dta=x': unknown key dta; did you mean data?")
    assert "override 'limits.max_bad_rows=-1'" in refusal(recipe, "limits.max_bad_rows=-1")
    assert "not of the form" in refusal(recipe, "data")
    assert "a source is addressed as source.NAME.key=value" in refusal(recipe, "source.path=x")


def test_an_entry_is_changed_by_its_name(recipe: Path) -> None:
    (source,) = load(recipe, PoolConfig, ["source.s.path=other.jsonl", 'source.s.question=["a", "b"]']).source
    assert (source.path, source.question) == ("other.jsonl", ["a", "b"])
    assert "the recipe has no source 't'; did you mean" not in refusal(recipe, "source.t.path=x")
    assert "no source 't'; there are s" in refusal(recipe, "source.t.path=x")
    assert "override 'source.s.pth=x': unknown key source.s.pth; did you mean path?" in refusal(
        recipe, "source.s.pth=x"
    )


def test_a_recipe_may_extend_another(recipe: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.toml"
    child.write_text('extends = "a.toml"\n[limits]\nmax_bad_rows = 2\n[[source]]\nname = "s"\nanswer = "gold"\n')
    config = load(child, PoolConfig)
    assert (config.data, config.limits.max_answer_digits, config.limits.max_bad_rows) == ("here", 9, 2)
    assert (config.source[0].path, config.source[0].answer) == ("rows.jsonl", "gold")


def test_the_recipe_of_the_repository_names_every_benchmark_of_the_project() -> None:
    names = {benchmark.name for benchmark in load(RECIPE, PoolConfig).benchmark}
    assert names >= {
        "aime24",
        "amc22_23",
        "amc23",
        "math500",
        "math_test",
        "olympiadbench",
        "olymmath_easy",
        "olymmath_hard",
        "hmmt_feb_2024",
        "cmimc_2024",
        "gsm8k_test",
    }
