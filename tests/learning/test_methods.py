"""Every policy loss against its formula, token by token in double precision, and through the learner in chunks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.learning import head
from rocstar.learning.loss import importance_weights, takes_whole_attempts
from rocstar.learning.methods import LOSSES
from rocstar.protocols import PolicyTokens
from rocstar.types import Batch
from tests.learning import examples
from tests.learning.test_learner import gradients, learner, rows

LOW, HIGH, DUAL, RIGHT, WRONG = 0.2, 0.28, 3.0, 1.0, 1.05
Slopes = Callable[[Sequence[float], Sequence[float], float], list[float]]
"""(logprobs of an attempt, old ones, advantage) -> the derivative of its summed loss by each logprob, by hand."""


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


def dppo_kl(n: float, o: float, a: float) -> float:
    p, q = math.exp(n), math.exp(o)
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    free = (divergence <= HIGH or p <= q) if a > 0 else (divergence <= LOW or p >= q)
    return -min(math.exp(n - o), 20.0) * a if free else 0.0


def gspo(new: Sequence[float], old: Sequence[float], a: float) -> list[float]:
    ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    return [-ratio * a * _inside(ratio, a)] * len(new)  # of the sum over tokens; the mean is the paper's


def gmpo(new: Sequence[float], old: Sequence[float], a: float) -> list[float]:
    moved = [n - o for n, o in zip(new, old, strict=True)]
    free = [m <= HIGH if a > 0 else m >= -LOW for m in moved]
    kept = [m if f else (HIGH if a > 0 else -LOW) for m, f in zip(moved, free, strict=True)]
    ratio = math.exp(sum(kept) / len(kept))
    return [-ratio * a * f for f in free]


BY_HAND: dict[str, Slopes] = {
    "grpo": by_token(grpo),
    "cispo": by_token(cispo),
    "sapo": by_token(sapo),
    "dppo_tv": by_token(dppo_tv),
    "dppo_kl": by_token(dppo_kl),
    "gpg": by_token(lambda n, o, a: -a),
    "gspo": gspo,
    "gmpo": gmpo,
}


def drawn(lengths: Sequence[int], spread: float) -> PolicyTokens:
    rng = random.Random(7)
    attempts = [place for place, count in enumerate(lengths) for _ in range(count)]
    advantages = [rng.choice((-1.5, -0.5, 0.5, 1.0)) for _ in lengths]
    old = [-rng.uniform(0.01, 4) for _ in attempts]
    new = [min(-0.005, o + rng.gauss(0, spread)) for o in old]
    return PolicyTokens(
        logprobs=torch.tensor(new, dtype=torch.double, requires_grad=True),
        old_logprobs=torch.tensor(old, dtype=torch.double),
        sampled_logprobs=torch.tensor(old, dtype=torch.double),
        advantages=torch.tensor([advantages[at] for at in attempts], dtype=torch.double),
        attempts=torch.tensor(attempts),
    )


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_those_worked_out_by_hand(name: str, spread: float) -> None:
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
    if spread > 1 and name not in ("gpg", "sapo"):
        assert 0 < bounded.double().mean() < 1


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_whole_attempts_loss_is_the_same_in_chunks_and_micro_batches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learnt(chunk: int, budget: int) -> tuple[dict[str, float], list[torch.Tensor]]:
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk)
        settings = {"clip_low": 0.05, "clip_high": 0.05, "importance_cap": 2.0, "loss_mean": "attempts"}
        mine = learner(loss=name, max_grad_norm=1e9, tokens_per_microbatch=budget, **settings)
        rng = random.Random(0)
        moved = tuple(
            replace(row, old_logprobs=[value + rng.uniform(-0.3, 0.3) for value in row.old_logprobs])
            for row in mine.score(rows())
        )
        metrics = mine.update(Batch(rows=moved)).metrics
        return {key: metrics[key] for key in ("loss", "clip_share", "importance_weight")}, gradients(mine)

    whole, expected = learnt(2**25, 10_000)
    assert whole["clip_share"] > 0
    for chunk, budget in ((3 * examples.SHAPE.vocab_size, 10_000), (2**25, 1), (examples.SHAPE.vocab_size, 25)):
        metrics, found = learnt(chunk, budget)
        assert metrics == pytest.approx(whole, rel=1e-5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_tokens_outside_are_masked_where_that_is_asked_for() -> None:
    """Ratios .5, 1, 2 and 9 with IcePop's bounds .6 and 5; without a floor the first counts."""
    sampled = torch.tensor([0.2, 0.2, 0.2, 0.1]).log()
    old = torch.tensor([0.1, 0.2, 0.4, 0.9]).log()
    weights, outside = importance_weights(old, sampled, 5.0, 0.6, masks=True)
    assert weights.tolist() == pytest.approx([0, 1, 2, 0]) and outside.tolist() == [True, False, False, True]
    assert importance_weights(old, sampled, 5.0, masks=True)[0].tolist() == pytest.approx([0.5, 1, 2, 0])


@pytest.mark.parametrize("settings", [{"importance_outside": "mask"}, {"importance_floor": 0.5, "importance_cap": 2.0}])
def test_bounds_that_would_do_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"learning\.importance_"):
        LearningSection.model_validate(settings)


def test_a_users_loss_may_want_whole_attempts(modules: Path) -> None:
    (modules / "mine.py").write_text(
        "from rocstar.learning.methods import gspo\n"
        "def own(tokens, settings):\n    return gspo(tokens, settings)\n"
        "own.whole_attempts = True\n"
    )
    assert takes_whole_attempts(LearningSection(loss="mine:own"), [modules])
