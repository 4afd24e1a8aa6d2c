"""Learners as actors of a small Ray instance on this machine learn what one learns, and end with one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="needs the extra [cluster]")
pytest.importorskip("torch")

import ray

from rocstar.cluster import actors, start_ranks
from rocstar.cluster.places import PlaceRequest, at, own_address, reserved, sentence
from rocstar.config.places import ClusterSection
from rocstar.config.sections import ModelSection
from rocstar.errors import ConfigError
from rocstar.learning.ranks import ALONE
from tests.sandbox.driver import ended as has_ended
from tests.sandbox.driver import eventually
from tests.tiny_run import Command, metrics, workplace

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Each rank draws a dropout of its own, and rounding differs: what Muon makes large is left out.
SHORT = ("sft.dropout=0", "sft.optimizer=adamw", "stage.cold.steps=20", "stage.stage1.steps=2", "stage.stage3.steps=0")
ON_RAY = ("cluster.launcher=ray", "cluster.learners=2", "cluster.sandbox_nodes=1")
STEPS = 22


def actors_of(command: Command) -> list[psutil.Process]:
    """Of the Ray that belongs to a running command."""
    below = psutil.Process(command.process.pid).children(recursive=True)
    return [process for process in below if "LearnerActor" in " ".join(process.cmdline())]


@pytest.mark.timeout(600)  # four runs, three of them with a Ray of their own
def test_two_learners_and_a_sandbox_on_ray_learn_what_one_learns_across_a_stop_and_a_dead_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of somebody else on this machine
    alone, both = workplace(tmp_path / "alone"), workplace(tmp_path / "both")
    assert Command.start(alone, "train", "tiny.toml", *SHORT).wait().code == 0
    found: list[psutil.Process] = []

    run = Command.start(both, "train", "tiny.toml", *SHORT, *ON_RAY)
    ended = run.after_step(2, lambda: (found.extend(actors_of(run)), run.interrupt())[1])
    assert ended.code == 130 and "saved" in ended.told and "continue with" in ended.told, ended.told

    run = Command.start(both, "train", "--resume", "tiny")
    ended = run.after_step(8, lambda: (found.extend(actors_of(run)), found[-1].kill())[1])
    assert ended.code == 1, ended.told
    assert "rank 1 ended: " in ended.told and "resume the run from its last checkpoint" in ended.told

    ended = Command.start(both, "train", "--resume", "tiny").wait()
    assert ended.code == 0 and ended.out.startswith("\ntiny: before and after"), ended.told
    assert len(found) == 2 and eventually(lambda: all(map(has_ended, found)))
    rows, others = metrics(alone), metrics(both)
    assert [row["step"] for row in others] == list(range(1, STEPS + 1))
    for row, other in zip(rows, others, strict=True):
        assert other == pytest.approx(row, abs=1e-5)


def test_a_rank_that_cannot_work_in_the_folder_says_why_in_one_sentence(two_machines: None, tmp_path: Path) -> None:
    actor: Any = ray.remote(actors.LearnerActor).options(num_cpus=1)
    with pytest.raises(ray.exceptions.RayError) as ended:
        ray.get(actor.remote(str(tmp_path / "gone")).address.remote(), timeout=60)
    assert sentence(ended.value) == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/gone'"


def test_each_rank_has_a_gpu_of_its_own_and_rank_0_knows_which(two_machines: None) -> None:
    ranks = [{f"node:{own_address()}": actors.PINNED, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    with reserved({"learners": PlaceRequest("cluster.learners 2", ranks)}) as groups:
        group = groups["learners"]
        own = actors._own_gpu(group, {})
        asked = ray.remote(lambda: ray.get_gpu_ids()).options(**at(group, 1, cpus=1, gpus=1))
        assert sorted([str(own), *map(str, ray.get(asked.remote()))]) == ["0", "1"]
        assert actors._own_gpu(group, {"CUDA_VISIBLE_DEVICES": f"7,{own}"}) == 1
        with pytest.raises(ConfigError, match=f"Ray lends GPU {own} to rank 0, but CUDA_VISIBLE_DEVICES is 7"):
            actors._own_gpu(group, {"CUDA_VISIBLE_DEVICES": "7"})


def test_a_learner_without_places_is_alone() -> None:
    assert start_ranks(ClusterSection(launcher="ray"), ModelSection(device="cpu"), {}) is ALONE
