"""Benchmarks that a recipe names are read, and refused, before a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.sections import BenchmarkSection, EvaluateSection, Recipe
from rocstar.errors import ConfigError, DataError
from rocstar.run.benchmarks import read_benchmarks

FILE = (
    'title = "Sums"\nsource = "made here"\nkind = "math"\nfiles = ["sums.jsonl"]\n'
    "[protocol]\nattempts = 3\ntemperature = 0.5\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums.toml").write_text(FILE + 'settings = ["rollout.max_response_tokens=48"]\n')
    rows = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def read(place: Path, /, **changes: Any) -> Any:
    section = BenchmarkSection(**{"name": str(place / "sums.toml"), "folder": str(place), **changes})
    return read_benchmarks(Recipe(evaluate=EvaluateSection(benchmark=[section])))


def test_its_file_says_how_it_is_asked_and_the_recipe_may_differ(folder: Path) -> None:
    (own,) = read(folder)
    assert (own.name, own.protocol.attempts, own.recipe.rollout.max_response_tokens) == ("sums", 3, 48)
    (changed,) = read(folder, attempts=1, temperature=0.6, limit=2, settings=["rollout.max_response_tokens=9"])
    assert (changed.protocol.attempts, changed.protocol.temperature) == (1, 0.6)
    assert (len(changed.source.problems), changed.recipe.rollout.max_response_tokens) == (2, 9)


def test_what_could_not_be_asked_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not read here; benchmark .*, between steps of a run, reads"):
        read(folder, settings=["rollout.template=model"])
    with pytest.raises(ConfigError, match="is not a folder"):
        read(folder, folder=str(folder / "absent"))
    with pytest.raises(ConfigError, match="benchmark sums: 3 attempts at temperature 0 are one attempt 3 times"):
        read(folder, temperature=0.0)
    (folder / "sums.jsonl").write_text('{"question": "1+1?"}\n')
    with pytest.raises(DataError, match='no field "answer"'):
        read(folder)


def test_a_name_that_an_evaluation_of_the_run_has_is_refused(folder: Path) -> None:
    (folder / "during.toml").write_text(FILE)
    with pytest.raises(ConfigError, match="names 'during' twice"):
        read(folder, name=str(folder / "during.toml"))
