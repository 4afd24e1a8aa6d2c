"""transformers' layers of gated delta rules (Qwen3.5, Qwen3-Next, OLMo hybrid), with rule and convolution in float64.

A learner sums a rule in chunks of 64 tokens, an engine token by token. Chunks subtract decays that they have cumulated
to hundreds, and the norm behind the rule divides by what may be almost nothing: in fp32, log-probabilities of the two
differ by up to 1e-3 nats where weights are large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

RULES = frozenset({"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"})
CONVOLUTIONS = frozenset({"causal_conv1d_fn", "causal_conv1d_update"})


class Instead:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def sum_in_float64(model: Any) -> None:
    """Do so in all such layers of `model`; their outputs keep their dtype, states of their rules are float64."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        called, there = set(forward.__code__.co_names), forward.__globals__
        if called & RULES:
            torch, functional = there["torch"], there["F"]
            convolution = Instead(functional, conv1d=partial(_depthwise, functional.pad))
            modules = {"torch": Instead(torch, float32=torch.float64), "F": convolution}
            changed = {n: _with(inspect.unwrap(there[n]), modules) for n in called & (RULES | CONVOLUTIONS)}
            module.forward = MethodType(_with(forward, changed), module)


def _with(function: Any, names: dict[str, Any]) -> FunctionType:
    """A copy of the function with these names of its module replaced."""
    scope = {**function.__globals__, **names}
    function_copy = FunctionType(function.__code__, scope, None, function.__defaults__, function.__closure__)
    function_copy.__kwdefaults__ = function.__kwdefaults__
    return function_copy


def _depthwise(pad: Callable[..., Any], hidden: Any, weight: Any, bias: Any, padding: int, groups: int) -> Any:
    """hidden [N, D, T], weight [D, 1, K]; torch's own conv1d takes one of its D groups at a time in float64."""
    windows = pad(hidden.double(), (padding, padding)).unfold(2, weight.shape[-1], 1)
    summed = (windows * weight).sum(-1)
    return summed if bias is None else summed + bias[:, None]
