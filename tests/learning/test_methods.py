"""Every policy loss against its formula, token by token in double precision, and through the learner in chunks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.config.unread import RULES
from rocstar.learning import head
from rocstar.learning.methods import (
    LOSSES,
    MAX_LOG_RATIO,
    importance_weights,
    kl_to_reference,
    loss_of,
)
from rocstar.protocols import PolicyTokens
from rocstar.types import BatchRow
from tests.learning import examples
from tests.learning.test_learner import gradients, learner, rows

TOO_LARGE = "less than or equal to 1000000"
LOW, HIGH, DUAL, RIGHT, WRONG = 0.2, 0.28, 3.0, 1.0, 1.05
Slopes = Callable[[Sequence[float], Sequence[float], float], list[float]]
"""(logprobs of an attempt, old ones, advantage) -> the derivative of its summed loss by each logprob, by hand; of
tokens that are not chosen, where the loss chooses."""


def _inside(ratio: float, a: float, low: float = 1 - LOW, high: float = 1 + HIGH) -> bool:
    return ratio < high if a > 0 else ratio > low


def by_token(slope: Callable[[float, float, float], float]) -> Slopes:
    return lambda new, old, a: [slope(n, o, a) for n, o in zip(new, old, strict=True)]


def grpo(n: float, o: float, a: float) -> float:
    ratio = math.exp(n - o)
    return -ratio * a if _inside(ratio, a) and (a > 0 or ratio < DUAL) else 0.0


def cispo(n: float, o: float, a: float) -> float:
    return -min(max(math.exp(n - o), 1 - LOW), 1 + HIGH) * a


def sapo(n: float, o: float, a: float) -> float:
    ratio, t = math.exp(n - o), RIGHT if a > 0 else WRONG
    s = 1 / (1 + math.exp(-t * (ratio - 1)))
    return -4 * s * (1 - s) * ratio * a


def dppo_tv(n: float, o: float, a: float) -> float:
    moved = math.exp(n) - math.exp(o)
    return -min(math.exp(n - o), 20.0) * a if (moved <= HIGH if a > 0 else moved >= -LOW) else 0.0


def gspo(new: Sequence[float], old: Sequence[float], a: float) -> list[float]:
    ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    return [-ratio * a * _inside(ratio, a)] * len(new)  # of the sum over tokens; the mean is the paper's


BY_HAND: dict[str, Slopes] = {
    "grpo": by_token(grpo),
    "cispo": by_token(cispo),
    "sapo": by_token(sapo),
    "dppo_tv": by_token(dppo_tv),
    "gspo": gspo,
}


def tokens_of(
    new: Sequence[float], old: Sequence[float], advantages: Sequence[float], attempts: Sequence[int]
) -> PolicyTokens:
    """Sampled at the old log-probabilities."""
    return PolicyTokens(
        logprobs=torch.tensor(new, dtype=torch.double, requires_grad=True),
        old_logprobs=torch.tensor(old, dtype=torch.double),
        sampled_logprobs=torch.tensor(old, dtype=torch.double),
        advantages=torch.tensor(advantages, dtype=torch.double),
        attempts=torch.tensor(attempts),
    )


def grpo_at(ratios: Sequence[float], advantage: float, dual_clip: float = 0.0) -> tuple[float, list[float], int]:
    """Of tokens with these ratios: the summed loss, its gradient by their logprobs, how many are clipped."""
    new, none = [math.log(ratio) - 1 for ratio in ratios], [0] * len(ratios)
    tokens = tokens_of(new, [-1.0] * len(ratios), [advantage] * len(ratios), none)
    losses, clipped = LOSSES["grpo"](tokens, LearningSection(clip_low=LOW, clip_high=HIGH, dual_clip=dual_clip))
    (slopes,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
    return losses.sum().item(), slopes.tolist(), int(clipped.sum())


@pytest.mark.parametrize(
    ("ratios", "advantage", "dual_clip", "total", "gradient", "clipped"),
    [
        # 1.1, 1.5 (clipped to 1.28) and 0.5 (below the lower bound, but lower is already worse: not clipped):
        # -(2.2 + 2.56 + 1.0), and -ratio * A where not clipped.
        ([1.1, 1.5, 0.5], 2.0, 0.0, -5.76, [-2.2, 0.0, -1.0], 1),
        # 0.9 as it is, 0.5 clipped to 0.8, 2.0 not clipped: 0.9 + 0.8 + 2.0.
        ([0.9, 0.5, 2.0], -1.0, 0.0, 3.7, [0.9, 0.0, 2.0], 1),
        # The second clip, at 3: 0.5 clipped to 0.8, 2.9 as it is, 5 bounded to 3 and without a gradient.
        ([0.5, 2.9, 5.0], -2.0, 3.0, 1.6 + 5.8 + 6, [0.0, 5.8, 0.0], 2),
        ([0.5, 2.9, 5.0], -2.0, 0.0, 1.6 + 5.8 + 10, [0.0, 5.8, 10.0], 1),
        # It leaves right attempts alone.
        ([0.1, 1.2, 5.0], 2.0, 3.0, -(0.2 + 2.4 + 2.56), [-0.2, -2.4, 0.0], 1),
    ],
)
def test_three_tokens_of_grpo_by_hand(
    ratios: list[float], advantage: float, dual_clip: float, total: float, gradient: list[float], clipped: int
) -> None:
    found, slopes, bounded = grpo_at(ratios, advantage, dual_clip)
    assert (found, slopes) == (pytest.approx(total, rel=1e-6), pytest.approx(gradient, rel=1e-6))
    assert bounded == clipped


def test_one_hopelessly_mismatched_token_leaves_the_loss_finite() -> None:
    loss, gradient, _ = grpo_at([math.exp(30), 1.0], -1.0)
    assert loss == pytest.approx(math.exp(MAX_LOG_RATIO) + 1, rel=1e-5)
    assert all(map(math.isfinite, gradient))


def test_the_kl_estimate_is_never_negative_zero_for_equal_models_and_right_on_average() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    each = kl_to_reference(p.log(), q.log())
    assert each.shape == p.shape and (each >= 0).all() and each[1] == 0 < each[0]
    assert float((p * each).sum()) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_importance_weights_are_the_quotient_of_learner_and_engine_between_cap_and_floor() -> None:
    """Learner at half, exactly, twice and nine times the engine's probability."""
    old = torch.tensor([0.1, 0.2, 0.4, 0.9]).log().requires_grad_()
    sampled = torch.tensor([0.2, 0.2, 0.2, 0.1]).log()
    weights, capped = importance_weights(old, sampled, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0], rel=1e-6) and not weights.requires_grad
    assert capped[3] and not capped[:2].any()
    assert importance_weights(old, sampled, 3.0)[1].tolist() == [False, False, False, True]
    weights, outside = importance_weights(old, sampled, 5.0, 0.6, masks=True)  # IcePop's, at its bounds
    assert weights.tolist() == pytest.approx([0, 1, 2, 0]) and outside.tolist() == [True, False, False, True]
    assert importance_weights(old, sampled, 5.0, masks=True)[0].tolist() == pytest.approx([0.5, 1, 2, 0])


