"""Layers of transformers' models: their kinds, read from a config before weights are loaded; their sliding windows made
narrow for a check; and those of gated delta rules (Qwen3.5, Qwen3-Next, OLMo hybrid) with rule and convolution in
float64. Kinds and keys are transformers' names.

A learner sums a rule in chunks of 64 tokens, an engine token by token. Chunks subtract decays that they have cumulated
to hundreds, and the norm behind the rule divides by what may be almost nothing: in fp32, log-probabilities of the two
differ by up to 1e-3 nats where weights are large."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from rocstar.errors import ConfigError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that attend to all positions before, or to the last ones."""
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba"})
"""Kinds that keep a state of each sequence."""
ENGINE_LAYERS = ATTENTION_LAYERS | RECURRENT_LAYERS | {"mlp", "moe"}
"""Kinds that the torch engine computes; the last two look at each token by itself."""
LOOKS_AHEAD = ("lsh_attn_chunk_length",)
"""Keys of layers that look at the tokens that follow too: to sort all of them by likeness, as Reformer's do."""
OTHER_ATTENTION = ("attention_chunk_size", "attn_logit_softcapping", "alibi", "mamba_d_ssm", *LOOKS_AHEAD)
"""Keys whose presence means that a layer does more, or something else, than attend to all tokens; Falcon-H1's have a
state, too (mamba_d_ssm)."""
STATES = ("mamba_d_state", "linear_num_key_heads")
"""Keys that imply a state if `layer_types` does not."""
SINKS = ("gpt_oss",)
"""Families whose layers also attend to a learnt sink, which no key shows."""
RULES = frozenset({"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"})
BLOCK = 64  # tokens; the chunk in which a learner sums a rule
CONVOLUTIONS = frozenset({"causal_conv1d_fn", "causal_conv1d_update"})


def knows_documents(config: Mapping[str, Any]) -> bool:
    """Whether its layers access other tokens only through an attention function, which can get document boundaries."""
    layers = config.get("layer_types") or ()
    plain = set(layers) <= ATTENTION_LAYERS and config.get("model_type") not in SINKS
    return plain and not any(named_keys(config, (*OTHER_ATTENTION, *STATES)))


def named_keys(config: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """Those of the keys that are set, and not to 1, with their values."""
    there = (key for key in keys if config.get(key))
    return (f"{key} {config[key]}" for key in there if config[key] is True or config[key] != 1)


def refuse_quantised(folder: str | Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for weights that are stored in fewer bits than torch computes with."""
    if isinstance(how := config.get("quantization_config"), Mapping):
        raise ConfigError(
            f"{folder} holds weights quantised by {how.get('quant_method', 'an unnamed method')} "
            "(quantization_config in its config.json), which can be neither trained nor run by the torch engine; take "
            "the unquantised model"
        )


@contextmanager
def windows_of(model: Any, positions: int) -> Iterator[None]:
    """Within this context every sliding window has only `positions` positions, so that a check with short rows shows
    whether an attention function gets the window; a model may keep it in its config, in its layers or in both."""
    owners = [model.config, model.config.get_text_config(), *model.modules()]
    original = [(owner, width) for owner in owners if isinstance(width := getattr(owner, "sliding_window", None), int)]
    try:
        for owner, _ in original:
            owner.sliding_window = positions
        yield
    finally:
        for owner, width in original:
            owner.sliding_window = width


def sum_in_float64(model: Any) -> None:
    """Change all gated delta rules of `model`; outputs of such layers keep their dtype, states of rules are float64."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        called, there = set(forward.__code__.co_names), forward.__globals__
        if called & RULES:
            torch, functional = there["torch"], there["F"]
            convolution = SimpleNamespace(**{**vars(functional), "conv1d": partial(_depthwise, functional.pad)})
            modules = {"torch": SimpleNamespace(**{**vars(torch), "float32": torch.float64}), "F": convolution}
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
