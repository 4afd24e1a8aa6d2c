"""The RL learner: a token-level update by the policy loss that a recipe names, and the KL reference.

Two logprobs exist for every sampled token: the engine's (`sampled_logprobs`) and this learner's own before the first
update of the step (`old_logprobs`). The ratio uses the learner's, so a token that older weights wrote is learnt from as
if those at the step's beginning had written it, unless `learning.importance_cap` weighs it by the quotient of the two.
The gap between them is logged. Both are of the softmax over the tokenizer's ids after temperature and before top_p and
top_k: those only change what can be drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rocstar.config.sections import LearningSection
from rocstar.errors import ContractBroken
from rocstar.learning.advantages import loss_weights
from rocstar.learning.head import ChunkLoss
from rocstar.learning.loss import counts_by_attempt, importance_weights, kl_to_reference, loss_of
from rocstar.learning.methods import CHOICES
from rocstar.learning.optimizers import rl_optimizers, warm_up
from rocstar.learning.pack import MicroBatch, pick
from rocstar.learning.policy import Policy, load_state, save_state, trained
from rocstar.learning.ranks import Ranks, full, together
from rocstar.learning.update import Found, TokenNumbers, Updater
from rocstar.protocols import PolicyTokens
from rocstar.types import Batch, BatchRow, Update

IMPORTANCE = ("importance_weight", "importance_capped")
"""Metrics of an update with `learning.importance_cap`: mean weight of a token, share of tokens at the cap."""


class GrpoLearner:
    """Learner over a Policy."""

    role = "learner"

    def __init__(
        self,
        policy: Policy,
        section: LearningSection,
        *,
        temperature: float = 1.0,
        folders: Sequence[Path | str] = (),
    ) -> None:
        """temperature: of the rollouts. folders: where a loss of the user's own is found. Raises ConfigError."""
        policy.ranks.make(self, section, temperature, folders)
        self.ranks = policy.ranks
        self._loss_of_tokens = loss_of(section, folders)
        self._whole = self._loss_of_tokens.whole_attempts or section.takes_attempts
        self._policy = policy
        self._section = section
        self._updater = Updater(
            policy,
            rl_optimizers(policy.model, section),
            warm_up(section.warmup_steps),
            max_grad_norm=section.max_grad_norm,
            tokens_per_microbatch=section.tokens_per_microbatch,
            temperature=temperature,
        )
        self._reference = Reference(policy.model) if section.kl_coefficient else None

    @classmethod
    def on_rank(
        cls,
        ranks: Ranks,
        members: Mapping[str, Any],
        section: LearningSection,
        temperature: float,
        folders: Sequence[Path | str],
    ) -> GrpoLearner:
        """The same learner on a rank above 0."""
        return cls(members["policy"], section, temperature=temperature, folders=folders)

    @property
    def version(self) -> int:
        """Policy version: optimizer updates so far, SFT included."""
        return self._policy.version

    @together
    def score(self, rows: Sequence[BatchRow]) -> tuple[BatchRow, ...]:
        """Fill in `old_logprobs` and `entropies` ([T], 0 where the policy wrote nothing) under the current weights, and
        `energies` where advantages are made of them.

        Needed only before the first of several updates; a single one scores its rows itself."""
        ids, counted = [row.token_ids for row in rows], [row.loss_mask for row in rows]
        energies: Found | None = [] if self._section.advantage == "otb" else None
        scored = _scored(rows, self._updater.score(ids, counted, energies))
        if energies is None:
            return scored
        found = self._updater.collected(counted, energies).logprobs
        return tuple(replace(row, energies=own) for row, own in zip(scored, found, strict=True))

    @together
    def update(self, batch: Batch, *, traced: bool = False) -> Update:
        """Exactly one optimizer update over all rows. A row that was not scored takes its logprobs of this very pass
        as old ones, so its ratio is 1. traced: tell what each token had of the gradient. Raises ContractBroken for a
        batch without policy tokens, RunHalted when several gradients in a row are not finite."""
        rows, tokens = batch.rows, batch.num_loss_tokens
        if tokens == 0:
            raise ContractBroken("a learner's batch needs at least one policy token")
        ids, counted = [row.token_ids for row in rows], [row.loss_mask for row in rows]
        reference = self._reference_logprobs(ids, counted)
        section = self._section
        names = ("loss", "clip_share", "kl") + (IMPORTANCE if section.importance_cap else ())
        names += ("attempts_masked",) if section.masks_attempts else ()
        sums = {name: torch.zeros((), device=self._policy.device) for name in names}
        weights, chosen = loss_weights(rows, section.loss_mean), None
        if choose := CHOICES.get(section.loss):
            if not all(row.old_logprobs for row in rows):
                rows = _scored(rows, self._updater.score(ids, counted))
            chosen = _by_row(choose(rows, section), rows)

        def loss_of(micro: MicroBatch, logprobs: Callable[[], torch.Tensor]) -> ChunkLoss:
            known = logprobs() if self._whole else None
            return self._loss(rows, micro, known, reference, weights, chosen, tokens, sums)

        entropy_gradient = bool(section.entropy_coefficient)
        trace: Found | None = [] if traced else None
        found, metrics = self._updater.update(
            ids, counted, loss_of, sums, entropy_gradient=entropy_gradient, traced=trace
        )
        metrics["tokens"] = float(sum(len(row) for row in ids))
        carried = () if trace is None else self._updater.collected(counted, trace).logprobs
        return Update(metrics=metrics, rows=_scored(rows, self._updater.collected(counted, found)), carried=carried)

    @together
    def gradient(self) -> dict[str, torch.Tensor]:
        """That of the last update, clipped, as fp32 on the CPU, by parameter; empty where it was skipped."""
        there = ((name, one.grad) for name, one in trained(self._policy.model) if one.grad is not None)
        return {name: full(grad).float().cpu().clone() for name, grad in there}

    @together
    def refresh_reference(self) -> None:
        """Make the current weights the KL reference (paper, stage 3)."""
        if self._reference is not None:
            self._reference.refresh()

    @together
    def save(self, folder: Path) -> None:
        """fp32 weights and optimizer state, for any number of ranks to restore. Raises OSError, RunHalted."""
        self._updater.save(folder)
        if self._reference is not None:
            self._reference.save(folder)

    @together
    def restore(self, folder: Path) -> None:
        """Weights, moments and the update count go on; the section stays this learner's own. Raises OSError."""
        self._updater.restore(folder)
        if self._reference is not None:
            self._reference.restore(folder)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _reference_logprobs(
        self, ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]]
    ) -> list[list[float]] | None:
        if self._reference is None:
            return None
        with self._reference.installed():
            return self._updater.score(ids, counted).logprobs

    def _loss(
        self,
        rows: Sequence[BatchRow],
        micro: MicroBatch,
        known_K: torch.Tensor | None,
        reference: list[list[float]] | None,
        weights: Sequence[float] | None,
        chosen: list[list[bool]] | None,
        tokens: int,
        sums: dict[str, torch.Tensor],
    ) -> ChunkLoss:
        """Loss of one micro-batch, over the update's `tokens`, each weighed by its row's weight; adds to `sums`. known:
        logprobs of all its tokens where the loss compares those of an attempt; a chunk's own stand in their places."""
        section, counted = self._section, [row.loss_mask for row in rows]
        advantages_K = micro.per_token([rows[i].advantage for i in micro.indices])
        if rows[0].advantages:
            advantages_K = pick([row.advantages for row in rows], counted, micro)
        fresh_K = micro.per_token([0.0 if rows[i].old_logprobs else 1.0 for i in micro.indices]).bool()
        old_K = pick([row.old_logprobs or [0.0] * len(row.token_ids) for row in rows], counted, micro)
        sampled_K = pick([row.sampled_logprobs for row in rows], counted, micro)
        reference_K = None if reference is None else pick(reference, counted, micro)
        weights_K = None if weights is None else micro.per_token([weights[i] for i in micro.indices])
        attempts_K = micro.per_token(range(len(micro.indices))).long()
        chosen_K = (torch.zeros_like(attempts_K) if chosen is None else pick(chosen, counted, micro)).bool()

        def loss(logprobs_C: torch.Tensor, entropies_C: torch.Tensor, chunk: slice) -> torch.Tensor:
            weights_C = None if weights_K is None else weights_K[chunk]
            logprobs, seen, own, weights_S = logprobs_C, chunk, slice(None), weights_C
            if known_K is not None:
                logprobs = torch.cat((known_K[: chunk.start], logprobs_C, known_K[chunk.stop :]))
                seen, own, weights_S = slice(None), chunk, weights_K
            some = PolicyTokens(
                logprobs=logprobs,
                old_logprobs=torch.where(fresh_K[seen], logprobs.detach(), old_K[seen]),
                sampled_logprobs=sampled_K[seen],
                advantages=advantages_K[seen],
                attempts=attempts_K[seen],
                chosen=chosen_K[seen],
            )
            losses_S, bounded_S = self._loss_of_tokens(some)
            if section.masks_attempts:
                counts_S = counts_by_attempt(some, section)
                losses_S = losses_S * counts_S
                sums["attempts_masked"] += (~counts_S[own]).sum() / tokens
            if section.importance_cap:
                bounds = section.importance_cap, section.importance_floor, section.importance_outside == "mask"
                trust_S, capped_S = importance_weights(some.old_logprobs, some.sampled_logprobs, *bounds)
                sums["importance_weight"] += trust_S[own].sum() / tokens
                sums["importance_capped"] += capped_S[own].sum() / tokens
                losses_S = losses_S * _weighed(trust_S, weights_S)
            else:
                losses_S = _weighed(losses_S, weights_S)
            total = losses_S.sum()
            others = 0.0 if known_K is None else total.detach() - losses_S[own].detach().sum()
            if reference_K is not None:
                kl = _weighed(kl_to_reference(logprobs_C, reference_K[chunk]), weights_C).sum()
                sums["kl"] += kl.detach() / tokens
                total = total + section.kl_coefficient * kl
            if section.entropy_coefficient:
                total = total - section.entropy_coefficient * _weighed(entropies_C, weights_C).sum()
            sums["loss"] += (total.detach() - others) / tokens
            sums["clip_share"] += bounded_S[own].sum() / tokens
            return total / tokens

        return loss


