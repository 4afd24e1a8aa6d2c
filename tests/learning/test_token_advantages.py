"""Advantages of turns and of tokens: by hand, against loops in double precision, and through the learner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.learning import head as head_module
from rocstar.learning.advantages import advantage_of, advantages, split
from rocstar.learning.head import Head, score_tokens
from rocstar.learning.methods import TOKEN_ADVANTAGES, by_token
from rocstar.types import Batch, BatchRow, RowOrigin
from tests.learning import examples
from tests.learning.test_learner import learner

ATTEMPTS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.lists(st.integers(1, 4), min_size=1, max_size=5)), min_size=2
)


def attempt(reward: float, turns: Sequence[int], energies: Sequence[float] = ()) -> BatchRow:
    """turns: tokens of each, with a reply of two tokens between them, after a prompt of one token."""
    mask = [False]
    for count in turns:
        mask += [*[True] * count, False, False]
    given = iter(energies)
    return BatchRow(
        token_ids=[7] * len(mask),
        loss_mask=mask,
        sampled_logprobs=[0.0] * len(mask),
        advantage=reward,
        energies=[next(given, 0.0) if mine else 0.0 for mine in mask],
    )


def test_returns_of_turns_by_hand() -> None:
    """Returns 1/2 and 1 of the right attempt's turns, 0 of the wrong one's: mean 1/2, deviation 1/2."""
    rows = [attempt(1.0, [2, 1]), attempt(0.0, [3])]
    found = TOKEN_ADVANTAGES["gtpo"](rows, LearningSection(turn_discount=0.5))
    assert [len(own) for own in found] == [3, 3]
    assert found[0] == pytest.approx([0, 0, 1], abs=1e-5) and found[1] == pytest.approx([-1, -1, -1], abs=1e-5)
    plain = TOKEN_ADVANTAGES["gtpo"](rows, LearningSection(turn_discount=0.5, normalize_by_std=False))
    assert plain == [[0.0, 0.0, 0.5], [-0.5, -0.5, -0.5]]


@given(made=ATTEMPTS, discount=st.sampled_from([1.0, 0.9, 0.3]))
def test_returns_of_turns_follow_a_plain_loop(made: list[tuple[float, list[int]]], discount: float) -> None:
    found = TOKEN_ADVANTAGES["gtpo"]([attempt(*each) for each in made], LearningSection(turn_discount=discount))
    returns = [[reward * discount ** (len(turns) - 1 - n) for n in range(len(turns))] for reward, turns in made]
    flat = torch.tensor([value for each in returns for value in each], dtype=torch.double)
    alike = len(set(flat.tolist())) == 1
    for own, values, (_, turns) in zip(found, returns, made, strict=True):
        expected = [0.0 if alike else (value - flat.mean()) / (flat.std() + 1e-6) for value in values]
        assert own == pytest.approx([float(e) for e, count in zip(expected, turns, strict=True) for _ in range(count)])
    if all(len(turns) == 1 for _, turns in made):  # then it is GRPO
        assert [own[0] for own in found] == pytest.approx(advantages([reward for reward, _ in made]))


@given(made=ATTEMPTS, seed=st.integers(0, 9))
def test_the_optimal_token_baseline_follows_a_plain_loop(made: list[tuple[float, list[int]]], seed: int) -> None:
    rng = random.Random(seed)
    energies = [[rng.uniform(0, 2) for _ in range(sum(turns))] for _, turns in made]
    found = TOKEN_ADVANTAGES["otb"](
        [attempt(*each, own) for each, own in zip(made, energies, strict=True)], LearningSection()
    )
    for (reward, _), own, values in zip(made, energies, found, strict=True):
        assert len(values) == len(own)
        for t, value in enumerate(values):
            there = [(sum(one[: t + 1]), r) for one, (r, _) in zip(energies, made, strict=True) if len(one) > t]
            baseline = sum(w * r for w, r in there) / (sum(w for w, _ in there) + 1e-8) if len(there) > 1 else 0.0
            assert value == pytest.approx(reward - baseline, abs=1e-9)


@pytest.mark.parametrize("tokens", [4, 40])
def test_energies_are_squared_norms_of_the_slopes_of_logits(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", tokens * 97)
    chance = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(23, 12, generator=chance), torch.randn(97, 12, generator=chance)
    hidden[0] *= 30  # all but certain
    targets = (hidden @ weight.T).argmax(-1).roll(0).where(torch.arange(23) < 3, torch.arange(23))
    head = Head(weight=weight, bias=None, temperature=0.7)
    *scored, energies = score_tokens(head, hidden, targets, energies=True)
    assert torch.equal(score_tokens(head, hidden, targets), torch.stack(scored))
    logits = (hidden.double() @ weight.T.double() / 0.7).requires_grad_()
    logits.log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(energies.double(), logits.grad.square().sum(-1), atol=1e-9, rtol=1e-4)
    assert 0 <= energies.min() < 1e-9


def rewarded() -> tuple[BatchRow, ...]:
    rewards = (1.0, 0.0, 1.0, 0.0, 0.0)
    return tuple(
        replace(row, advantage=reward, origin=RowOrigin(n // 3, n % 3))
        for n, (row, reward) in enumerate(zip(examples.rows(), rewards, strict=True))
    )


def test_a_group_is_one_however_it_is_cut_into_updates() -> None:
    settings = LearningSection(advantage="otb")
    scored = learner(advantage="otb").score(rewarded())
    whole = by_token([Batch(rows=scored)], settings)[0].rows
    parts = by_token(split(scored, 3, seed=1), settings)
    found = {row.origin: row for batch in parts for row in batch.rows}
    assert [found[row.origin] for row in whole] == list(whole) and len(parts) == 3
    first, *_ = TOKEN_ADVANTAGES["otb"](scored[:3], settings)
    assert [a for a, mine in zip(whole[0].advantages, whole[0].loss_mask, strict=True) if mine] == first
    assert whole[0].advantage == pytest.approx(sum(first) / len(first)) and not whole[0].energies
    assert not any(a for a, mine in zip(whole[0].advantages, whole[0].loss_mask, strict=True) if not mine)


@pytest.mark.parametrize(("name", "loss"), [("gtpo", "grpo"), ("gtpo", "gspo"), ("otb", "grpo")])
def test_each_token_is_learnt_from_with_its_own(name: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the step's first update all losses have the gradient of - A log p."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 3 * examples.SHAPE.vocab_size)
    mine = learner(advantage=name, loss=loss, max_grad_norm=1e9, tokens_per_microbatch=25)
    (batch,) = by_token([Batch(rows=mine.score(rewarded()))], mine._section)
    assert len({value for value in batch.rows[0].advantages if value}) > 1
    metrics = mine.update(batch).metrics
    model, total = examples.model(), torch.zeros(())
    for row in batch.rows:
        total = total - (examples.naive_values(model, row) * torch.tensor(row.advantages[1:])).sum()
    (total / batch.num_loss_tokens).backward()
    expected = -sum(sum(row.advantages) for row in batch.rows) / batch.num_loss_tokens
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    examples.assert_gradients(mine._policy, model)


def test_rewards_stand_for_advantages_until_tokens_are_scored() -> None:
    assert advantage_of(LearningSection(advantage="gtpo"))([1.0, 0.0]) == (1.0, 0.0)
    assert [LearningSection(advantage=name).scores_first for name in ("grpo", "gtpo", "otb")] == [False, False, True]


def test_a_loss_with_one_advantage_for_an_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match='"gmpo" has one advantage for all tokens of an attempt'):
        LearningSection(loss="gmpo", advantage="otb")
