"""What every policy loss promises: pure, token by token, finite, and downhill is where the advantage points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.errors import ConfigError
from rocstar.learning.methods import LOSSES, Losses, loss_of
from rocstar.protocols import PolicyTokens
from tests.contracts.own import own, refusal

TOKENS = 200
ATTEMPT = 10  # tokens of each
TokenLoss = Callable[[PolicyTokens], Losses]


def named(name: str, *folders: Path) -> TokenLoss:
    return loss_of(LearningSection(loss=name), folders)[0]


@pytest.fixture(params=[*LOSSES, *own("learning.loss", "cispo")])
def loss(request: pytest.FixtureRequest) -> TokenLoss:
    return named(request.param)


def tokens(seed: int = 0, count: int = TOKENS, spread: float = 0.5) -> PolicyTokens:
    """Old and sampled logprobs lie `spread` beside the current ones, in the mean; half the advantages are positive."""
    chance = torch.Generator().manual_seed(seed)
    logprobs, old, sampled, advantages = torch.randn(4, count, generator=chance)
    logprobs, attempts = -logprobs.abs(), torch.arange(count) // ATTEMPT
    return PolicyTokens(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs + spread * old,
        sampled_logprobs=logprobs + spread * sampled,
        advantages=advantages[attempts * ATTEMPT],
        attempts=attempts,
    )


def part(whole: PolicyTokens, places: slice) -> PolicyTokens:
    return replace(whole, **{field.name: getattr(whole, field.name)[places] for field in fields(whole)})


def gradient(loss: TokenLoss, given: PolicyTokens) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss(given)[0].sum(), given.logprobs)
    return found


def test_each_token_gets_one_finite_loss_gradient_and_bound(loss: TokenLoss) -> None:
    for spread in (0.0, 0.5, 40.0):
        given = tokens(spread=spread)
        losses, bounded = loss(given)
        assert losses.shape == bounded.shape == (TOKENS,) and bounded.dtype == torch.bool
        assert losses.isfinite().all() and gradient(loss, given).isfinite().all()
    losses, bounded = loss(tokens(count=0))
    assert losses.shape == bounded.shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_a_tokens_loss_follows_from_its_own_numbers_alone_or_from_its_attempt(name: str) -> None:
    (loss, whole_attempts), whole = loss_of(LearningSection(loss=name)), tokens()
    begin = ATTEMPT if whole_attempts else 1
    pieces = [part(whole, places) for places in (slice(0, begin), slice(begin, 70), slice(70, TOKENS))]
    for together, apart in zip(loss(whole), zip(*map(loss, pieces), strict=True), strict=True):
        torch.testing.assert_close(together, torch.cat(apart), rtol=1e-6, atol=0)


def test_the_same_tokens_get_the_same_loss_and_stay_as_they_are(loss: TokenLoss) -> None:
    given, before = tokens(), tokens()
    first, second = loss(given), loss(given)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    for field in fields(given):
        assert torch.equal(getattr(given, field.name), getattr(before, field.name))
        assert getattr(given, field.name).requires_grad == (field.name == "logprobs")


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_good_tokens_become_likelier_and_bad_ones_do_not(loss: TokenLoss, spread: float) -> None:
    given = tokens(spread=spread)
    slope = gradient(loss, given) * given.advantages
    assert (slope <= 0).all()
    if not spread:  # the weights that wrote them: nothing is clipped yet
        assert (slope[given.advantages > 0] < 0).all()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("1 / 0", "failed on 3 tokens: ZeroDivisionError: division by zero"),
        ("-tokens.logprobs", "returned Tensor; let it return two tensors: the loss"),
        ("-tokens.logprobs, 0.5", "returned Tensor, float; let it return two tensors"),
        ("-tokens.logprobs.sum(), tokens.logprobs > 0", "gave losses of shape ()"),
        ("tokens.advantages, tokens.logprobs > 0", "without a gradient"),
        ("sys.exit(3)", "SystemExit: 3 (plug.py, line 2)"),
        ("-tokens.logprobs, tokens.logprobs.exp()", "bounds of shape (3,) and torch.float32 for 3 tokens"),
        ("-tokens.logprobs + float('nan'), tokens.logprobs > 0", "losses [nan, nan"),
        ("-tokens.logprobs * tokens.advantages.mul_(2), tokens.logprobs > 0", "changed tokens.advantages in place"),
    ],
)
def test_a_loss_that_cannot_be_learnt_from_is_refused(modules: Path, made: str, said: str) -> None:
    code = f"import sys\ndef own(tokens, settings): return {made}\nof_tokens = lambda tokens: 0"
    assert said in refusal(modules, "learning.loss", code, lambda name: named(name, modules))


def test_a_loss_that_takes_something_else_is_refused(modules: Path) -> None:
    told = refusal(modules, "learning.loss", "def own(tokens): ...", lambda name: named(name, modules))
    assert "should take (tokens, settings)" in told


def test_settings_that_no_loss_can_be_taken_under_are_refused_before_a_step() -> None:
    with pytest.raises(ConfigError, match=r"learning\.loss = 'sapo' (failed on 3 tokens|gave the losses)"):
        loss_of(LearningSection(loss="sapo", gate_right=1e-38))


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ("1 / 0", "failed on 6 tokens: ZeroDivisionError: division by zero (plug.py, line 3)"),
        ("-tokens.logprobs[:-1], tokens.logprobs[:-1] > 0", "gave losses of shape (5,)"),
        ("-tokens.logprobs.detach(), tokens.logprobs > 0", "without a gradient"),
    ],
)
def test_a_loss_that_goes_wrong_on_the_tokens_of_a_step_is_told(modules: Path, later: str, said: str) -> None:
    code = f"def own(tokens, settings):\n    if len(tokens.logprobs) > 3:\n        return {later}\n"
    code += "    return -tokens.logprobs, tokens.logprobs > 0\n"
    assert said in refusal(modules, "learning.loss", code, lambda name: named(name, modules)(tokens(count=6)))
