"""How many threads torch computes with: what `auto` comes to, and what a run keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.places import TorchEngines
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import ModelSection, Recipe, RunSection
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.torch_engine import opened
from rocstar.errors import EngineUnavailable
from rocstar.parts import threads
from rocstar.parts.build import named_engines
from rocstar.parts.placement import place
from rocstar.parts.threads import begin_threads
from rocstar.record.folder import RunFolder
from rocstar.run.continued import continued, note_surroundings

LARGE, SMALL = ModelSection(hidden_size=512, num_heads=4, intermediate_size=1024), ModelSection()
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def a_machine_of_four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "cores", lambda: 4)
    yield
    torch.set_num_threads(before)


def recipe(count: Any = "auto", model: ModelSection = LARGE) -> Recipe:
    return Recipe(run=RunSection(threads=count), model=model)


def begun(asked: Recipe, before: int | None = None) -> int:
    """The threads of torch after a start, or after another one where `before` were taken."""
    begin_threads(asked, None, before)
    return torch.get_num_threads()


@pytest.mark.parametrize(("model", "cores", "count"), [(LARGE, 4, 4), (LARGE, 1, 1), (SMALL, 64, 1)])
def test_auto_is_one_for_a_small_model_and_else_the_cores(
    monkeypatch: pytest.MonkeyPatch, model: ModelSection, cores: int, count: int
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: cores)
    assert begun(recipe(model=model)) == count


@pytest.mark.parametrize(("learners", "count"), [(1, 4), (2, 2), (3, 1), (8, 1)])
def test_learners_share_the_cores(learners: int, count: int) -> None:
    asked = recipe()
    assert begun(asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"learners": learners})})) == count


def test_a_model_of_unknown_shape_computes_with_one() -> None:
    assert begun(recipe(model=ModelSection(path="nobody/knows"))) == 1


def test_a_run_that_goes_on_keeps_its_number_unless_it_is_given_another() -> None:
    assert begun(recipe(), before=2) == 2
    assert begun(recipe(3), before=2) == 3


def test_going_on_with_another_number_or_cpu_is_told_and_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(recipe(), tmp_path, ["rocstar"])
    assert note_surroundings(folder, {"threads": {"count": 4, "cpu": "a"}}, 0) == []
    made = continued(folder, None, ["run.threads=2"], flag="--resume")
    assert made.recipe.run.threads == 2 and not made.goes_on
    assert note_surroundings(folder, {"threads": {"count": 2, "cpu": "b"}}, 0) == ["threads.count", "threads.cpu"]
    assert folder.changes[0] == {"step": 0, "setting": "threads.count", "was": 4, "now": 2}
    assert folder.identity["threads"]["count"] == 2


def test_recipes_whose_figures_are_quoted_compute_with_one_thread() -> None:
    ours = [f"recipes/{name}" for name in ("first", "quickstart", "arithmetic", "rehearsal")]
    for name in (*ours, "examples/drift/drift", "examples/own_model/recipe"):
        assert load_recipe(f"{ROOT / name}.toml", []).run.threads == 1, name
    assert Recipe().run.threads == "auto"


async def test_engines_in_processes_share_the_threads_and_compute_with_theirs(tmp_path: Path) -> None:
    asked = Recipe(engine=[TorchEngines(name="a", kind="torch", count=2), TorchEngines(name="b", kind="torch")])
    settings = EngineSettings(folder=str(tmp_path), rows=1, positions=1, vocab_size=1, threads=8)
    table = place(asked, None, {"here": ()}, 0.0)
    engines = named_engines(asked.engine, settings, tmp_path, lambda settings: 1 / 0, table)  # type: ignore[arg-type,return-value]
    assert [engine._settings.threads for engine in engines.values() if isinstance(engine, ProcessEngine)] == [2, 2, 2]
    with pytest.raises(EngineUnavailable):
        await opened(EngineSettings(folder=str(tmp_path), rows=1, positions=1, vocab_size=1, threads=3))
    assert torch.get_num_threads() == 3
