"""One optimizer update over packed rows, for any loss on token log-probabilities: shared by the learners of GRPO and
SFT.

Owns optimizers, learning rate, gradient clipping, the guard against numbers that are not finite, and their state on
disk. Every rank gets all rows and computes its share; results are summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from rocstar.config.sections import LearningSection, SftSection
from rocstar.errors import RunHalted
from rocstar.learning.forward import hidden_states, is_packed, pass_shape
from rocstar.learning.head import ChunkLoss, Head, backward_tokens, score_tokens
from rocstar.learning.optimizers import Schedule, set_rates
from rocstar.learning.pack import MicroBatch, pack
from rocstar.learning.policy import Policy, load_state, moments, restore_moments, save_state, weights_of
from rocstar.learning.ranks import Ranks, reshard, together

Found = list[tuple[MicroBatch, torch.Tensor]]
"""Micro-batches of this rank with numbers of their tokens, [kinds, K]."""
MicroLoss = Callable[[MicroBatch, Callable[[], torch.Tensor]], ChunkLoss]
"""(micro-batch, function that returns its tokens' logprobs [K] by one more pass of the head) -> loss of a chunk."""
SCORED = 1 / 3  # of the work of learning from a token: the pass without its gradient
MOST_SKIPPED = 3  # updates in a row; one bad batch is skipped, more are not chance


class Updater:
    """Weights and optimizers of one stage."""

    role = "learner"

    def __init__(
        self,
        policy: Policy,
        section: LearningSection | SftSection,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        *,
        temperature: float = 1.0,
    ) -> None:
        self.ranks = policy.ranks
        self.updates = 0
        self._policy = policy
        self._optimizers = optimizers
        self._schedule = schedule
        self._max_grad_norm = section.max_grad_norm
        self._budget = section.tokens_per_microbatch
        self._on_cpu = pass_shape(policy.model, recomputed=policy.recomputes) if policy.device.type == "cpu" else None
        self._temperature = temperature
        self._skipped = 0

    @classmethod
    def on_rank(cls, ranks: Ranks, members: Mapping[str, Any], **settings: Any) -> Self:
        """The same learner on a rank above 0."""
        return cls(members["policy"], **settings)

    @together
    def save(self, folder: Path) -> None:
        """fp32 weights, optimizer state and counters, for any number of ranks to restore. Raises OSError, and RunHalted
        for weights that are not finite."""
        self._policy.require_finite()
        model, counters = self._policy.model, torch.tensor([self.updates, self._policy.version])
        save_state(folder, {**weights_of(model), **moments(model, self._optimizers), "counters": counters})

    @together
    def restore(self, folder: Path) -> None:
        """Load weights, moments and the update count; the settings stay this learner's own. Raises OSError."""
        self._policy.restore(folder)
        restore_moments(folder, self._policy.model, self._optimizers)
        counters = torch.zeros(2, dtype=torch.long)
        load_state(folder, {"counters": counters})
        self.updates, self._policy.version = counters.tolist()

    @torch.no_grad()
    def numbers(self, ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]]) -> list[list[list[float]]]:
        """Log-probabilities and entropies of all rows under the current weights, in the shape of `_collected`."""
        self._policy.model.eval()
        found: Found = []
        with self._policy.head(self._temperature) as head:
            for micro in self._counted(ids, self._pack(ids, counted), SCORED):
                with self._policy.autocast():
                    hidden = hidden_states(self._policy.model, micro)
                    numbers = score_tokens(head, hidden[micro.places_K], micro.targets_K)
                found.append((micro, numbers))
        reshard(self._policy.model)
        return self._collected(ids, found)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _update(
        self,
        ids: Sequence[Sequence[int]],
        counted: Sequence[Sequence[bool]],
        loss_of: MicroLoss,
        sums: dict[str, torch.Tensor],
    ) -> tuple[Found, dict[str, float]]:
        """Losses add what they report to `sums`, which must hold `loss`; metrics are these, summed, and grad_norm,
        learning_rate and skipped (1: the gradient was not finite and weights were left unchanged). `Found` holds
        logprobs and entropies.

        Raises RunHalted after MOST_SKIPPED skipped updates in a row."""
        self._policy.without_dropout()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        found: Found = []
        with self._policy.head(self._temperature) as head:
            for micro in self._counted(ids, self._pack(ids, counted)):
                found.append((micro, self._backward(head, micro, loss_of)))
        metrics = self.ranks.sum(sums)
        return found, {**metrics, **self._step(metrics["loss"])}

    def _counted(
        self, ids: Sequence[Sequence[int]], micros: Sequence[MicroBatch], weight: float = 1.0
    ) -> Iterator[MicroBatch]:
        """The micro-batches of a pass over these rows; each counts in the policy's `learnt` once it is done."""
        sizes = [sum(len(ids[i]) for i in micro.indices) for micro in micros]
        share = weight * sum(map(len, ids)) / max(sum(sizes), 1)  # of all ranks' work, for a token of this one's
        (before, total), here = self._policy.learnt, 0
        for micro, size in zip(micros, sizes, strict=True):
            yield micro
            here += size
            self._policy.learnt = before + share * here, total

    def _pack(self, ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]]) -> list[MicroBatch]:
        """This rank's micro-batches."""
        packed = is_packed(self._policy.model)
        return pack(
            ids,
            counted,
            self._budget,
            self._policy.device,
            share=packed,
            side_by_side=not packed,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            on_cpu=self._on_cpu,
        )

    def _collected(self, ids: Sequence[Sequence[int]], found: Found) -> list[list[list[float]]]:
        """[kinds][N][T] numbers of all rows, from all ranks, 0 at tokens without loss; collective."""
        mine = [(micro.tokens_K, numbers.tolist()) for micro, numbers in found]
        parts = [part for rank in self.ranks.gather(mine) for part in rank]
        rows = [[[0.0] * len(row) for row in ids] for _ in parts[0][1]]
        for tokens, numbers in parts:
            for kind, values in zip(rows, numbers, strict=True):
                for (i, t), value in zip(tokens, values, strict=True):
                    kind[i][t] = value
        return rows

    def _backward(self, head: Head, micro: MicroBatch, loss_of: MicroLoss) -> torch.Tensor:
        with self._policy.autocast():
            hidden = hidden_states(self._policy.model, micro)
            predictors = hidden.detach()[micro.places_K]
            loss = loss_of(micro, lambda: score_tokens(head, predictors, micro.targets_K)[0])
            numbers, gradient_KD = backward_tokens(head, predictors, micro.targets_K, loss)
        gradient = torch.zeros_like(hidden).index_copy_(0, micro.places_K, gradient_KD)
        hidden.backward(gradient)  # type: ignore[no-untyped-call]
        return numbers

    def _step(self, loss: float) -> dict[str, float]:
        parameters = [p for p in self._policy.parameters if p.grad is not None]
        norm = norm_of([p.grad for p in parameters if p.grad is not None])
        total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        rate = set_rates(self._optimizers, self._schedule(self.updates))
        if not (math.isfinite(total) and math.isfinite(loss)):
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._skipped += 1
            if self._skipped >= MOST_SKIPPED:
                self._policy.require_finite()
                raise RunHalted(
                    f"{self._skipped} updates in a row gave no finite gradient (loss {loss:g}, gradient norm {total:g}"
                    "); the weights are unchanged; lower the learning rate, or correct your loss or reward, and resume"
                )
            return {"grad_norm": total, "learning_rate": rate, "skipped": 1.0}
        torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        self._skipped = 0
        self.updates += 1
        self._policy.version += 1  # before any weight changes: after an interruption it shows that they may have
        for optimizer in self._optimizers:
            optimizer.step()
        return {"grad_norm": total, "learning_rate": rate, "skipped": 0.0}


def norm_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all together. On a CPU torch's fp32 sum over 136 million squares loses 1.4% of a norm, one over a million
    0.001%, so whole tensors are summed in pieces."""
    pieces = [(one,) if isinstance(one, DTensor) else torch.split(one.flatten(), 2**20) for one in gradients]
    return torch.nn.utils.get_total_norm([piece for some in pieces for piece in some])
