"""The recipes that come with rocstar, listed and copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.cli.main import run
from rocstar.cli.verbs.recipes import copied as copy
from rocstar.cli.verbs.recipes import listed
from rocstar.config.layers import recipes_folder
from rocstar.config.recipe import load_recipe
from tests.commands import json_of


def test_every_recipe_says_what_it_is_for() -> None:
    found = listed()
    assert {"quickstart.toml", "paper/stage1.toml", "ablations/roc.toml"} <= set(found)
    assert all(len(purpose) > 20 for purpose in found.values())


def test_a_copied_recipe_brings_those_it_extends_and_loads(tmp_path: Path) -> None:
    copied = copy(["ablations/no_tool.toml"], tmp_path)
    assert [str(place.relative_to(tmp_path)) for place in copied] == ["ablations/no_tool.toml", "quickstart.toml"]
    mine, theirs = (load_recipe(str(base / "ablations/no_tool.toml"), []) for base in (tmp_path, recipes_folder()))
    assert mine.stage == theirs.stage


def test_a_copied_recipe_brings_the_module_that_it_names(tmp_path: Path) -> None:
    copied = copy(["smollm2/gsm8k"], tmp_path)
    assert [place.name for place in copied] == [
        "base.toml",
        "gsm8k.toml",
        "number_variants.py",
        "published.py",
        "word_variants.py",
    ]
    assert load_recipe(str(tmp_path / "smollm2/gsm8k.toml"), []).run.modules == [str(tmp_path / "smollm2")]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quickstart.toml").write_text("mine")
    assert run(["recipes", "copy", "arithmetic.toml", "--to", str(tmp_path)]) == 2
    assert "quickstart.toml already exists" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["quickstart.toml"]
    assert run(["recipes", "copy", "nothing.toml"]) == 2
    assert "there is no recipe nothing; there are 1.5b-1gpu.toml, 7b-8gpu.toml" in capsys.readouterr().err
    assert json_of(capsys, "recipes", "list")["recipes"] == listed()
