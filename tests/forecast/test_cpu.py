"""What a run takes on a machine without a GPU, worked out from what its parts took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.config.recipe import load_recipe
from rocstar.config.sections import Recipe, StageRolloutSection
from rocstar.engines.scripted import ScriptedEngine
from rocstar.forecast.cpu import RUN, Cost, Measured, cost_of, drawn, plan_cpu, within, workload
from rocstar.forecast.engine_model import torch_engine, with_costs
from rocstar.forecast.trial import GuidedEngine, turns_of
from rocstar.forecast.workload import PlannedAttempt, TurnLengths
from rocstar.types import Completion, Finish, Sampling, SftRow
from tests import tiny_run

RECIPES = Path(__file__).parent.parent.parent / "recipes"
SHORT = PlannedAttempt(group="", prompt_tokens=10, turns=(TurnLengths(8, 0, 0.0),), limit=100)
LONG = PlannedAttempt(group="", prompt_tokens=10, turns=(TurnLengths(20, 6, 0.1), TurnLengths(14, 0, 0.0)), limit=100)
MODEL = with_costs(torch_engine(capacity_tokens=65536, most_running=512), [1e-3, 0.0, 1e-4, 1e-5, 1e-4])


def measured(**changes: object) -> Measured:
    base = Measured(
        start=5.0,
        demonstration=1e-3,
        sft={"sft": 0.1},
        first=[SHORT],
        last=[LONG],
        model=MODEL,
        engines=1,
        spread=0.0,
        judging=0.01,
        learning={name: Cost(fixed=0.1, each=1e-4) for name in ("stage1", "stage2", "stage3")},
        saving=0.5,
        overlaps=True,
        made=3200,
        started=1e8,
    )
    return replace(base, **changes)


def planned(*settings: str, **changes: object) -> dict[str, float]:
    """Seconds by phase."""
    pools = {"stage1": 2400, "stage2": 2400, "stage3": 160}
    made = plan_cpu(
        load_recipe(RECIPES / "quickstart.toml", settings), measured(**changes), heldout=100, pools=pools, memory=5e8
    )
    assert made.seconds == pytest.approx(sum(phase.seconds for phase in made.phases))
    return {phase.name: phase.seconds for phase in made.phases}


def test_phases_come_in_the_order_of_the_run_and_grow_with_its_steps() -> None:
    whole, twice = planned(), planned("stage.sft.steps=900", "stage.stage1.steps=48")
    assert list(whole) == [
        "start",
        "sft",
        "before",
        "stage1",
        "stage2",
        "stage3: pool",
        "stage3",
        "after",
        "checkpoints",
    ]
    assert whole["sft"] == pytest.approx(45) and twice["sft"] == pytest.approx(90)
    assert twice["start"] - whole["start"] == pytest.approx(450 * 32 * 1e-3)
    assert twice["stage1"] > 1.9 * whole["stage1"]
    assert "stage1: evaluations" in planned("evaluate.every_steps=8")


def test_attempts_get_from_the_first_kind_to_the_last_over_rl() -> None:
    plan = planned(learning={name: Cost(fixed=0.0, each=0.0) for name in ("stage1", "stage2", "stage3")})
    each = [plan[name] / steps for name, steps in (("stage1", 24), ("stage2", 16), ("stage3", 12))]
    assert each == sorted(each) and plan["after"] > plan["before"]


def test_learning_beside_attempts_costs_no_time_of_its_own_where_there_are_cores_for_both() -> None:
    ahead = "rollout.max_staleness_steps=1"
    assert planned(ahead)["stage1"] < planned()["stage1"]
    assert planned(ahead, overlaps=False)["stage1"] == planned(overlaps=False)["stage1"]


def test_a_cost_goes_through_what_was_measured_and_is_never_below_nothing() -> None:
    assert cost_of([(10, 2.0), (20, 3.0)]).of(30) == pytest.approx(4.0)
    assert cost_of([(10, 2.0)]).of(30) == pytest.approx(6.0)
    assert cost_of([(10, 3.0), (20, 2.0)]).of(0) == 0.0  # a larger part that took less
    assert cost_of([(10, 1.0), (20, 4.0)]).of(0) == 0.0


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_this_share_of_those_drawn_is_of_the_last_kind(first: int, last: int, share: float) -> None:
    found = drawn(["first"] * first, ["last"] * last, share=share)
    assert len(found) == first + last
    assert abs(found.count("last") - share * len(found)) <= 1


@given(st.integers(1, 60), st.integers(1, 3))
def test_attempts_end_where_their_limits_end_them(cap: int, turns: int) -> None:
    limits = StageRolloutSection(max_response_tokens=cap, max_turns=turns)
    for attempt in within([SHORT, LONG], limits):
        assert 1 <= attempt.response_tokens <= cap and len(attempt.turns) <= turns
        assert attempt.turns[-1].reply_tokens == 0 and attempt.limit == cap
    assert within([LONG], StageRolloutSection(max_response_tokens=40))[0].turns == LONG.turns


def test_siblings_share_a_prompt() -> None:
    work = workload([SHORT, replace(LONG, prompt_tokens=12)], groups=2, attempts=3)
    assert [attempt.group for attempt in work] == ["0", "0", "0", "1", "1", "1"]
    assert [attempt.prompt_tokens for attempt in work] == [10, 10, 10, 12, 12, 12]


# -- what a trial does ------------------------------------------------------------------------------------------------


class Counting(ScriptedEngine):
    """Writes 90, 91 ... as many as it may."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        self.seen.setdefault(session_id, []).append(tuple(token_ids))
        made = tuple(range(90, 90 + sampling.max_new_tokens))
        return Completion(token_ids=made, logprobs=(0.0,) * len(made), finish=Finish.LENGTH)


