"""The chunked log-probabilities against the naive form."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from rocstar.learning import logprobs
from rocstar.learning.logprobs import token_logprobs
from tests.learning.examples import policy

IDS = torch.randint(0, 160, (3, 14), generator=torch.Generator().manual_seed(3))


def naive(model: torch.nn.Module, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    everything = torch.log_softmax(model(input_ids=ids).logits[:, :-1].double() / temperature, -1)
    picked = torch.stack([everything[n, t, ids[n, t + 1]] for n in range(3) for t in range(13)]).view(3, 13)
    return picked, -(everything.exp() * everything).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3 * 160 * 4, 2**24], ids=["one token", "four tokens", "all"])
def test_chunks_change_nothing(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    model = policy().model.eval()
    values, entropies = token_logprobs(model, IDS, temperature)
    expected, spread = naive(model, IDS, temperature)
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), spread, atol=1e-5, rtol=0)
    (values.sum() + entropies.sum()).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (expected.sum() + spread.sum()).backward()
    for gradient, parameter in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-3, rtol=1e-4)


def test_padding_on_the_right_changes_no_real_token() -> None:
    model = policy().model.eval()
    padded = torch.nn.functional.pad(IDS, (0, 6))
    torch.testing.assert_close(
        token_logprobs(model, padded, 1.0)[0][:, :13], token_logprobs(model, IDS, 1.0)[0], atol=1e-5, rtol=0
    )
