"""The chunked LM head against the naive form: same numbers, same gradients, no tensor of a whole row's vocabulary."""

from __future__ import annotations

from weakref import ref

import pytest

pytest.importorskip("torch")

import torch

from rocstar.learning import head as head_module
from rocstar.learning.head import ChunkLoss, Head, backward_tokens, score_tokens

V, D, K = 97, 12, 23
HIDDEN = torch.randn(K, D, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(2))
TARGETS = torch.randint(0, V, (K,), generator=torch.Generator().manual_seed(3))
SCALE = torch.linspace(-1, 2, K)


def loss(logprobs: torch.Tensor, entropies: torch.Tensor, chunk: slice) -> torch.Tensor:
    return (logprobs.exp() * SCALE[chunk]).sum() + 0.3 * entropies.sum()


def loss_without(logprobs: torch.Tensor, entropies: torch.Tensor, chunk: slice) -> torch.Tensor:
    return loss(logprobs, entropies.detach(), chunk)


def naive(temperature: float, loss: ChunkLoss) -> tuple[torch.Tensor, ...]:
    """logprobs, entropies, gradient of the hidden states, gradient of the head."""
    hidden, weight = HIDDEN.double().requires_grad_(), WEIGHT.double().requires_grad_()
    everything = torch.log_softmax(hidden @ weight.T / temperature, -1)
    logprobs, entropies = everything[torch.arange(K), TARGETS], -(everything.exp() * everything).sum(-1)
    loss(logprobs, entropies, slice(None)).backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(
    ("tokens", "loss", "temperature"), [(1, loss, 1.0), (4, loss_without, 0.6), (4, loss, 0.6), (K + 9, loss, 0.6)]
)
def test_chunks_change_nothing(
    tokens: int, loss: ChunkLoss, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", tokens * V)
    weight = WEIGHT.clone().requires_grad_()
    head = Head(weight=weight, bias=None, temperature=temperature)
    numbers, gradient = backward_tokens(head, HIDDEN, TARGETS, loss)
    for mine, expected in zip((*numbers, gradient, weight.grad), naive(temperature, loss), strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(score_tokens(head, HIDDEN, TARGETS), numbers)


def test_logits_of_a_whole_row_are_never_held_nor_those_of_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's gradient stayed until the next one's was there: one tensor more than the forecast of memory has."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 4 * V)
    largest = most = 0
    made_so_far: list[ref[torch.Tensor]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest, most
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.ndim == 2 and made.shape[1] == V:
                largest = max(largest, made.shape[0])
                made_so_far.append(ref(made))
                most = max(most, len({each.data_ptr() for one in made_so_far if (each := one()) is not None}))
            return made

    with Watch():
        head = Head(weight=WEIGHT.clone().requires_grad_(), bias=None)
        backward_tokens(head, HIDDEN, TARGETS, loss)
    assert (largest, most) == (4, 2)


def test_nothing_to_predict_is_nothing_to_learn() -> None:
    weight = WEIGHT.clone().requires_grad_()
    numbers, gradient = backward_tokens(Head(weight=weight, bias=None), HIDDEN[:0], TARGETS[:0], loss)
    assert (numbers.shape, gradient.shape) == ((2, 0), (0, D)) and weight.grad is None


def test_ids_without_a_token_have_no_probability_and_no_gradient() -> None:
    """Embeddings of published models are padded; the engine never draws such ids, so the ratio must not know them."""
    known = V - 7
    weight, small = WEIGHT.clone().requires_grad_(), WEIGHT[:known].clone().requires_grad_()
    found, wanted = (
        backward_tokens(head, HIDDEN, TARGETS % known, loss)
        for head in (Head(weight=weight, bias=None, known=known), Head(weight=small, bias=None))
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert weight.grad is not None and small.grad is not None
    torch.testing.assert_close(weight.grad[:known], small.grad)
    assert not weight.grad[known:].any()


def test_entropies_are_summed_in_fp32_under_autocast_too() -> None:
    head = Head(weight=WEIGHT.clone().requires_grad_(), bias=None)
    with torch.autocast("cpu", torch.bfloat16):
        laws = head.logprobs(HIDDEN).double()
        scored, learnt = score_tokens(head, HIDDEN, TARGETS), backward_tokens(head, HIDDEN, TARGETS, loss)[0]
    for _, entropies in (scored, learnt):
        torch.testing.assert_close(entropies.double(), -(laws.exp() * laws).sum(-1), atol=1e-5, rtol=1e-5)
