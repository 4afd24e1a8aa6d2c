"""Cold-start SFT: next-token loss on demonstrations, full weight on the assistant's tokens.

Prompt and tool tokens may count a little (`context_loss_weight`): a model that starts from random weights learns to
copy numbers from them. With Muon on matrices and AdamW on the rest it learns copying in seconds. Source: ours; the
paper gives 3 epochs, 5e-6, cosine for a pre-trained base and no masking details."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rocstar.config.sections import SftSection
from rocstar.errors import ContractBroken
from rocstar.learning.head import ChunkLoss
from rocstar.learning.optimizers import sft_optimizers, warm_up_and_decay
from rocstar.learning.pack import MicroBatch
from rocstar.learning.policy import Policy
from rocstar.learning.ranks import together
from rocstar.learning.update import Updater
from rocstar.types import SftRow


class SftLearner(Updater):
    """Imitates demonstrations; one `update` is one optimizer update, `steps` updates are the whole schedule."""

    def __init__(self, policy: Policy, section: SftSection, *, steps: int) -> None:
        policy.ranks.make(self, section=section, steps=steps)
        super().__init__(policy, section, sft_optimizers(policy.model, section), warm_up_and_decay(steps, section))
        self._section = section

    @together
    def update(self, rows: Sequence[SftRow], *, seed: int) -> dict[str, float]:
        """Learn from `rows` once; `seed` fixes dropout. Metrics: loss (mean over assistant tokens, nats), grad_norm,
        learning_rate, skipped, tokens. Raises ContractBroken if no token carries loss, RunHalted when several gradients
        in a row are not finite."""
        context = self._section.context_loss_weight
        weights = [[1.0 if mine else context for mine in row.loss_mask] for row in rows]
        total = sum(sum(row[1:]) for row in weights)
        if not total:
            raise ContractBroken("rows to imitate need at least one token with loss")
        counted = [[weight > 0 for weight in row] for row in weights]
        assistant = max(1, sum(sum(row.loss_mask[1:]) for row in rows))
        sums = {"loss": torch.zeros((), device=self._policy.device)}
        self._policy.learnt = 0.0, float(sum(len(row.token_ids) for row in rows))

        def loss_of(micro: MicroBatch, logprobs: Callable[[], torch.Tensor]) -> ChunkLoss:
            weights_K, assistant_K = micro.pick(weights), micro.pick([row.loss_mask for row in rows])

            def loss(logprobs_C: torch.Tensor, entropies_C: torch.Tensor, chunk: slice) -> torch.Tensor:
                sums["loss"] -= (logprobs_C.detach() * assistant_K[chunk]).sum() / assistant
                return -(logprobs_C * weights_K[chunk]).sum() / total

            return loss

        torch.manual_seed((seed + self.ranks.rank) % 2**63)
        with residual_dropout(self._policy.model, self._section.dropout):
            _, metrics = self._update([row.token_ids for row in rows], counted, loss_of, sums)
        return {**metrics, "tokens": float(sum(len(row.token_ids) for row in rows))}


@contextmanager
def residual_dropout(model: Any, share: float) -> Iterator[None]:
    """Within this context, dropout on what each attention and MLP block adds to the residual stream."""

    def drop(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(output, share, training=True)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if share and name.endswith(("o_proj", "down_proj")):
                hooks.enter_context(module.register_forward_hook(drop))
        yield
