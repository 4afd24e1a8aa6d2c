"""Runs whose attempts an agent makes, killed in mid-step with kill -9 at random moments and resumed: no finished call
of the model is lost, and none is used twice."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocstar.record.journal import read_journal
from tests.agents.test_agent_run import begin, unkilled
from tests.test_train import TWO_ENGINES, undisturbed
from tests.tiny_run import GLANCE, Command, attempts, last_checkpoint, metrics, versions, workplace

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def calls(place: Path) -> list[dict[str, Any]]:
    """Finished calls of steps that no checkpoint holds."""
    return [row for file in sorted(place.glob("runs/tiny/calls/step=*.jsonl")) for row in read_journal(file)]


def killed(place: Path, command: Command, after: int) -> list[dict[str, Any]]:
    """kill -9 once so many calls more have finished; those that no checkpoint holds then."""
    before = {row["asked"] for row in calls(place)}
    seen: set[str] = set()
    while len(seen) < after and command.process.is_alive():
        seen |= {row["asked"] for row in calls(place)} - before
        time.sleep(GLANCE)
    command.process.kill()
    assert command.wait().code == -signal.SIGKILL
    return calls(place)


def taken(place: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(place / "runs/tiny/events.jsonl") if event["event"] == "calls_taken"]


@pytest.mark.parametrize(
    ("name", "own", "more", "engines", "kills"),
    [
        ("wandered", ("rollout.refill=2",), ("run.checkpoint_seconds=1000",), "", (60, 20)),
        ("ranks", ("cluster.learners=2", "stage.stage1.steps=2"), (), TWO_ENGINES, (40,)),
    ],
    ids=["several steps unsaved, with refill", "each step saved, two ranks and two engines"],
)
def test_every_finished_call_is_used_once_and_the_numbers_are_those_of_an_unkilled_run(
    name: str,
    own: tuple[str, ...],
    more: tuple[str, ...],
    engines: str,
    kills: tuple[int, ...],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """own: settings that change a run's numbers; the unkilled run has them, too. kills: each within so many calls."""
    base, chance = tmp_path_factory.getbasetemp(), random.Random(str(tmp_path))
    whole, place = unkilled(base, name, *own), workplace(tmp_path / "killed")
    (place / "tiny.toml").write_text((place / "tiny.toml").read_text() + engines)
    left = killed(place, begin(place, base, *own, *more), chance.randint(1, kills[0]))
    for most in kills[1:]:
        with max(place.glob("runs/tiny/calls/step=*")).open("ab") as file:
            file.write(b'{"asked": "torn')
        left = killed(place, Command.start(place, "train", "--resume", "tiny"), chance.randint(1, most))
    named = Counter(row["asked"] for row in left)
    assert set(named.values()) == {1}, "a call that is taken is not made again"
    before = len(taken(place))
    ended = Command.start(place, "train", "--resume", "tiny").wait()
    assert ended.code == 0, ended.told
    told = taken(place)[before:]
    assert sum(event["taken"] for event in told) == sum(event["there"] for event in told) == len(left) > 0
    assert f"step {told[0]['step']}: {told[0]['taken']} of the {told[0]['there']} finished call" in ended.told
    assert list(map(undisturbed, metrics(place))) == list(map(undisturbed, metrics(whole)))
    assert attempts(place) == attempts(whole) and not (place / "runs/tiny/calls").exists()


def test_a_run_that_rolls_ahead_takes_what_the_weights_of_its_past_have_written(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Time decides which weights write what there, so the tokens are not those of another run. Calls of a step to come
    that stand there were written before the checkpoint, by weights that the process that takes them never had."""
    place, base = workplace(tmp_path / "place"), tmp_path_factory.getbasetemp()
    ahead = ("rollout.max_staleness_steps=1", "learning.importance_cap=2", "evaluate.problems=2")
    left = killed(place, begin(place, base, *ahead), 50)
    at = int(json.loads((last_checkpoint(place) / "state.json").read_text())["policy_version"])
    usable = [row for row in left if all(version <= at for version, _ in row["spans"])]
    ended = Command.start(place, "train", "--resume", "tiny").wait()
    assert ended.code == 0, ended.told
    assert len(usable) <= sum(event["taken"] for event in taken(place)) <= len(left)
    rows, made = metrics(place), attempts(place)
    for row in rows:
        of_step = [attempt for attempt in made if attempt["step"] == row["step"]]
        assert len({(one["problem_id"], one["index"]) for one in of_step}) == len(of_step)
    ages = [filed - version for filed, wrote in versions(place) for version in wrote]
    assert min(ages) >= 0 and max(ages) <= 2
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows if "policy/logprob_gap_max" in row)
    replayed = Command.start(place, "replay", "tiny", "--json").wait()
    assert replayed.code == 0 and all(not one["differs"] for one in json.loads(replayed.out)["steps"]), replayed.told
