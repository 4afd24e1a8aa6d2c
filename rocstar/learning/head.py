"""The LM head in chunks: log-probabilities of given tokens and their gradient, never all logits of a row.

Each chunk of tokens goes through the head, its loss is computed, and the gradient of its logits becomes at once that of
the hidden states, which the layers below need, and that of the head's weight, which is added in place. A chunk's logits
are freed before the next chunk's are computed. With p the softmax of logits z after temperature, H its entropy, y the
token,

    d log p_y / dz = onehot(y) - p          dH / dz = -p (log p + H)

Source: ours; figures by benchmarks/learner_memory.py. Hot path; its slow twin is the naive form in
tests/learning/test_head.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from rocstar.learning.memory import CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS

NEVER = -1e30  # a logit of probability 0; minus infinity would make the entropy nan

ChunkLoss = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""(logprobs_C, entropies_C, which of the K tokens) -> scalar, the sum over these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Output embeddings as a function of hidden states."""

    weight: torch.Tensor
    """[V, D]; gradients are added to its `.grad` where it is trained."""
    bias: torch.Tensor | None
    """[V]; likewise."""
    temperature: float = 1.0
    """Logits are divided by it."""
    known: int | None = None
    """Ids below it have a token; the rows above are padding, which no engine samples. None: all ids are known."""
    exact: bool = False
    """Computed in fp32, inside autocast too."""

    def chunks(self, count: int) -> list[slice]:
        elements = GPU_CHUNK_ELEMENTS if self.weight.is_cuda else CHUNK_ELEMENTS
        size = max(1, elements // self.weight.shape[0])
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def logprobs(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """[C, V] fp32."""
        with self._precision():
            logits = linear(hidden_CD.float() if self.exact else hidden_CD, self.weight, self.bias).float()
        if self.known is not None:
            logits[:, self.known :] = NEVER
        return (logits if self.temperature == 1.0 else logits / self.temperature).log_softmax(-1)

    def backward(self, gradient_CV: torch.Tensor, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Gradient of the logits after temperature -> of the hidden states, [C, D]; overwrites `gradient_CV`."""
        with self._precision():
            return self._backward(gradient_CV, hidden_CD.float() if self.exact else hidden_CD)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.weight.device.type, enabled=False) if self.exact else nullcontext()

    def _backward(self, gradient_CV: torch.Tensor, hidden_CD: torch.Tensor) -> torch.Tensor:
        if self.temperature != 1.0:
            gradient_CV /= self.temperature
        first = self.weight.grad is None
        for parameter in (self.weight, self.bias):
            if parameter is not None and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.bias is not None and self.bias.grad is not None:
            self.bias.grad += gradient_CV.sum(0)
        narrow_CV, gathered = gradient_CV.to(hidden_CD.dtype), self.weight.grad
        if gathered is None:
            pass
        elif self.weight.is_cuda and torch.is_autocast_enabled("cuda") and torch.version.hip is None:
            # As autocast does: a 16-bit product with fp32 sums, straight into the gradient. All in fp32 it takes a
            # quarter of an update at 0.5B (one H100).
            left, right = (each.to(torch.get_autocast_dtype("cuda")) for each in (gradient_CV.T, hidden_CD))
            torch.addmm(gathered, left, right, out_dtype=torch.float32, out=gathered)
        elif first or hidden_CD.dtype != self.weight.dtype:
            gathered += narrow_CV.T @ hidden_CD
        else:
            gathered.addmm_(narrow_CV.T, hidden_CD)  # a separate product would need as much memory again
        return narrow_CV @ self.weight.to(hidden_CD.dtype)


@torch.no_grad()
def score_tokens(head: Head, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """[2, K] log-probability of each target under the full softmax after temperature, and its entropy, nats."""
    numbers = hidden_KD.new_empty(2, len(targets_K), dtype=torch.float)
    for chunk in head.chunks(len(targets_K)):
        everything, targets = head.logprobs(hidden_KD[chunk]), targets_K[chunk, None]
        numbers[0, chunk] = everything.gather(-1, targets).squeeze(-1)
        numbers[1, chunk] = _entropies(everything.exp(), everything)
    return numbers


@torch.no_grad()
def backward_tokens(
    head: Head, hidden_KD: torch.Tensor, targets_K: torch.Tensor, loss: ChunkLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `score_tokens`, and also computes the gradient of the summed `loss`: [K, D] for the hidden states is returned
    second, the head's is added to its weight's."""
    numbers = hidden_KD.new_empty(2, len(targets_K), dtype=torch.float)
    gradient_KD = torch.empty_like(hidden_KD)
    for chunk in head.chunks(len(targets_K)):
        everything, targets = head.logprobs(hidden_KD[chunk]), targets_K[chunk, None]
        chances = everything.exp()
        numbers[0, chunk] = chosen = everything.gather(-1, targets).squeeze(-1).requires_grad_()
        numbers[1, chunk] = entropy = _entropies(chances, everything).requires_grad_()
        with torch.enable_grad():
            loss(chosen, entropy, chunk).backward()  # type: ignore[no-untyped-call]
        slopes = torch.zeros_like(chosen) if chosen.grad is None else chosen.grad
        if entropy.grad is not None:
            everything.add_(entropy[:, None]).mul_(entropy.grad[:, None]).add_(slopes[:, None])
            gradient_CV = chances.mul_(everything).neg_()
        else:
            gradient_CV = chances.mul_(-slopes[:, None])
        del everything
        gradient_CV.scatter_add_(1, targets, slopes[:, None])
        gradient_KD[chunk] = head.backward(gradient_CV, hidden_KD[chunk])
        del chances, gradient_CV  # one tensor; the next chunk would be computed beside it
    return numbers, gradient_KD


def _entropies(chances_CV: torch.Tensor, everything_CV: torch.Tensor) -> torch.Tensor:
    """[C] nats. Autocast would round the probabilities, their logarithms and the sum to 16 bits."""
    with torch.autocast(chances_CV.device.type, enabled=False):
        sums_C: torch.Tensor = torch.linalg.vecdot(chances_CV, everything_CV)
    return -sums_C
