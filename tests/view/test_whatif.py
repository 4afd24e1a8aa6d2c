"""What-if on the page: the recorded settings give the recorded choice, on every group; others give what training's own
resampler would have chosen of the attempts themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rocstar.config.sections import LearningSection, ResampleSection
from rocstar.learning.advantages import kept_advantages, rloo
from rocstar.learning.resample import resampler_of, seed_of_choice
from rocstar.record.rollouts import write_attempts
from rocstar.types import Resampled
from tests.view.recorded import SEED, add_step, chosen, create, decode, page, problem, records, settled

METHODS = [("roc", 0.7, "roc_release"), ("roc_release", 0.0, "uniform"), ("uniform", 0.0, "all"), ("all", 0.0, "roc")]
"""(method of the run, its weight of repetition, another method)."""
Run = tuple[TestClient, dict[int, list[Resampled]], ResampleSection]
"""The page over it, its groups by step, and other settings."""


def fates(one: Resampled) -> list[tuple[bool, str]]:
    return [(choice.kept, str(choice.reason)) for choice in one.choices]


@pytest.fixture(scope="module", params=METHODS, ids=lambda param: param[0])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    (method, repetition, other), place = request.param, tmp_path_factory.mktemp("run")
    made = create(place / "runs", method=method, keep=8, repetition=repetition)
    steps = {step: add_step(made, step, problems=1) for step in (1, 2)}
    tried: dict[str, Any] = {
        "keep": 5,
        "min_positive": 1,
        "min_negative": 1,
        "drop_truncated": True,
        "repetition_weight": repetition,
    }
    with page(made.path.parent, place / "cache") as opened:
        settled(opened, "/api/run/made/attempts")
        yield opened, steps, ResampleSection(method=other, **tried)


def test_recorded_settings_give_the_choice_of_training(run: Run) -> None:
    client, steps, _ = run
    assert any(choice.kept for groups in steps.values() for one in groups for choice in one.choices)
    for step, (one,) in steps.items():
        found = client.get("/api/run/made/what-if", params={"part": "rollouts", "step": step, "grp": 1}).json()
        for rows in (found["recomputed"], found["siblings"]):
            assert [(s["kept"], s["reason"]) for s in rows] == fates(one)
        totals = [choice.penalty.total for choice in one.choices if choice.weight]
        assert [s["penalty"]["total"] for s in found["siblings"] if s["weight"]] == totals


def test_other_settings_give_what_the_resampler_makes_of_the_attempts_themselves(run: Run) -> None:
    client, steps, other = run
    names = ("method", "keep", "min_positive", "min_negative", "drop_truncated")
    asked = {name: str(getattr(other, name)).lower() for name in names}
    for step, (one,) in steps.items():
        place: dict[str, Any] = {"part": "rollouts", "step": step, "grp": 1}
        found = client.get("/api/run/made/what-if", params={**place, **asked}).json()["siblings"]
        seed = seed_of_choice(SEED, step, one.group.problem.id)
        assert [(s["kept"], s["reason"]) for s in found] == fates(resampler_of(other)(one.group, random.Random(seed)))
        if other.method == "roc_release":
            assert {s["chance"] for s in found} <= {0.0, 1.0}
        if other.method == "roc":
            assert sum(s["chance"] for s in found) == pytest.approx(sum(s["kept"] for s in found))


def test_a_weight_of_nothing_makes_all_successes_alike(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    groups = add_step(run, 1, problems=3)
    asked = {"part": "rollouts", "step": 1, "weight_errors": "0", "format_weight": "0"}
    with page(run.path.parent, tmp_path / "cache") as client:
        settled(client, "/api/run/made/attempts")
        answers = [
            client.get("/api/run/made/what-if", params={**asked, "grp": n}).json() for n in range(1, len(groups) + 1)
        ]
    drawn = [[s["chance"] for s in answer["siblings"] if s["reason"].endswith("quality")] for answer in answers]
    assert any(drawn)
    assert all(max(chances) - min(chances) < 0.12 for chances in drawn if chances)  # 1,000 draws


def test_a_problem_that_stands_in_a_step_twice_is_two_groups(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    add_step(run, 1)
    twice = chosen(1, [problem(0), problem(0)], 4, ResampleSection(keep=2))
    write_attempts(run.rollout_file(1), 1, records(twice), decode)
    with page(run.path.parent, tmp_path / "cache") as client:
        found = settled(client, "/api/run/made/groups")
        assert [row["attempts"] for row in found["rows"]] == [4, 4]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The page over a run with one group."""
    place = tmp_path_factory.mktemp("one")
    run = create(place / "runs")
    add_step(run, 1, problems=1)
    with page(run.path.parent, place / "cache") as opened:
        settled(opened, "/api/run/made/attempts")
        yield opened


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"keep": "1"}, "keep"),
        ({"keep": "x"}, "keep"),
        ({"method": "best"}, "method"),
        ({"method": "os:system"}, "which this page does not load"),
        ({"format_weight": "-1"}, "format_weight"),
        ({"weight_errors": "-1"}, "weight_errors"),
    ],
)
def test_settings_that_training_would_refuse_are_refused(client: TestClient, asked: dict[str, str], word: str) -> None:
    found = client.get("/api/run/made/what-if", params={"step": 1, "grp": 1, "part": "rollouts", **asked})
    assert found.status_code == 400
    assert word in found.json()["error"]


def test_advantages_are_shown_that_follow_from_rewards_alone(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    (one,) = add_step(run, 1, problems=1)
    settings = json.loads(run.resolved.read_text())

    def asked(advantage: str) -> Any:
        settings["stage"][0]["learning"]["advantage"] = advantage
        run.resolved.write_text(json.dumps(settings))
        with page(run.path.parent, tmp_path / "cache") as client:
            settled(client, "/api/run/made/attempts")
            return client.get("/api/run/made/what-if", params={"part": "rollouts", "step": 1, "grp": 1})

    own = kept_advantages(one, lambda rewards: rloo(rewards, LearningSection()))
    assert own and [row["advantage"] for row in asked("rloo").json()["siblings"]] == pytest.approx(
        [own.get(place) for place in range(len(one.choices))]
    )
    refused = asked("mine:own")
    assert refused.status_code == 400 and "mine:own, which this page does not" in refused.json()["error"]
