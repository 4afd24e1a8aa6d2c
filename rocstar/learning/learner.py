"""The RL learner: a token-level update by the policy loss that a recipe names, and the KL reference.

Two logprobs exist for every sampled token: the engine's (`sampled_logprobs`) and this learner's own before the first
update of the step (`old_logprobs`). The ratio uses the learner's, so a token that older weights wrote counts as written
by those at the step's beginning, unless `learning.importance_cap` weighs it by the quotient of the two. The gap between
the two is logged. Both are of the softmax over the tokenizer's ids after temperature and before top_p and top_k: those
only change which tokens can be sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rocstar.config.sections import LearningSection
from rocstar.errors import ContractBroken
from rocstar.learning.advantages import loss_weights
from rocstar.learning.head import ChunkLoss
from rocstar.learning.methods import counts_by_attempt, importance_weights, kl_to_reference, loss_of
from rocstar.learning.optimizers import rl_optimizers, warm_up
from rocstar.learning.pack import MicroBatch
from rocstar.learning.policy import Policy, load_state, save_state, trained
from rocstar.learning.ranks import local, together
from rocstar.learning.update import SCORED, MicroLoss, Updater
from rocstar.protocols import PolicyTokens
from rocstar.types import BatchRow, Update


class GrpoLearner(Updater):
    """Learner over a Policy."""

    def __init__(
        self,
        policy: Policy,
        section: LearningSection,
        *,
        temperature: float = 1.0,
        folders: Sequence[Path | str] = (),
    ) -> None:
        """temperature: of the rollouts. folders: where to look for the user's own loss. Raises ConfigError."""
        policy.ranks.make(self, section=section, temperature=temperature, folders=folders)
        self._loss_of_tokens, whole_attempts = loss_of(section, folders)
        self._whole = whole_attempts or section.takes_attempts
        optimizers = rl_optimizers(policy.model, section)
        super().__init__(policy, section, optimizers, warm_up(section.warmup_steps), temperature=temperature)
        self._section = section
        self._reference = Reference(policy.model) if section.kl_coefficient else None

    @together
    def score(self, rows: Sequence[BatchRow]) -> tuple[BatchRow, ...]:
        """Fill in `old_logprobs` and `entropies` ([T], 0 where the policy wrote nothing) under the current weights.

        Needed only before the first of several updates; a single one scores its rows itself."""
        ids, counted = [row.token_ids for row in rows], [row.loss_mask for row in rows]
        return _scored(rows, *self.numbers(ids, counted))

    def expect(self, rows: Sequence[BatchRow], *, scored: bool) -> None:
        """Count the work of a step anew. scored: rows are scored before the first update."""
        updates = self._section.epochs * (1 + SCORED * (self._reference is not None))
        self._policy.learnt = 0.0, (updates + SCORED * scored) * sum(len(row.token_ids) for row in rows)

    @together
    def update(self, rows: Sequence[BatchRow]) -> Update:
        """Exactly one optimizer update over all rows. A row that was not scored uses this pass's logprobs as its old
        ones, so its ratio is 1. Raises ContractBroken for rows without policy tokens, RunHalted when several
        gradients in a row are not finite."""
        section = self._section
        if not any(any(row.loss_mask) for row in rows):
            raise ContractBroken("a learner's batch needs at least one policy token")
        ids, counted = [row.token_ids for row in rows], [row.loss_mask for row in rows]
        reference = None
        if self._reference is not None:
            with self._reference.installed():
                reference = self.numbers(ids, counted)[0]
        names = ["loss", "clip_share", "kl"]
        names += ["attempts_masked"] if section.masks_attempts else []
        names += ["importance_weight", "importance_capped"] if section.importance_cap else []
        sums = {name: torch.zeros((), device=self._policy.device) for name in names}
        found, metrics = self._update(ids, counted, self._loss(rows, reference, sums), sums)
        logprobs, entropies = self._collected(ids, found)
        metrics["tokens"] = float(sum(map(len, ids)))
        return Update(metrics=metrics, rows=_scored(rows, logprobs, entropies))

    @together
    def refresh_reference(self) -> None:
        """Make the current weights the KL reference (paper, stage 3)."""
        if self._reference is not None:
            self._reference.refresh()

    @together
    def save(self, folder: Path) -> None:
        """As every learner; also saves the KL reference."""
        super().save(folder)
        if self._reference is not None:
            save_state(folder / Reference.FOLDER, self._reference.weights)

    @together
    def restore(self, folder: Path) -> None:
        """As every learner; a checkpoint without a KL reference (of a stage without KL) leaves it as it is."""
        super().restore(folder)
        if self._reference is not None and (folder / Reference.FOLDER).exists():
            load_state(folder / Reference.FOLDER, self._reference.weights)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _loss(
        self,
        rows: Sequence[BatchRow],
        reference: list[list[float]] | None,
        sums: dict[str, torch.Tensor],
    ) -> MicroLoss:
        """Loss of an update's micro-batches over all its tokens, each times its row's weight; adds to `sums`."""
        section, tokens = self._section, sum(sum(row.loss_mask) for row in rows)
        weights = loss_weights(rows, section.loss_mean)

        def of_micro(micro: MicroBatch, logprobs_of: Callable[[], torch.Tensor]) -> ChunkLoss:
            known_K = logprobs_of() if self._whole else None  # a chunk's own logprobs replace theirs
            fresh_K = micro.per_token([not row.old_logprobs for row in rows]).bool()
            old_K = micro.pick([row.old_logprobs or [0.0] * len(row.token_ids) for row in rows])
            sampled_K = micro.pick([row.sampled_logprobs for row in rows])
            advantages_K = micro.per_token([row.advantage for row in rows])
            attempts_K = micro.per_token(range(len(rows))).long()
            weights_K = micro.per_token(weights)
            reference_K = None if reference is None else micro.pick(reference)

            def loss(logprobs_C: torch.Tensor, entropies_C: torch.Tensor, chunk: slice) -> torch.Tensor:
                logprobs, scope, own = logprobs_C, chunk, slice(None)
                if known_K is not None:
                    logprobs = torch.cat((known_K[: chunk.start], logprobs_C, known_K[chunk.stop :]))
                    scope, own = slice(None), chunk
                some = PolicyTokens(
                    logprobs=logprobs,
                    old_logprobs=torch.where(fresh_K[scope], logprobs.detach(), old_K[scope]),
                    sampled_logprobs=sampled_K[scope],
                    advantages=advantages_K[scope],
                    attempts=attempts_K[scope],
                )
                losses_S, bounded_S = self._loss_of_tokens(some)
                weights_S, weights_C = weights_K[scope], weights_K[chunk]
                if section.masks_attempts:
                    counts_S = counts_by_attempt(some, section)
                    losses_S = losses_S * counts_S
                    sums["attempts_masked"] += (~counts_S[own]).sum() / tokens
                if section.importance_cap:
                    bounds = section.importance_cap, section.importance_floor, section.importance_outside == "mask"
                    trust_S, capped_S = importance_weights(some.old_logprobs, some.sampled_logprobs, *bounds)
                    sums["importance_weight"] += trust_S[own].sum() / tokens
                    sums["importance_capped"] += capped_S[own].sum() / tokens
                    weights_S = trust_S * weights_S
                losses_S = losses_S * weights_S
                total = losses_S.sum()
                others = 0.0 if known_K is None else total.detach() - losses_S[own].detach().sum()
                if reference_K is not None:
                    kl = (kl_to_reference(logprobs_C, reference_K[chunk]) * weights_C).sum()
                    sums["kl"] += kl.detach() / tokens
                    total = total + section.kl_coefficient * kl
                if section.entropy_coefficient:
                    total = total - section.entropy_coefficient * (entropies_C * weights_C).sum()
                sums["loss"] += (total.detach() - others) / tokens
                sums["clip_share"] += bounded_S[own].sum() / tokens
                return total / tokens

            return loss

        return of_micro


class Reference:
    """The KL reference: a copy of this rank's trained weights, swapped with the current ones while it scores."""

    FOLDER = "reference"

    def __init__(self, model: Any) -> None:
        self._model = model
        self.weights = {name: parameter.detach().clone() for name, parameter in trained(model)}

    def refresh(self) -> None:
        """Take the current weights."""
        for mine, saved in self._pairs():
            saved.copy_(mine)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within this context the model computes with the reference's weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for mine, saved in self._pairs():
            current = mine.clone()
            mine.copy_(saved)
            saved.copy_(current)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((local(parameter), local(self.weights[name])) for name, parameter in trained(self._model))


def _scored(
    rows: Sequence[BatchRow],
    logprobs: Sequence[Sequence[float]],
    entropies: Sequence[Sequence[float]],
) -> tuple[BatchRow, ...]:
    """Rows with a pass's results; a row keeps the old logprobs that it already has."""
    return tuple(
        replace(row, old_logprobs=row.old_logprobs or own, entropies=row.entropies or entropy)
        for row, own, entropy in zip(rows, logprobs, entropies, strict=True)
    )