def drawn(lengths: Sequence[int], spread: float) -> PolicyTokens:
    rng = random.Random(7)
    attempts = [place for place, count in enumerate(lengths) for _ in range(count)]
    advantages = [rng.choice((-1.5, -0.5, 0.5, 1.0)) for _ in lengths]
    old = [-rng.uniform(0.01, 4) for _ in attempts]
    new = [min(-0.005, o + rng.gauss(0, spread)) for o in old]
    return tokens_of(new, old, [advantages[at] for at in attempts], attempts)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_those_worked_out_by_hand(name: str, spread: float) -> None:
    assert name in BY_HAND, "a loss that ships has its slope in BY_HAND"
    lengths = [1, 5, 40, 7, 100, 30, 2, 16, 60]
    tokens = drawn(lengths, spread)
    losses, bounded = LOSSES[name](tokens, LearningSection(loss=name))
    (slopes,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
    begin, expected = 0, []
    for count in lengths:
        part = slice(begin, begin + count)
        new, old = (each[part].tolist() for each in (tokens.logprobs, tokens.old_logprobs))
        expected += BY_HAND[name](new, old, float(tokens.advantages[begin]))
        begin += count
    assert slopes.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    if spread > 1 and name != "sapo":
        assert 0 < bounded.double().mean() < 1


@pytest.mark.parametrize("name", ["gspo", "masks"])
def test_whole_attempts_lose_the_same_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {}
    if name == "masks":
        name, more = "grpo", {"attempt_ratio_cap": 1.02, "attempt_ratio_floor": 0.9, "off_policy_kl": 0.02}

    def sampled(row: BatchRow) -> dict[str, Sequence[float]]:
        return {"sampled_logprobs": row.old_logprobs} if "off_policy_kl" in more else {}

    def learnt(chunk: int, budget: int) -> tuple[dict[str, float], list[torch.Tensor]]:
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk)
        settings = {"clip_low": 0.05, "clip_high": 0.05, "importance_cap": 2.0, "loss_mean": "attempts"}
        mine = learner(loss=name, max_grad_norm=1e9, tokens_per_microbatch=budget, **settings, **more)
        rng = random.Random(0)
        moved = tuple(
            replace(row, old_logprobs=[old + rng.uniform(-0.3, 0.3) for old in row.old_logprobs], **sampled(row))
            for row in mine.score(rows())
        )
        metrics = mine.update(moved).metrics
        masked = {"attempts_masked": metrics.get("attempts_masked", 0.0)}
        return {key: metrics[key] for key in ("loss", "clip_share", "importance_weight")} | masked, gradients(mine)

    whole, expected = learnt(2**25, 10_000)
    assert whole["clip_share"] > 0
    assert 0 < whole["attempts_masked"] < 1 or name != "grpo"
    for chunk, budget in ((3 * examples.SHAPE.vocab_size, 10_000), (examples.SHAPE.vocab_size, 25)):
        metrics, found = learnt(chunk, budget)
        assert metrics == pytest.approx(whole, rel=1e-5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"importance_outside": "mask"}, r"learning\.importance_outside"),
        ({"importance_floor": 0.5, "importance_cap": 2.0}, r"learning\.importance_floor"),
        ({"attempt_ratio_cap": 0.5}, "attempt_ratio_cap 0.5 would leave out attempts that nothing is wrong with"),
        # The first failed in the midst of a step, with an error of torch; the others left no finite gradient.
        ({"importance_cap": 1e39}, TOO_LARGE),
        ({"kl_coefficient": 1e39}, TOO_LARGE),
        ({"entropy_coefficient": 1e39}, TOO_LARGE),
        ({"weight_decay": 1e39}, TOO_LARGE),
    ],
)
def test_bounds_that_make_no_sense_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LearningSection.model_validate(settings)


