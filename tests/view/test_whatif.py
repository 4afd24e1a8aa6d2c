"""What-if on the page: the recorded settings give the recorded choice, on every group; others give what training's own
resampler would have chosen of the attempts themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rocstar.config.sections import LearningSection, ResampleSection
from rocstar.learning.advantages import kept_advantages, rloo
from rocstar.learning.resample import resampler_of, seed_of_choice
from rocstar.record.rollouts import write_attempts
from rocstar.types import Resampled
from tests.view.recorded import SEED, add_step, chosen, create, decode, page, problem, records, settled

METHODS = [("roc", 0.0), ("roc_release", 0.0), ("uniform", 0.0), ("all", 0.0), ("roc", 0.7)]


def fates(groups: list[Resampled]) -> list[list[tuple[bool, str]]]:
    return [[(choice.kept, str(choice.reason)) for choice in one.choices] for one in groups]


@pytest.mark.parametrize(("method", "repetition"), METHODS)
def test_recorded_settings_give_the_choice_of_training_on_every_group(
    tmp_path: Path, method: str, repetition: float
) -> None:
    run = create(tmp_path / "runs", method=method, keep=8, repetition=repetition)
    steps = {step: add_step(run, step, problems=1) for step in (1, 2)}
    assert any(choice.kept for groups in steps.values() for one in groups for choice in one.choices)
    with page(run.path.parent, tmp_path / "cache") as client:
        settled(client, "/api/run/made/attempts")
        for step, groups in steps.items():
            for number, one in enumerate(groups, 1):
                asked = {"part": "rollouts", "step": step, "grp": number}
                found = client.get("/api/run/made/what-if", params=asked).json()
                recorded = fates([one])[0]
                assert [(s["kept"], s["reason"]) for s in found["recomputed"]] == recorded
                assert [(s["kept"], s["reason"]) for s in found["siblings"]] == recorded
                totals = [choice.penalty.total for choice in one.choices if choice.weight]
                assert [s["penalty"]["total"] for s in found["siblings"] if s["weight"]] == totals


@pytest.mark.parametrize("method", ["roc", "roc_release", "uniform", "all"])
def test_other_settings_give_what_the_resampler_makes_of_the_attempts_themselves(tmp_path: Path, method: str) -> None:
    run = create(tmp_path / "runs")
    groups = add_step(run, 1, problems=2)
    other = ResampleSection(method=method, keep=5, min_positive=1, min_negative=1, drop_truncated=True)  # type: ignore[arg-type]
    asked = {"method": method, "keep": "5", "min_positive": "1", "min_negative": "1", "drop_truncated": "true"}
    with page(run.path.parent, tmp_path / "cache") as client:
        settled(client, "/api/run/made/attempts")
        for number, one in enumerate(groups, 1):
            place = {"part": "rollouts", "step": 1, "grp": number}
            found = client.get("/api/run/made/what-if", params={**place, **asked}).json()["siblings"]
            seed = seed_of_choice(SEED, 1, one.group.problem.id)
            expected = resampler_of(other)(one.group, random.Random(seed))
            assert [(s["kept"], s["reason"]) for s in found] == fates([expected])[0]
            if method == "roc_release":
                assert {s["chance"] for s in found} <= {0.0, 1.0}
            if method == "roc":
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


@pytest.mark.parametrize(
    ("advantage", "word"),
    [("rloo", ""), ("mine:own", "mine:own, which this page does not")],
)
def test_advantages_are_shown_that_follow_from_rewards_alone(tmp_path: Path, advantage: str, word: str) -> None:
    run = create(tmp_path / "runs")
    (one, *_) = add_step(run, 1, problems=1)
    settings = json.loads(run.resolved.read_text())
    for stage in settings["stage"]:
        stage["learning"]["advantage"] = advantage
    run.resolved.write_text(json.dumps(settings))
    with page(run.path.parent, tmp_path / "cache") as client:
        settled(client, "/api/run/made/attempts")
        found = client.get("/api/run/made/what-if", params={"part": "rollouts", "step": 1, "grp": 1})
    assert found.status_code == (400 if word else 200) and word in found.json().get("error", "")
    if not word:
        own = kept_advantages(one, lambda rewards: rloo(rewards, LearningSection()))
        assert own and [row["advantage"] for row in found.json()["siblings"]] == pytest.approx(
            [own.get(place) for place in range(len(one.choices))]
        )
