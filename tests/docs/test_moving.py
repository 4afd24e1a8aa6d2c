"""The page for people who come from other trainers names settings that there are."""

from __future__ import annotations

import re
import tomllib

from rocstar.config.sections import Recipe
from rocstar.config.tree import all_keys
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "moving.md").read_text()
SECTIONS = {name for name in Recipe.model_fields if name not in ("stage", "engine")}


def cells(column: int) -> list[str]:
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return [row[column] for row in rows if len(row) > column]


def test_its_recipe_recomputes_layers_as_both_trainers_do_unless_told_otherwise() -> None:
    (recipe,) = [block.text for block in blocks(ROOT / "docs" / "moving.md") if block.text.startswith("[model]")]
    assert tomllib.loads(recipe)["model"]["gradient_checkpointing"] is True


def test_each_setting_that_is_named_as_a_counterpart_is_one() -> None:
    known = {".".join(keys) for keys in all_keys(Recipe)}
    named = {found for cell in (*cells(1), *cells(2)) for found in re.findall(r"`(\w+(?:\.\w+)+)", cell)}
    ours = {name for name in named if name.partition(".")[0] in SECTIONS and not name.startswith("sandbox.py")}
    assert len(ours) > 50
    assert sorted(ours - known) == []
