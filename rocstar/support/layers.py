"""Layers of transformers' models: their kinds, read from a config before weights are loaded, and their sliding windows
made narrow for a check. Kinds and keys are transformers' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
OTHER_ATTENTION = ("attention_chunk_size", "attn_logit_softcapping", "alibi", *LOOKS_AHEAD)
"""Keys whose presence means that a layer does more, or something else, than attend to all tokens."""
STATES = ("mamba_d_state", "linear_num_key_heads")
"""Keys that imply a state if `layer_types` does not."""
SINKS = ("gpt_oss",)
"""Families whose layers also attend to a learnt sink, which no key shows."""


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
