"""The LM head in chunks: log-probabilities of given tokens and their gradient, never all logits of a row.

Each chunk of tokens goes through the head, its loss is taken, and the gradient of its logits is turned at once into
one of hidden states, which the layers below need, and one of the head's weight, which is added in place. So a chunk's
logits are gone before the next one's are made. With p the softmax of logits z after temperature, H its entropy, y the
token,

    d log p_y / dz = onehot(y) - p          dH / dz = -p (log p + H)

Source: ours; figures by benchmarks/learner_memory.py. Hot path; its slow twin is the naive form in
tests/learning/test_head.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """Ids below it have a token; the rows above are padding, which no engine draws. None: all are known."""

    def chunks(self, count: int) -> list[slice]:
        elements = GPU_CHUNK_ELEMENTS if self.weight.is_cuda else CHUNK_ELEMENTS
        size = max(1, elements // self.weight.shape[0])
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def logprobs(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """[C, V] fp32."""
        logits = linear(hidden_CD, self.weight, self.bias).float()
        if self.known is not None:
            logits[:, self.known :] = NEVER
        return (logits if self.temperature == 1.0 else logits / self.temperature).log_softmax(-1)

    def backward(self, gradient_CV: torch.Tensor, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Gradient of the logits after temperature -> of the hidden states, [C, D]; uses `gradient_CV` up."""
        if self.temperature != 1.0:
            gradient_CV /= self.temperature
        if self.bias is not None and self.bias.requires_grad:
            _add(self.bias, gradient_CV.sum(0))
        narrow_CV = gradient_CV.to(hidden_CD.dtype)
        if self.weight.requires_grad and _adds_rounded(self.weight):
            _add_rounded(self.weight, gradient_CV, hidden_CD)
        elif self.weight.requires_grad and (self.weight.grad is None or hidden_CD.dtype != self.weight.dtype):
            _add(self.weight, narrow_CV.T @ hidden_CD)
        elif self.weight.grad is not None:
            self.weight.grad.addmm_(narrow_CV.T, hidden_CD)  # a product of its own would need as much memory again
        return narrow_CV @ self.weight.to(hidden_CD.dtype)


@torch.no_grad()
def score_tokens(
    head: Head, hidden_KD: torch.Tensor, targets_K: torch.Tensor, energies_K: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target under the full softmax after temperature, and its entropy; nats, [K]. energies:
    gets |onehot(y) - p|^2, which is 1 - 2 p_y + sum p^2."""
    logprobs, entropies = (hidden_KD.new_empty(len(targets_K), dtype=torch.float) for _ in range(2))
    for chunk in head.chunks(len(targets_K)):
        everything = head.logprobs(hidden_KD[chunk])
        logprobs[chunk] = everything.gather(-1, targets_K[chunk, None]).squeeze(-1)
        entropies[chunk] = -torch.linalg.vecdot(everything.exp(), everything)
        if energies_K is not None:  # as a sum of squares, since the other form leaves only rounding where p_y is near 1
            slopes = everything.exp_().scatter_add_(1, targets_K[chunk, None], -torch.ones_like(everything[:, :1]))
            energies_K[chunk] = slopes.norm(dim=1).square()
    return logprobs, entropies


@torch.no_grad()
def backward_tokens(
    head: Head, hidden_KD: torch.Tensor, targets_K: torch.Tensor, loss: ChunkLoss, *, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `score_tokens`, and takes the gradient of the summed `loss`: [K, D] for the hidden states comes third, the
    head's own is added to its weight. It flows through entropies only where `entropy_gradient` says so."""
    logprobs, entropies = (hidden_KD.new_empty(len(targets_K), dtype=torch.float) for _ in range(2))
    gradient_KD = torch.empty_like(hidden_KD)
    for chunk in head.chunks(len(targets_K)):
        everything, targets = head.logprobs(hidden_KD[chunk]), targets_K[chunk, None]
        chances = everything.exp()
        logprobs[chunk] = chosen = everything.gather(-1, targets).squeeze(-1).requires_grad_()
        entropies[chunk] = entropy = (-torch.linalg.vecdot(chances, everything)).requires_grad_(entropy_gradient)
        with torch.enable_grad():
            loss(chosen, entropy, chunk).backward()  # type: ignore[no-untyped-call]
        slopes = torch.zeros_like(chosen) if chosen.grad is None else chosen.grad
        if entropy.grad is not None:
            slopes_CV = everything.add_(entropy[:, None]).mul_(entropy.grad[:, None]).add_(slopes[:, None])
            gradient_CV = chances.mul_(slopes_CV).neg_()
        else:
            gradient_CV = chances.mul_(-slopes[:, None])
        del everything
        gradient_CV.scatter_add_(1, targets, slopes[:, None])
        gradient_KD[chunk] = head.backward(gradient_CV, hidden_KD[chunk])
    return logprobs, entropies, gradient_KD


def _adds_rounded(weight: torch.Tensor) -> bool:
    return weight.is_cuda and torch.is_autocast_enabled("cuda") and torch.version.hip is None


def _add_rounded(weight: torch.Tensor, gradient_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """The product of 16 bits that autocast promises, with sums and result in fp32, straight into the gradient: in fp32
    all over it takes a quarter of an update at 0.5B (one H100)."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    left, right = (each.to(torch.get_autocast_dtype("cuda")) for each in (gradient_CV.T, hidden_CD))
    torch.addmm(weight.grad, left, right, out_dtype=torch.float32, out=weight.grad)


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
