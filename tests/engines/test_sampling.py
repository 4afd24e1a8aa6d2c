"""The random numbers (pinned) and the law of the draw."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines.torch_decoder import draw, uniforms

DRAWS = 20_000
LOGITS = torch.tensor([1.0, 0.5, -0.5, 2.0, -3.0])


def numbers(seeds: list[int], counters: list[int]) -> list[float]:
    return list(uniforms(np.array(seeds, dtype=np.int64), np.array(counters, dtype=np.int64)))


def test_the_first_numbers_are_those_of_splitmix64() -> None:
    # The published outputs of SplitMix64 for seed 0, their upper 53 bits over 2**53.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert numbers([0, 0, 0], [0, 1, 2]) == [(word >> 11) / 2**53 for word in published]
    assert all(0 <= number < 1 for number in numbers([2**63 - 1] * 1000, list(range(1000))))


def drawn(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Share of each token over many draws, and the probability each token reported."""
    noise = torch.from_numpy(uniforms(np.arange(DRAWS), np.zeros(DRAWS, dtype=np.int64)))
    tokens, logprobs = draw(
        LOGITS.expand(DRAWS, -1),
        np.full(DRAWS, temperature),
        np.full(DRAWS, top_p),
        np.full(DRAWS, top_k, dtype=np.int64),
        noise,
    )
    told = np.zeros(len(LOGITS))
    told[tokens.numpy()] = logprobs.exp().numpy()
    return np.bincount(tokens.numpy(), minlength=len(LOGITS)) / DRAWS, told


@pytest.mark.parametrize(
    ("settings", "support"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 3]),
        ({"top_p": 0.6}, [0, 3]),  # the likeliest has .59, so the second is still needed
        ({"top_p": 0.1}, [3]),
        ({"top_k": 3, "top_p": 0.99}, [0, 1, 3]),
        ({"temperature": 0.0}, [3]),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(settings: dict[str, float], support: list[int]) -> None:
    shares, told = drawn(**settings)  # type: ignore[arg-type]
    scaled = (LOGITS / (settings.get("temperature") or 1.0)).double().numpy()
    full = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
    law = full * np.isin(np.arange(len(LOGITS)), support)
    law /= law.sum()
    assert set(np.flatnonzero(shares)) <= set(support)
    assert np.all(np.abs(shares - law) < 5 * np.sqrt(law * (1 - law) / DRAWS) + 1e-12)
    assert told[shares > 0] == pytest.approx(full[shares > 0], rel=1e-5), "before truncation; greedy at temperature 1"


@pytest.mark.parametrize("size", [1, 5, 32, 33, 1000])
def test_a_number_finds_the_token_at_its_share_of_the_running_sum(size: int) -> None:
    weights = torch.rand(50, size, generator=torch.Generator().manual_seed(size))
    noise = torch.from_numpy(np.linspace(0, 1 - 2**-53, 50))
    tokens, _ = draw(weights.log(), np.ones(50), np.ones(50), np.zeros(50, dtype=np.int64), noise)
    ends = weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)
    expected = (ends <= noise.unsqueeze(1) - 1e-6).sum(-1)
    latest = (ends <= noise.unsqueeze(1) + 1e-6).sum(-1).clamp(max=size - 1)
    assert ((expected <= tokens) & (tokens <= latest)).all()


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((3, 70), -torch.inf)
    logits[:, 40] = 0.0
    noise = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits, np.ones(3), np.ones(3), np.zeros(3, dtype=np.int64), noise)
    assert (tokens.tolist(), logprobs.tolist()) == ([40] * 3, [0.0] * 3)
