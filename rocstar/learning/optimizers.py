"""Optimizers by name, and the learning rate over a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from rocstar.config.sections import LearningSection, SftSection

Schedule = Callable[[int], float]
"""Updates done so far -> learning-rate factor of the next one."""


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
    return [torch.optim.Muon(matrices, section.muon_learning_rate, decay), _adamw(others, rate, (0.9, 0.95), decay)]


def _adamw(
    parameters: Iterable[nn.Parameter], rate: float, betas: tuple[float, float], decay: float
) -> torch.optim.Optimizer:
    """No weight decay on norms and biases: they scale and shift, and have no direction to preserve."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in (parameter for parameter in parameters if parameter.requires_grad):
        groups[parameter.ndim < 2].append(parameter)
    decays = [{"params": some, "weight_decay": own} for some, own in zip(groups, (decay, 0.0), strict=True) if some]
    return torch.optim.AdamW(decays, lr=rate, betas=betas, fused=True)


def set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> float:
    """Scale every optimizer's rate; returns that of the first."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * factor
    return float(optimizers[0].param_groups[0]["lr"])
