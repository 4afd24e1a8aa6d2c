"""One optimizer update over packed rows, for any loss on token log-probabilities. GRPO and SFT are two such losses.

Owns optimizers, learning rate, gradient clipping, the guard against numbers that are not finite, and their state on
disk. Rows are given whole to every rank; each computes its share, and numbers are summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rocstar.errors import RunHalted
from rocstar.learning.forward import hidden_states, packing, pass_shape
from rocstar.learning.head import ChunkLoss, Head, backward_tokens, score_tokens
from rocstar.learning.optimizers import Schedule, set_rates
from rocstar.learning.pack import MicroBatch, pack
from rocstar.learning.policy import Policy, load_state, moments, restore_moments, save_state, trained
from rocstar.learning.ranks import reshard

Found = list[tuple[MicroBatch, torch.Tensor, torch.Tensor]]
"""Micro-batches of this rank with logprobs_K and entropies_K."""
MicroLoss = Callable[[MicroBatch, Callable[[], torch.Tensor]], ChunkLoss]
"""(micro-batch, what gives its tokens' logprobs [K] by one more pass through the head) -> the loss of any chunk."""
MOST_SKIPPED = 3  # updates in a row; one bad batch is passed over, more are not chance


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """What a pass found, one list per row; each [T], 0 where no loss was taken."""

    logprobs: list[list[float]]
    """Natural log, of the full softmax after temperature."""
    entropies: list[list[float]]
    """Nats, of the same distribution."""


class Updater:
    """Weights and optimizers of one stage."""

    def __init__(
        self,
        policy: Policy,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        *,
        max_grad_norm: float,
        tokens_per_microbatch: int,
        temperature: float = 1.0,
    ) -> None:
        self.policy = policy
        self.updates = 0
        self._optimizers = optimizers
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._budget = tokens_per_microbatch
        self._on_cpu = pass_shape(policy.model, recomputed=policy.recomputes) if policy.device.type == "cpu" else None
        self._temperature = temperature
        self._skipped = 0

    def pack(self, ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]]) -> list[MicroBatch]:
        """This rank's share."""
        policy, ranks = self.policy, self.policy.ranks
        return pack(
            ids,
            counted,
            self._budget,
            policy.device,
            **packing(policy.model),
            rank=ranks.rank,
            ranks=ranks.size,
            on_cpu=self._on_cpu,
        )

    @torch.no_grad()
    def score(
        self, ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]], energies: Found | None = None
    ) -> TokenNumbers:
        """Numbers of all rows under the current weights. energies: gets the squared norm of the gradient of each
        token's logprob by its logits, as if it were a logprob."""
        self.policy.model.eval()
        found: Found = []
        with self.policy.head(self._temperature) as head:
            for micro in self.pack(ids, counted):
                with self.policy.autocast():
                    hidden = hidden_states(self.policy.model, micro)
                    own = None if energies is None else torch.empty(len(micro.targets_K), device=hidden.device)
                    found.append((micro, *score_tokens(head, hidden[micro.places_K], micro.targets_K, own)))
                if energies is not None and own is not None:
                    energies.append((micro, own, own))
        reshard(self.policy.model)
        return self.collected(counted, found)

    def update(
        self,
        ids: Sequence[Sequence[int]],
        counted: Sequence[Sequence[bool]],
        loss_of: MicroLoss,
        sums: dict[str, torch.Tensor],
        *,
        entropy_gradient: bool = False,
        traced: Found | None = None,
    ) -> tuple[Found, dict[str, float]]:
        """One update; `collected` makes rows' numbers of what it found. Losses add what they want reported to `sums`,
        which must hold `loss`; metrics are these, summed, and grad_norm, learning_rate and skipped (1: the gradient was
        not finite and weights were left alone). traced: gets the norm of each token's gradient at its hidden state, as
        if it were a logprob.

        Raises RunHalted after MOST_SKIPPED of those in a row."""
        self.policy.without_dropout()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        found: Found = []
        total, learnt, micros = sum(map(len, ids)), 0, self.pack(ids, counted)
        mine = sum(len(ids[i]) for micro in micros for i in micro.indices)
        self.policy.learnt = 0, total
        with self.policy.head(self._temperature) as head:
            for micro in micros:
                logprobs_K, entropies_K, gradient_KD = self._backward(head, micro, loss_of, entropy_gradient)
                found.append((micro, logprobs_K, entropies_K))
                if traced is not None:
                    traced.append((micro, gradient_KD.float().norm(dim=1), entropies_K))
                learnt += sum(len(ids[i]) for i in micro.indices)
                self.policy.learnt = total * learnt // max(mine, 1), total
        metrics = self.policy.ranks.sum(sums)
        return found, {**metrics, **self._step(metrics["loss"])}

    def collected(self, counted: Sequence[Sequence[bool]], found: Found) -> TokenNumbers:
        """Numbers of all rows, from all ranks; collective."""
        mine = [(micro.indices, logprobs.tolist(), entropies.tolist()) for micro, logprobs, entropies in found]
        logprobs_of = [[0.0] * len(row) for row in counted]
        entropies_of = [[0.0] * len(row) for row in counted]
        for indices, logprobs, entropies in (part for rank in self.policy.ranks.gather(mine) for part in rank):
            places = ((i, t) for i in indices for t, yes in enumerate(counted[i]) if yes and t)
            for (i, t), logprob, entropy in zip(places, logprobs, entropies, strict=True):
                logprobs_of[i][t], entropies_of[i][t] = logprob, entropy
        return TokenNumbers(logprobs=logprobs_of, entropies=entropies_of)

    def save(self, folder: Path) -> None:
        """fp32 weights, optimizer state and counters. Collective. Raises OSError, and RunHalted for weights that are
        not finite."""
        self.policy.require_finite()
        weights = {f"weights.{name}": value.detach() for name, value in trained(self.policy.model)}
        counters = torch.tensor([self.updates, self.policy.version])
        save_state(folder, {**weights, **moments(self.policy.model, self._optimizers), "counters": counters})

    def restore(self, folder: Path) -> None:
        """Weights, moments and the update count go on; the numbers of the update stay this learner's own."""
        self.policy.restore(folder)
        restore_moments(folder, self.policy.model, self._optimizers)
        counters = torch.zeros(2, dtype=torch.long)
        load_state(folder, {"counters": counters})
        self.updates, self.policy.version = counters.tolist()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _backward(
        self, head: Head, micro: MicroBatch, loss_of: MicroLoss, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with self.policy.autocast():
            hidden = hidden_states(self.policy.model, micro)
            wanted = hidden.detach()[micro.places_K]
            loss = loss_of(micro, lambda: score_tokens(head, wanted, micro.targets_K)[0])
            logprobs, entropies, gradient_KD = backward_tokens(
                head, wanted, micro.targets_K, loss, entropy_gradient=entropy_gradient
            )
        gradient = torch.zeros_like(hidden).index_copy_(0, micro.places_K, gradient_KD)
        hidden.backward(gradient)  # type: ignore[no-untyped-call]
        return logprobs, entropies, gradient_KD

    def _step(self, loss: float) -> dict[str, float]:
        parameters = [p for p in self.policy.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        rate = set_rates(self._optimizers, self._schedule(self.updates))
        if not (math.isfinite(total) and math.isfinite(loss)):
            self._skip(total, loss)
            return {"grad_norm": total, "learning_rate": rate, "skipped": 1.0}
        torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        self._skipped = 0
        self.updates += 1
        self.policy.version += 1  # before any weight changes: whoever is interrupted sees that they may have
        for optimizer in self._optimizers:
            optimizer.step()
        return {"grad_norm": total, "learning_rate": rate, "skipped": 0.0}

    def _skip(self, norm: float, loss: float) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._skipped += 1
        if self._skipped >= MOST_SKIPPED:
            self.policy.require_finite()
            raise RunHalted(
                f"{self._skipped} updates in a row gave no finite gradient (loss {loss:g}, gradient norm {norm:g}); "
                "the weights were left as they were before; lower the learning rate and resume from the last checkpoint"
            )
