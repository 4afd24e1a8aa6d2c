"""Log-probabilities and entropies of given tokens, without holding [N, T, V] in fp32 for a large vocabulary.

Hot path; its slow twin is the naive form in tests/learning/test_logprobs.py."""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 2**24  # logits looked at in fp32 at once: 64 MiB


def token_logprobs(model: Any, ids_NT: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(ids[:, t] | ids[:, :t]) and the entropy of that distribution, natural log, after `temperature`.

    ids_NT is right-padded, so causal attention alone keeps padding away from real tokens. Both results are
    [N, T - 1]: entry t belongs to token t + 1. Differentiable."""
    logits = model(input_ids=ids_NT, use_cache=False).logits[:, :-1]
    targets = ids_NT[:, 1:].unsqueeze(-1)
    rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[0] * logits.shape[2]))
    pieces = [
        _logprobs_and_entropy(logits[:, begin : begin + rows], targets[:, begin : begin + rows], temperature)
        for begin in range(0, logits.shape[1], rows)
    ]
    return torch.cat([p[0] for p in pieces], 1), torch.cat([p[1] for p in pieces], 1)


def _logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = logits.float() if temperature in (0.0, 1.0) else logits.float() / temperature
    everything = torch.log_softmax(scaled, dim=-1)
    entropy = -(everything.exp() * everything).sum(-1)
    return everything.gather(-1, targets).squeeze(-1), entropy
