"""From token ids to logits over the slot cache: an own compact forward, or the model's own.

The compact forward runs Qwen2, Qwen3 and Llama shapes: small models spend more time between the operations of the
transformers forward than in them. It reads the weights of the transformers model where they lie; query, key and value
projections become views of one matrix there, gate and up too, so that each pair of products is one. Everything else
runs through the transformers forward with our attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rocstar.engines.torch_attention import attend, use_slot_attention
from rocstar.engines.torch_cache import SlotCache, cache_shape

FAMILIES = frozenset({"qwen2", "qwen3", "llama"})
STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})  # their angles follow from the position alone

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor | None]
"""(ids [N, T], positions [N, T], mask [N, 1, T, L] added to the scores, whether logits are wanted) -> the logits of
the last token of each row, [N, V], or None. Keys and values go where the cache was aimed at."""


def forward_of(model: Any, cache: SlotCache) -> Forward:
    """The fastest forward there is for `model`. Raises ConfigError for models whose layers do not all attend fully."""
    use_slot_attention(model)
    return CompactForward(model, cache) if fits_compact(model.config) else _LibraryForward(model, cache)


def fits_compact(config: Any) -> bool:
    """Whether the compact forward computes what the model's own does."""
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in FAMILIES and rotation in STATIC_ROTATIONS and config.hidden_act == "silu"


class _LibraryForward:
    def __init__(self, model: Any, cache: SlotCache) -> None:
        self._model, self._cache = model, cache

    def __call__(
        self, ids_NT: torch.Tensor, positions_NT: torch.Tensor, mask_N1TL: torch.Tensor, wanted: bool
    ) -> torch.Tensor | None:
        logits: torch.Tensor = self._model(
            input_ids=ids_NT,
            position_ids=positions_NT,
            attention_mask=mask_N1TL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1] if wanted else None


class CompactForward:
    """Tokens of all rows stand in one axis, [N * T, hidden], from the embedding to the head."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        base = model.model
        self._cache = cache
        self._embedding, self._norm, self._head = base.embed_tokens, base.norm, model.lm_head
        self._layers = [_Layer(layer, place, cache, model.config) for place, layer in enumerate(base.layers)]
        with torch.inference_mode():
            everywhere = torch.arange(cache.positions + 1, device=model.device).unsqueeze(0)
            cos, sin = base.rotary_emb(cache.keys, everywhere)
        half = cos.shape[-1] // 2
        self._cos = cos[0].unsqueeze(1)
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1)

    def __call__(
        self, ids_NT: torch.Tensor, positions_NT: torch.Tensor, mask_N1TL: torch.Tensor, wanted: bool
    ) -> torch.Tensor | None:
        places = positions_NT.reshape(-1)
        cos, sin = self._cos[places], self._sin[places]
        hidden = F.embedding(ids_NT.reshape(-1), self._embedding.weight)
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, mask_N1TL)
        if not wanted:
            return None
        last = hidden.view(*ids_NT.shape, -1)[:, -1]
        return F.linear(_normed(last, self._norm), self._head.weight)


class _Layer:
    def __init__(self, layer: Any, place: int, cache: SlotCache, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _, self._kv_heads, self._width = cache_shape(config)
        self._heads = config.num_attention_heads
        self._place, self._cache, self._scaling = place, cache, self._width**-0.5
        self._first, self._second = layer.input_layernorm, layer.post_attention_layernorm
        self._projections = _joined((attention.q_proj, attention.k_proj, attention.v_proj))
        self._head_norms = (attention.q_norm, attention.k_norm) if config.model_type == "qwen3" else None
        self._gate_up = _joined((mlp.gate_proj, mlp.up_proj))
        self._output, self._down = attention.o_proj, mlp.down_proj

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask_N1TL: torch.Tensor
    ) -> torch.Tensor:
        mixed = self._attend(_normed(hidden, self._first), cos, sin, mask_N1TL)
        hidden = hidden + F.linear(mixed, self._output.weight, self._output.bias)
        gate, up = F.linear(_normed(hidden, self._second), *self._gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate).mul_(up), self._down.weight, self._down.bias)

    def _attend(
        self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask_N1TL: torch.Tensor
    ) -> torch.Tensor:
        rows, steps = mask_N1TL.shape[0], mask_N1TL.shape[2]
        projected = F.linear(normed, *self._projections).view(rows * steps, -1, self._width)
        turned = projected[:, : self._heads + self._kv_heads]
        if self._head_norms:
            for norm, part in zip(self._head_norms, turned.tensor_split((self._heads,), 1), strict=True):
                part.copy_(_normed(part, norm))
        torch.addcmul(turned * cos, turned.roll(self._width // 2, -1), sin, out=turned)
        keys, values = projected[:, self._heads :].chunk(2, 1)
        self._cache.write(self._place, keys, values)
        query = projected[:, : self._heads].view(rows, steps, self._heads, self._width).transpose(1, 2)
        mixed, _ = attend(None, query, *self._cache.read(self._place), mask_N1TL, self._scaling)
        return mixed.view(rows * steps, -1)


def _normed(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _joined(parts: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several projections of the same input as one, in memory that the projections now view, so
    that whoever writes new weights into them writes here."""
    biases = [part.bias for part in parts]
    return _one_of([part.weight for part in parts]), None if biases[0] is None else _one_of(biases)


def _one_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = whole[begin : begin + len(parameter)]
        begin += len(parameter)
    return whole