async def test_a_guided_session_writes_its_row_while_the_engine_sees_its_own_tokens() -> None:
    row = SftRow(token_ids=(1, 2, 3, 4, 9, 5, 6, 9), loss_mask=(False, False, True, True, True, False, True, True))
    rows: Iterator[list[tuple[int, ...]]] = cycle([turns_of(row)])
    inner = Counting(None, ())  # type: ignore[arg-type]
    engine, sampling = GuidedEngine(inner, rows), Sampling(max_new_tokens=50, stop_token_ids=(9,))
    first = await engine.generate([1, 2], sampling, request_id="a", session_id="s")
    assert (first.token_ids, first.finish) == ((3, 4, 9), Finish.STOP)
    cut = replace(sampling, max_new_tokens=1)
    second = await engine.generate([1, 2, 3, 4, 9, 5], cut, request_id="b", session_id="s")
    assert (second.token_ids, second.finish) == ((6,), Finish.LENGTH)
    assert inner.seen["s"] == [(1, 2), (1, 2, 90, 91, 92, 5)]


def test_a_small_run_is_planned_by_trying_its_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from rocstar.cli.main import run

    place = tiny_run.workplace(tmp_path / "work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert run(["plan", "tiny.toml", "--gpu", "cpu", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    phases = {phase["name"]: phase for phase in found["phases"]}
    names = ["start", "cold", "before", "stage1", "stage3: pool", "stage3", "after", "checkpoints"]
    assert list(phases) == names and all(phase["seconds"] > 0 for phase in phases.values())
    assert phases["stage1"]["seconds"] == pytest.approx(
        4 * (phases["stage1"]["rollout_seconds"] + phases["stage1"]["learning_seconds"])
    )
    assert 1e8 < found["memory"][RUN] < 1e10
    assert not (place / "runs").exists()


def test_what_a_recipe_without_rl_takes_is_imitation() -> None:
    recipe = load_recipe(RECIPES / "quickstart.toml")
    recipe = Recipe.model_validate({**recipe.model_dump(), "stage": [recipe.stage[0].model_dump()]})
    made = plan_cpu(recipe, measured(), heldout=0, pools={}, memory=5e8)
    assert [phase.name for phase in made.phases] == ["start", "sft", "after", "checkpoints"]
    assert made.phases[2].seconds == 0
