"""The LM head in chunks: log-probabilities of given tokens and their gradient, never all logits of a row.

Hidden states become a detached leaf; each chunk of it goes through the head, its loss is taken and back-propagated at
once, and the leaf's gradient is what the layers below need. So a chunk's logits are gone before the next one's are
made. Source: ours; T = 4,096 at V = 151,936 takes 0.95 GB instead of 9.5 (benchmarks/learner_memory.py).

Hot path; its slow twin is the naive form in tests/learning/test_head.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

CHUNK_ELEMENTS = 2**26  # logits of one chunk: 256 MiB in fp32; 441 tokens at V = 151,936, everything at V = 512

ChunkLoss = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""(logprobs_C, entropies_C, which of the K tokens) -> scalar, the sum over these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Output embeddings as a function of hidden states."""

    weight: torch.Tensor
    """[V, D]; gradients are added to its `.grad`."""
    bias: torch.Tensor | None
    """[V]."""
    temperature: float = 1.0
    """Logits are divided by it."""

    def chunks(self, count: int) -> list[slice]:
        size = max(1, CHUNK_ELEMENTS // self.weight.shape[0])
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self.weight, self.bias).float()
        return logits if self.temperature == 1.0 else logits / self.temperature


@torch.no_grad()
def score_tokens(head: Head, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target under the full softmax after temperature, and its entropy; nats, [K]."""
    logprobs, entropies = (hidden_KD.new_empty(len(targets_K), dtype=torch.float) for _ in range(2))
    for chunk in head.chunks(len(targets_K)):
        everything = head.logits(hidden_KD[chunk]).log_softmax(-1)
        logprobs[chunk] = everything.gather(-1, targets_K[chunk, None]).squeeze(-1)
        entropies[chunk] = entropy_of(everything)
    return logprobs, entropies


def backward_tokens(
    head: Head, hidden_KD: torch.Tensor, targets_K: torch.Tensor, loss: ChunkLoss, *, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `score_tokens`, and takes the gradient of the summed `loss`: [K, D] for the hidden states comes third, the
    head's own is added to its weight. Entropies are part of the graph only where `entropy_gradient` says so."""
    logprobs, entropies = (hidden_KD.new_empty(len(targets_K), dtype=torch.float) for _ in range(2))
    gradient_KD = torch.empty_like(hidden_KD)
    for chunk in head.chunks(len(targets_K)):
        leaf = hidden_KD[chunk].detach().requires_grad_()
        everything = head.logits(leaf).log_softmax(-1)
        chosen = everything.gather(-1, targets_K[chunk, None]).squeeze(-1)
        entropy = entropy_of(everything if entropy_gradient else everything.detach())
        loss(chosen, entropy, chunk).backward()  # type: ignore[no-untyped-call]
        logprobs[chunk], entropies[chunk] = chosen.detach(), entropy.detach()
        assert leaf.grad is not None
        gradient_KD[chunk] = leaf.grad
        del everything, chosen, entropy
    return logprobs, entropies, gradient_KD


def entropy_of(everything_CV: torch.Tensor) -> torch.Tensor:
    """[C] nats, of rows of log-probabilities."""
    entropy: torch.Tensor = -torch.linalg.vecdot(everything_CV.exp(), everything_CV)
    return entropy