@pytest.mark.parametrize("scored", [True, False])
def test_attempts_off_the_policy_do_not_count(scored: bool) -> None:
    """As if their advantage were 0. Of four attempts the second was written with twice the probability and has a
    negative advantage, the third with half of it, the fourth with twice and a positive one."""
    factors, advantages = (1.0, 2.0, 0.5, 2.0), (1.0, -1.0, -0.5, 0.5)
    own = learner().score([replace(rows()[0], advantage=each) for each in advantages])
    made = tuple(
        replace(row, sampled_logprobs=[value + math.log(factor) for value in row.old_logprobs])
        for row, factor in zip(own, factors, strict=True)
    )

    def learnt(counts: Sequence[bool], **settings: float) -> tuple[dict[str, float], list[torch.Tensor]]:
        given = [replace(row, advantage=row.advantage * count) for row, count in zip(made, counts, strict=True)]
        given = given if scored else [replace(row, old_logprobs=(), entropies=()) for row in given]
        mine = learner(max_grad_norm=1e9, **settings)
        return dict(mine.update(tuple(given)).metrics), gradients(mine)

    for settings, counts in (
        ({"off_policy_kl": 0.5}, (True, False, True, True)),
        ({"attempt_ratio_floor": 0.6}, (True, False, True, False)),
        ({"attempt_ratio_cap": 1.5}, (True, True, False, True)),
        ({"attempt_ratio_cap": 1.5, "off_policy_kl": 0.5}, (True, False, False, True)),
        ({"attempt_ratio_cap": 2.5, "attempt_ratio_floor": 0.4, "off_policy_kl": 1.0}, (True,) * 4),
    ):
        (metrics, found), (expected, slopes) = learnt([True] * 4, **settings), learnt(counts)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert metrics["attempts_masked"] == pytest.approx(1 - sum(counts) / 4)
        assert "attempts_masked" not in expected
        for one, other in zip(found, slopes, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_what_a_plan_counts_is_what_losses_want() -> None:
    """Settings know without torch which losses take a second pass through the head, and which want scored rows."""
    for name, loss in LOSSES.items():
        assert LearningSection(loss=name).takes_attempts == getattr(loss, "whole_attempts", False)
        assert not LearningSection(loss=name).scores_first
    assert LearningSection(off_policy_kl=0.1).takes_attempts and LearningSection(updates_per_step=2).scores_first
    assert LearningSection(epochs=2).scores_first


class Noted:
    """Settings that note what is read of them."""

    def __init__(self, settings: LearningSection) -> None:
        self.settings, self.read = settings, set[str]()

    def __getattr__(self, name: str) -> object:
        self.read.add(f"learning.{name}")
        return getattr(self.settings, name)


@pytest.mark.parametrize("name", LOSSES)
def test_the_settings_that_a_loss_reads_are_those_that_may_be_given_with_it(name: str) -> None:
    noted: Any = Noted(LearningSection(loss=name))
    LOSSES[name](drawn([5, 40], spread=0.5), noted)
    rules = [rule for rule in RULES if rule.by == "learning.loss"]
    assert noted.read == {key for rule in rules if not rule.useless(name) for key in rule.keys.split()}


def test_a_users_loss_may_want_whole_attempts(modules: Path) -> None:
    (modules / "mine.py").write_text(
        "from rocstar.learning.methods import gspo\n"
        "def own(tokens, settings):\n    return gspo(tokens, settings)\n"
        "own.whole_attempts = True\n"
    )
    _, whole_attempts = loss_of(LearningSection(loss="mine:own"), [modules])
    assert whole_attempts
