"""Cold-start SFT: next-token loss on demonstrations, full weight on what the assistant writes.

Prompt and tool tokens may count a little (`context_loss_weight`): a model that starts from random weights learns to
copy numbers from them. Muon on matrices and AdamW on the rest is what learns copying in seconds. Source: ours; the
paper gives 3 epochs, 5e-6, cosine for a pre-trained base and no masking details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rocstar.config import SftSection
from rocstar.learning.pack import pack
from rocstar.learning.policy import Policy
from rocstar.types import SftRow


class SftLearner:
    """Imitates demonstrations; one `update` is one optimizer step."""

    def __init__(self, policy: Policy, settings: SftSection, steps: int) -> None:
        policy.model.set_attn_implementation("sdpa")
        self._policy = policy
        self._settings = settings
        self._steps = steps
        self._updates = 0
        self._optimizers = _optimizers(policy.model, settings)
        self._base_rates = [[group["lr"] for group in o.param_groups] for o in self._optimizers]

    def update(self, rows: Sequence[SftRow], *, seed: int) -> dict[str, float]:
        """Learn from `rows` once; `seed` fixes dropout. Returns the mean loss over assistant tokens, nats."""
        settings, model = self._settings, self._policy.model
        model.train()
        torch.manual_seed(seed % 2**63)
        micros = pack(rows, settings.tokens_per_microbatch, model.device)
        weight = sum(float(self._weights(m.mask_NT, m.real_NT).sum()) for m in micros)
        assistant_tokens = sum(float(m.mask_NT.sum()) for m in micros)
        assistant_loss = 0.0
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        with residual_dropout(model, settings.dropout):
            for micro in micros:
                losses = next_token_losses(model, micro.ids_NT)
                ((losses * self._weights(micro.mask_NT, micro.real_NT)).sum() / weight).backward()  # type: ignore[no-untyped-call]
                assistant_loss += float((losses.detach() * micro.mask_NT).sum())
        norm = self._step()
        return {"loss": assistant_loss / max(assistant_tokens, 1.0), "grad_norm": norm}

    def save(self, folder: Path) -> None:
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        with (folder / "learner.pt").open("wb") as file:  # a path would hide OSError in a RuntimeError
            torch.save({"optimizers": states, "updates": self._updates}, file)

    def restore(self, folder: Path) -> None:
        state = torch.load(folder / "learner.pt", weights_only=True)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._updates = state["updates"]

    def _weights(self, mask: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return mask + self._settings.context_loss_weight * (real - mask)

    def _step(self) -> float:
        factor = self._schedule(self._updates)
        for optimizer, rates in zip(self._optimizers, self._base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, self._settings.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        self._updates += 1
        self._policy.version += 1
        return float(norm)

    def _schedule(self, done: int) -> float:
        """Linear warm-up, flat, linear decay to zero over the last `decay_share` of the steps."""
        settings = self._settings
        warmth = min(1.0, (done + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        tail = settings.decay_share * self._steps
        left = min(1.0, (self._steps - done) / tail) if tail else 1.0
        return min(warmth, left)


def next_token_losses(model: Any, ids_NT: torch.Tensor) -> torch.Tensor:
    """[N, T - 1]: -log p of token t + 1 given all before it, nats."""
    logits = model(input_ids=ids_NT, use_cache=False).logits[:, :-1].float()
    flat = nn.functional.cross_entropy(logits.flatten(0, 1), ids_NT[:, 1:].flatten(), reduction="none")
    return flat.view(logits.shape[:2])


def _optimizers(model: Any, settings: SftSection) -> list[torch.optim.Optimizer]:
    decay = settings.weight_decay
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=settings.adamw_learning_rate, weight_decay=decay)]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_learning_rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=settings.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=decay),
    ]


@contextmanager
def residual_dropout(model: Any, share: float) -> Iterator[None]:
    """Dropout on what each attention and MLP block adds to the residual stream, while the context lasts."""
    if not share:
        yield
        return

    def drop(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(output, share, training=True)

    blocks = [m for n, m in model.named_modules() if n.endswith(("o_proj", "down_proj"))]
    hooks = [block.register_forward_hook(drop) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
