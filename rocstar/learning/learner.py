"""The RL learner: GRPO's clipped token-level update on one process.

Two logprobs exist for every sampled token: the engine's (`sampled_logprobs`) and this learner's own before the first
update of the step (`old_logprobs`). The ratio uses the learner's; the gap between the two is logged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rocstar.config import LearningSection
from rocstar.errors import ContractBroken
from rocstar.learning.logprobs import token_logprobs
from rocstar.learning.loss import kl_to_reference, policy_loss
from rocstar.learning.pack import MicroBatch, pack, spread
from rocstar.learning.policy import Policy
from rocstar.types import Batch, BatchRow, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update was."""

    metrics: dict[str, float]
    rows: tuple[BatchRow, ...]
    """Those it learned from, scored."""


class GrpoLearner:
    """Learner over a Policy."""

    def __init__(self, policy: Policy, settings: LearningSection, *, temperature: float = 1.0) -> None:
        """`temperature` of the rollouts: ratios are taken under the distribution that was sampled from."""
        policy.model.set_attn_implementation("sdpa")
        self._policy = policy
        self._settings = settings
        self._temperature = temperature
        self._updates = 0
        self._optimizer = torch.optim.AdamW(
            policy.parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self._reference: Any = copy.deepcopy(policy.model).eval() if settings.kl_coefficient else None

    def score(self, batch: Batch) -> Batch:
        """Fill in `old_logprobs` and `entropies` ([T], 0 on the first token) under the current weights."""
        rows = batch.rows
        scored: list[BatchRow] = list(rows)
        self._policy.model.eval()
        with torch.no_grad():
            for micro in self._pack(rows):
                logprobs, entropies = token_logprobs(self._policy.model, micro.ids_NT, self._temperature)
                for place, index in enumerate(micro.indices):
                    length = len(rows[index].token_ids) - 1
                    scored[index] = replace(
                        rows[index],
                        old_logprobs=(0.0, *logprobs[place, :length].tolist()),
                        entropies=(0.0, *entropies[place, :length].tolist()),
                    )
        return Batch(rows=tuple(scored))

    def update(self, batch: Batch) -> Update:
        """One optimizer update over all rows. Raises ContractBroken for an empty batch."""
        tokens = batch.num_loss_tokens
        if tokens == 0:
            raise ContractBroken("a learner's batch needs at least one policy token")
        if any(not row.old_logprobs for row in batch.rows):
            batch = self.score(batch)
        self._policy.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        sums = {"loss": 0.0, "clip_share": 0.0, "kl": 0.0}
        for micro in self._pack(batch.rows):
            for name, value in self._backward(batch.rows, micro, tokens).items():
                sums[name] += value
        return Update(metrics={**sums, "grad_norm": self._step()}, rows=batch.rows)

    @property
    def version(self) -> int:
        """Policy version: optimizer updates so far, SFT included."""
        return self._policy.version

    def publish(self) -> Weights:
        return self._policy.publish()

    def refresh_reference(self) -> None:
        """Make the current weights the KL reference (paper, stage 3)."""
        if self._reference is not None:
            self._reference.load_state_dict(self._policy.model.state_dict())

    def save(self, folder: Path) -> None:
        """Optimizer state; weights are the policy's to save."""
        state = {"optimizer": self._optimizer.state_dict(), "updates": self._updates}
        if self._reference is not None:
            state["reference"] = self._reference.state_dict()
        with (folder / "learner.pt").open("wb") as file:  # a path would hide OSError in a RuntimeError
            torch.save(state, file)

    def restore(self, folder: Path) -> None:
        """Raises OSError. Moments and the step count go on; the numbers of the update stay this learner's own."""
        state = torch.load(folder / "learner.pt", weights_only=True)
        settings = self._settings
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group.update(betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay)
        self._updates = state["updates"]
        if self._reference is not None and "reference" in state:
            self._reference.load_state_dict(state["reference"])

    # -- inside ---------------------------------------------------------------------------------------------------

    def _pack(self, rows: Sequence[BatchRow]) -> list[MicroBatch]:
        return pack(rows, self._settings.tokens_per_microbatch, self._policy.model.device)

    def _backward(self, rows: Sequence[BatchRow], micro: MicroBatch, tokens: int) -> dict[str, float]:
        settings = self._settings
        logprobs, entropies = token_logprobs(self._policy.model, micro.ids_NT, self._temperature)
        loss = policy_loss(
            logprobs_NT=logprobs,
            old_logprobs_NT=spread([row.old_logprobs for row in rows], micro),
            advantages_N=torch.tensor([rows[i].advantage for i in micro.indices], device=logprobs.device),
            mask_NT=micro.mask_NT,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        total, kl = loss.total, torch.zeros(())
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(self._reference, micro.ids_NT, self._temperature)
            kl = kl_to_reference(logprobs, reference, micro.mask_NT)
            total = total + settings.kl_coefficient * kl
        if settings.entropy_coefficient:
            total = total - settings.entropy_coefficient * (entropies * micro.mask_NT).sum()
        (total / tokens).backward()  # type: ignore[no-untyped-call]
        return {
            "loss": total.item() / tokens,
            "clip_share": loss.clipped.item() / tokens,
            "kl": kl.item() / tokens,
        }

    def _step(self) -> float:
        self._updates += 1
        warmth = min(1.0, self._updates / self._settings.warmup_steps) if self._settings.warmup_steps else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * warmth
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, self._settings.max_grad_norm)
        self._optimizer.step()
        self._policy.version += 1
        return float(norm)


def engine_gap(rows: Sequence[BatchRow]) -> tuple[float, float]:
    """Mean and largest |old - sampled| logprob over policy tokens of scored rows, nats."""
    gaps = [
        abs(old - sampled)
        for row in rows
        for old, sampled, mine in zip(row.old_logprobs, row.sampled_logprobs, row.loss_mask, strict=True)
        if mine
    ]
    return (sum(gaps) / len(gaps), max(gaps)) if gaps else (0.0, 0.0)


def mean_entropy(rows: Sequence[BatchRow]) -> float:
    """Mean entropy over policy tokens of scored rows, nats."""
    values = [e for row in rows for e, mine in zip(row.entropies, row.loss_mask, strict=True) if mine]
    return sum(values) / len(values) if values else 0.0