class Reference:
    """The KL reference: a copy of this rank's trained weights, swapped with the current ones while it scores."""

    FOLDER = "reference"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = {name: parameter.detach().clone() for name, parameter in trained(model)}

    def refresh(self) -> None:
        """Take the current weights."""
        for name, parameter in trained(self._model):
            _local(self._weights[name]).copy_(_local(parameter))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model computes with the reference's weights inside it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def save(self, folder: Path) -> None:
        save_state(folder / self.FOLDER, self._weights)

    def restore(self, folder: Path) -> None:
        """A checkpoint without one (of a stage without KL) leaves it as it is."""
        if (folder / self.FOLDER).exists():
            load_state(folder / self.FOLDER, self._weights)

    def _swap(self) -> None:
        for name, parameter in trained(self._model):
            mine, other = _local(parameter), _local(self._weights[name])
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _weighed(values_C: torch.Tensor, weights_C: torch.Tensor | None) -> torch.Tensor:
    return values_C if weights_C is None else values_C * weights_C


def _by_row(places: Sequence[int], rows: Sequence[BatchRow]) -> list[list[bool]]:
    """[N][T] whether a token is among `places`, which count the tokens of the rows that carry loss."""
    number, among = itertools.count(), set(places)
    return [[mine and next(number) in among for mine in row.loss_mask] for row in rows]


def _scored(rows: Sequence[BatchRow], numbers: TokenNumbers) -> tuple[BatchRow, ...]:
    """Rows with what a pass found; old logprobs that a row has already stay."""
    return tuple(
        replace(row, old_logprobs=row.old_logprobs or logprobs, entropies=row.entropies or entropies)
        for row, logprobs, entropies in zip(rows, numbers.logprobs, numbers.entropies, strict=True)
    )


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
