"""Optimizers by name, and the learning rate over a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from rocstar.config.sections import LearningSection, MomentsDtype, SftSection
from rocstar.learning.ranks import first_index, local

CHUNK = 2**24  # numbers of a parameter that are updated at once: 64 MiB for each of its moments in fp32
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
    rate, betas, decay = section.learning_rate, (section.beta1, section.beta2), section.weight_decay
    return [_adamw(model.parameters(), rate, betas, decay, section.moments_dtype)]


def sft_optimizers(model: nn.Module, section: SftSection) -> list[torch.optim.Optimizer]:
    """AdamW on everything; or Muon on matrices inside layers and AdamW on embeddings, head and norms."""
    rate, decay, dtype = section.adamw_learning_rate, section.weight_decay, section.moments_dtype
    if section.optimizer == "adamw":
        return [_adamw(model.parameters(), rate, (0.9, 0.999), decay, dtype)]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, section.muon_learning_rate, decay)
    return [muon, _adamw(others, rate, (0.9, 0.95), decay, dtype)]


def _adamw(
    parameters: Iterable[nn.Parameter], rate: float, betas: tuple[float, float], decay: float, dtype: MomentsDtype
) -> torch.optim.Optimizer:
    """No weight decay on norms and biases: they scale and shift, and have no direction to preserve."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in (parameter for parameter in parameters if parameter.requires_grad):
        groups[parameter.ndim < 2].append(parameter)
    decays = [{"params": some, "weight_decay": own} for some, own in zip(groups, (decay, 0.0), strict=True) if some]
    kind = Bf16AdamW if dtype == "bfloat16" else torch.optim.AdamW
    return kind(decays, lr=rate, betas=betas, fused=True)


class Muon(torch.optim.Muon):
    """torch's Muon, which rounds what it multiplies to bf16. On a CPU it is fp32 here: one without AVX-512 multiplies
    bf16 a tenth as fast, and three quarters of the quickstart's SFT went there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """closure: unused, as by all callers here."""
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                state, gradient = self.state[matrix], matrix.grad
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                kept = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                rows, columns = matrix.shape
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(orthogonal(gradient.lerp(kept, group["momentum"]), group), alpha=-rate)


def orthogonal(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A matrix with the same singular vectors and with singular values near 1, by Newton and Schulz's iteration with
    Muon's settings (`ns_coefficients`, `ns_steps`, `eps`)."""
    a, b, c = group["ns_coefficients"]
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    made = wide if wide.device.type == "cpu" else wide.bfloat16()
    made = made / made.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        squares = made @ made.T
        made = torch.addmm(made, torch.addmm(squares, squares, squares, beta=b, alpha=c), made, beta=a)
    return made if wide is matrix else made.T


class Bf16AdamW(torch.optim.AdamW):
    """torch's AdamW with both moments in bf16. An update is computed in fp32, and what it leaves of the moments is then
    rounded stochastically: to nearest, a mean of squares with beta2 = 0.999 would never fall, since an update takes at
    most 0.1% of it and two bf16 numbers are 0.4 to 0.8% apart."""

    moments_dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """closure: unused, as by all callers here."""
        parameters = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        for number, (parameter, group) in enumerate(parameters):
            if parameter.grad is not None:
                self._update(number, parameter, parameter.grad, group)

    def _update(self, number: int, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, dtype=torch.bfloat16) for _ in "mv")
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "amsgrad", "fused")}
        settings["beta1"], settings["beta2"] = group["betas"]
        here = (parameter, gradient.contiguous(), state["exp_avg"], state["exp_avg_sq"])
        parts = [torch.split(local(tensor).view(-1), CHUNK) for tensor in here]
        done, place = state["step"].clone(), first_index(parameter)
        for weights, slopes, *kept in zip(*parts, strict=True):
            exact = [each.float() for each in kept]
            adamw([weights], [slopes], exact[:1], exact[1:], [], [state["step"].copy_(done)], **settings)
            for moment, (target, values) in enumerate(zip(kept, exact, strict=True), 2 * number):
                target.copy_(stochastically_rounded(values, place + moment * 0x1B873593, state["step"]))
            place += len(weights)


def stochastically_rounded(values: torch.Tensor, place: int, step: torch.Tensor) -> torch.Tensor:
    """fp32 numbers that are bf16's: each the next one above or below, with the chance that makes it right in the mean.
    The chance is a hash (lowbias32) of the step and of the number's index, counted from `place`, so it is the same on
    any number of ranks and after a resume."""
    index = torch.arange(len(values), dtype=torch.int32, device=values.device)
    hashed = index + ((place + 2**31) % 2**32 - 2**31) + step.int() * 0x3C6EF372
    for bits, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        hashed = (hashed ^ (hashed >> bits & 2 ** (32 - bits) - 1)) * factor
    low = (hashed ^ hashed >> 15) & 0xFFFF
    return (values.view(torch.int32) + low & -0x10000).view(torch.float32)


def set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> float:
    """Scale every optimizer's rate; returns that of the first."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * factor
    return float(optimizers[0].param_groups[0]["lr"])
