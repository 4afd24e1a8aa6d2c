"""How many threads torch computes with: what `auto` comes to, what a run keeps of it, and what it says later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.places import TorchEngines
from rocstar.config.recipe import load_recipe, resolved_from_json
from rocstar.config.sections import ModelSection, Recipe, RunSection
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.torch_engine import opened
from rocstar.errors import EngineUnavailable
from rocstar.learning import models as of_torch
from rocstar.parts import threads
from rocstar.parts.build import named_engines
from rocstar.parts.placement import place
from rocstar.parts.threads import begin_threads, begin_threads_of_run, paying
from rocstar.record.folder import RunFolder
from rocstar.run.continued import continued, record

LARGE, SMALL = ModelSection(hidden_size=512, num_heads=4, intermediate_size=1024), ModelSection()
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def a_machine_of_four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where twice the threads take two thirds of the time."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "seconds_of_product", lambda hidden, wide, tokens, count: 0.01 * count**-0.585)
    yield
    torch.set_num_threads(before)


def recipe(count: Any = "auto", model: ModelSection = LARGE) -> Recipe:
    return Recipe(run=RunSection(threads=count), model=model)


def begun(folder: RunFolder) -> list[str]:
    """What a person reads where the run starts or goes on."""
    told: list[str] = []
    begin_threads_of_run(resolved_from_json(folder.resolved), None, folder, told.append)
    return told


@pytest.mark.parametrize(
    ("milliseconds", "count"),
    [
        ({1: 10, 2: 5.1, 4: 2.7, 6: 2.0}, 6),
        ({1: 10, 2: 5.1, 4: 4.9}, 2),
        ({1: 10, 2: 9.9}, 1),
        ({1: 10, 2: 11}, 1),
    ],
)
def test_threads_are_doubled_while_they_pay(milliseconds: dict[int, float], count: int) -> None:
    found = paying(6, (512, 1024), lambda tried: milliseconds[tried] / 1000)  # a KeyError for one more
    assert (found.count, found.cores, found.milliseconds) == (count, 6, milliseconds)
    assert found.summary().startswith(f"computing with {count} thread{'s' * (count > 1)} on 6 cores: a product")


@pytest.mark.parametrize(("cores", "widths"), [(1, (512, 1024)), (64, (128, 384)), (64, (0, 0))])
def test_a_small_model_and_a_lone_core_are_not_timed(cores: int, widths: tuple[int, int]) -> None:
    assert paying(cores, widths, lambda count: 1 / 0).count == 1


@pytest.mark.parametrize(("learners", "count"), [(1, 4), (2, 2), (4, 1)])
def test_auto_is_what_pays_for_the_model_and_learners_share_the_cores(learners: int, count: int) -> None:
    asked = recipe()
    begin_threads(asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"learners": learners})}), None)
    assert torch.get_num_threads() == count


def test_a_product_is_timed_with_the_threads_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0 < of_torch.seconds_of_product(32, 64, 8, 2) < 10 and torch.get_num_threads() == 2


def test_a_number_that_a_recipe_gives_is_taken_and_nothing_is_said(tmp_path: Path) -> None:
    folder = RunFolder.create(recipe(3), tmp_path, ["rocstar"])
    assert begun(folder) == [] and torch.get_num_threads() == 3 == folder.identity["threads"]["count"]


def test_a_run_keeps_what_auto_came_to_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(recipe(), tmp_path, ["rocstar"])
    (told,) = begun(folder)
    assert told.startswith("computing with 4 threads on 4 cores") and torch.get_num_threads() == 4
    assert folder.identity["threads"]["milliseconds"].keys() == {"1", "2", "4"}
    monkeypatch.setattr(threads, "seconds_of_product", lambda *sizes: 1 / 0)
    assert begun(folder) == [] and torch.get_num_threads() == 4
    monkeypatch.setattr(threads, "cores", lambda: 2)
    (told,) = begun(folder)
    assert torch.get_num_threads() == 4 and "computed on 4 cores" in told and "not those of a run that stayed" in told


def test_going_on_with_another_number_is_told_and_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(recipe(), tmp_path, ["rocstar"])
    begun(folder)
    record(folder, continued(folder, None, ["run.threads=2"], flag="--resume"))
    assert folder.changes == [{"step": 0, "setting": "run.threads", "was": 4, "now": 2}]
    (told,) = begun(folder)
    assert torch.get_num_threads() == 2 and "run.threads = 2, before with 4: sums are rounded in another order" in told
    assert folder.identity["threads"]["count"] == 2 and begun(folder) == []
    assert not continued(folder, None, ["run.threads=2"], flag="--resume").goes_on


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
