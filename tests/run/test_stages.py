"""When an RL stage is over before its steps are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rocstar.config.recipe import load_recipe
from rocstar.config.sections import EndSection, RlStage
from rocstar.run.stages import Row, expected_steps, why_over

PAPER_STAGE_1 = EndSection(reward_gain=0.005, truncated_share=0.10)
PAPER_STAGE_2 = EndSection(solved_share=0.70)
PAPER_STAGE_3 = EndSection(reward_loss=0.01)


def row(reward: float = 0.5, *, truncated: float = 0.0, solved: float = 0.0) -> Row:
    return {"reward/mean": reward, "len/truncated": truncated, "group/solved_share": solved}


def length(rule: EndSection, rows: list[Row]) -> int | None:
    """Steps after which a stage with these metrics is over; None when it never is."""
    return next((n for n in range(1, len(rows) + 1) if why_over(rule, rows[:n])), None)


def paper_history(rng: random.Random) -> tuple[list[Row], list[Row], list[Row]]:
    """Made by hand after the paper's account (§4.3, §5.2), with the noise of 16,384 attempts a step: in stage 1 the
    reward climbs and is flat from step 260 on, while the truncated share passes 10% several times; in stage 2 the
    share of solved groups grows past 0.7 at its end; in stage 3 the reward saturates and falls from step 105 on."""

    def noisy(value: float) -> float:
        return value + rng.gauss(0, 0.002)

    first = [
        row(noisy(0.2 + 0.45 * min(1.0, n / 260)), truncated=noisy(0.10 + (0.06 if n % 60 < 12 and n < 250 else 0.0)))
        for n in range(400)
    ]
    second = [row(noisy(0.66 + 0.001 * n), solved=noisy(0.55 + 0.002 * n)) for n in range(200)]
    third = [row(noisy(0.55 + 0.001 * min(n, 95) - 0.001 * max(0, n - 105))) for n in range(200)]
    return first, second, third


@pytest.mark.parametrize("seed", range(2))
def test_the_rules_change_stages_where_the_paper_did(seed: int) -> None:
    first, second, third = paper_history(random.Random(seed))
    lengths = length(PAPER_STAGE_1, first), length(PAPER_STAGE_2, second), length(PAPER_STAGE_3, third)
    assert lengths == (pytest.approx(300, abs=15), pytest.approx(85, abs=5), pytest.approx(125, abs=10))


def test_flat_reward_ends_a_stage_only_while_truncation_is_stable() -> None:
    rule = EndSection(window=5, reward_gain=0.01, truncated_share=0.1)
    assert length(rule, [row(truncated=0.3)] * 50) is None
    assert length(rule, [row(truncated=0.02)] * 50) is None
    assert length(rule, [*[row(truncated=0.3)] * 20, *[row(truncated=0.11)] * 20]) == 30
    assert length(EndSection(window=5, reward_gain=0.01), [row(truncated=0.3)] * 50) == 10


def test_a_metric_that_a_step_lacks_ends_nothing() -> None:
    rule = EndSection(window=2, solved_share=0.5)
    assert length(rule, [{"group/solved_share": 1.0}, {}, {"group/solved_share": 1.0}]) is None
    assert length(rule, [{}, {"group/solved_share": 1.0}, {"group/solved_share": 1.0}]) == 3


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 10))
def test_no_rule_ends_a_stage_by_default_and_none_before_its_window(rewards: list[float], window: int) -> None:
    rows = [row(reward, truncated=reward, solved=reward) for reward in rewards]
    assert why_over(EndSection(), rows) is None
    rule = EndSection(window=window, reward_gain=0.1, solved_share=0.5, reward_loss=0.2)
    ended = length(rule, rows)
    assert ended is None or ended >= window


def test_a_rule_that_would_never_be_asked_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"set end\.reward_gain too"):
        EndSection(truncated_share=0.1)


@pytest.mark.parametrize("name", ["roc", "no_tool"])
def test_every_cell_of_the_ablation_has_all_its_steps(name: str) -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "ablations" / f"{name}.toml")
    stages = [stage for stage in recipe.stage if isinstance(stage, RlStage) and stage.steps]
    assert stages and all(length(stage.end, [row(1.0, solved=0.1)] * stage.steps) is None for stage in stages)


def test_a_stage_ends_with_the_step_that_uses_up_its_budget_of_tokens() -> None:
    rows: list[Row] = [{"step/tokens": tokens} for tokens in (400.0, 599.0, 1.0, 7.0)]
    assert length(EndSection(sampled_tokens=1000), rows) == 3
    assert length(EndSection(sampled_tokens=1008), rows) is None
    assert "1,000 tokens" in (why_over(EndSection(sampled_tokens=1000), rows[:3]) or "")


def test_a_stage_is_expected_to_end_by_its_steps_or_by_its_tokens_whichever_comes_first() -> None:
    rows: list[Row] = [{"step/tokens": 300.0}, {"step/tokens": 100.0}]
    budgets = [EndSection(), *(EndSection(sampled_tokens=tokens) for tokens in (401, 1000, 1001, 9999))]
    assert [expected_steps(rule, 20, rows) for rule in budgets] == [20, 3, 5, 6, 20]
    assert expected_steps(EndSection(sampled_tokens=9), 20, [{"step/tokens": 0.0}]) == 20
