"""Optimizers by name, and the learning rate over a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rocstar.config.sections import LearningSection, SftSection

Schedule = Callable[[int], float]
"""Updates done so far -> factor on the learning rate of the next one."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # K. Jordan's Muon: steepest at zero, settles singular values in 0.7..1.2
NEWTON_SCHULZ_STEPS = 5


def warm_up(steps: int) -> Schedule:
    """Linear rise over `steps` updates, then constant (paper, RL)."""
    return lambda done: min(1.0, (done + 1) / steps) if steps else 1.0


def warm_up_and_decay(steps: int, section: SftSection) -> Schedule:
    """Linear rise, constant, then down to zero over the last `decay_share` of `steps` updates (paper, SFT: cosine)."""
    rise, tail = warm_up(section.warmup_steps), section.decay_share * steps

    def factor(done: int) -> float:
        left = min(1.0, max(0.0, (steps - done) / tail)) if tail else 1.0
        fall = left if section.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)
        return min(rise(done), fall)

    return factor


def rl_optimizers(model: nn.Module, section: LearningSection) -> list[torch.optim.Optimizer]:
    return [_adamw(model.parameters(), section.learning_rate, (section.beta1, section.beta2), section.weight_decay)]


def sft_optimizers(model: nn.Module, section: SftSection) -> list[torch.optim.Optimizer]:
    """AdamW on everything; or Muon on matrices inside layers and AdamW on embeddings, head and norms."""
    rate, decay = section.adamw_learning_rate, section.weight_decay
    if section.optimizer == "adamw":
        return [_adamw(model.parameters(), rate, (0.9, 0.999), decay)]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(matrices, section.muon_learning_rate, decay), _adamw(others, rate, (0.9, 0.95), decay)]


def _adamw(
    parameters: Iterable[nn.Parameter], rate: float, betas: tuple[float, float], decay: float
) -> torch.optim.Optimizer:
    """Norms and biases do not decay: they scale and shift, and have no direction that a smaller norm would keep."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in (parameter for parameter in parameters if parameter.requires_grad):
        groups[parameter.ndim < 2].append(parameter)
    decays = [{"params": some, "weight_decay": own} for some, own in zip(groups, (decay, 0.0), strict=True) if some]
    return torch.optim.AdamW(decays, lr=rate, betas=betas, fused=True)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal. Matrices of one shape go through Newton-Schulz as one batch, which is
    what torch.optim.Muon leaves out: at hidden 96 that took most of its time. Sharded matrices are gathered for it,
    and each rank keeps its part of the result. Source: K. Jordan, "Muon" (2024)."""

    def __init__(self, parameters: Sequence[nn.Parameter], rate: float, decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": rate, "weight_decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, torch.Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._momentum(parameter, group["momentum"])
                    by_shape.setdefault(tuple(sorted(parameter.shape)), []).append((parameter, update))
            for pairs in by_shape.values():
                self._apply(pairs, group["lr"], group["weight_decay"])

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        """Nesterov momentum, as a whole matrix that lies flat (rows <= columns)."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(state["momentum_buffer"], momentum)
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        return whole.T if whole.shape[0] > whole.shape[1] else whole

    def _apply(self, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]], rate: float, decay: float) -> None:
        flat = orthogonal(torch.stack([update for _, update in pairs]))
        for (parameter, _), update in zip(pairs, flat, strict=True):
            rows, columns = parameter.shape
            step = (update.T if rows > columns else update).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                step = distribute_tensor(step, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.mul_(1 - rate * decay).add_(step, alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrices_NRC: torch.Tensor) -> torch.Tensor:
    """Each matrix (R <= C) with its singular values near 1, by Newton-Schulz; [N, R, C] bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices_NRC.bfloat16()
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> float:
    """Scale every optimizer's rate; returns that of the first."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * factor
    return float(optimizers[0].param_groups[0]["lr"])
