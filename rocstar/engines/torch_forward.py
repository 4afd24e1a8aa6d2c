"""From token ids to logits over the paged cache: by our own compact forward, or by the model's own with our attention;
and new weights for both.

In bf16 both compute what a learner does under autocast: products in bf16; norms, rotary angles and the sums between
layers in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rocstar.engines.torch_cache import Aim, PagedAttention, PagedCache, use_paged_attention
from rocstar.engines.torch_compact import CompactForward, GraphedForward, in_blocks, needs_blocks
from rocstar.engines.torch_states import MIN_ROWS, keep_states
from rocstar.errors import ConfigError, EngineUnavailable, first_line
from rocstar.support.layers import windows_of
from rocstar.types import Weights

FAMILIES = frozenset({"qwen2", "qwen3", "llama"})
CHECK = 5  # tokens of a sequence
CHECK_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.25  # of fp32 and 16 bits, where near ties of experts may flip
STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})  # their angles depend only on the position


def lowered(model: Any, dtype: torch.dtype, *, fp32_head: bool = False) -> Any:
    """The model with matrices in `dtype`, on its device. Norms, rotary frequencies and modules that its family keeps in
    fp32 are fp32: rounding a frequency to bf16 changes the angle at position 4,000. With fp32_head so is the head,
    which is then untied from the embedding; a head untied earlier stays fp32."""
    fp32 = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    head = model.get_output_embeddings()
    has_one = head.weight.dtype != model.dtype
    is_apart = dtype != torch.float32 and (fp32_head or has_one)
    exact = nn.Parameter(head.weight.detach().float().clone(), requires_grad=False) if is_apart else None
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for each, parameter in own.items():
            is_kept = any(part in f"{name}.{each}" for part in fp32) or all(other.ndim < 2 for other in own.values())
            parameter.data = parameter.data.to(torch.float32 if is_kept else dtype)
    head.weight = head.weight if exact is None else exact
    return model


def forward_of(model: Any, cache: PagedCache, positions: int) -> Forward:
    """The fastest forward available for `model` and sequences of at most `positions` tokens. Raises ConfigError if the
    model's own code and our attention disagree, checked on sequences longer than its window, which is narrowed for
    it."""
    attention = PagedAttention(cache)
    if fits_compact(model.config):
        use_paged_attention(model, attention)
        compact = CompactForward(model, cache, attention, positions)
        return GraphedForward(compact, cache) if attention.can_be_captured else compact
    kind = f"the torch engine cannot run a model of type {model.config.model_type}"
    if model.get_output_embeddings().weight.dtype != model.dtype:
        raise ConfigError(f"{kind} with model.fp32_head; leave that out")
    try:
        with windows_of(model, CHECK // 2):
            expected = _each_alone(model, min(2, cache.keys.shape[1] - 1))
            use_paged_attention(model, attention)
            forward = _LibraryForward(model, cache)
            gap = float((_in_passes(forward, cache, len(expected)) - expected).abs().sum(-1).max() / 2)
    except Exception as error:  # the model's own code may raise anything
        raise ConfigError(f"{kind}: {first_line(error)}") from error
    cache.clear()
    forward.sleep()
    if not gap <= (CHECK_TOLERANCE if model.dtype == torch.float32 else COARSE_TOLERANCE):
        raise ConfigError(f"{kind}: {gap:.1%} of its next tokens would differ from those of transformers")
    return forward


@torch.inference_mode()
def _each_alone(model: Any, sequences: int) -> torch.Tensor:
    """[T, V] probabilities of sequences of CHECK tokens by the model's own code."""
    model.set_attn_implementation("sdpa")
    rows = torch.arange(sequences * CHECK, device=model.device).view(sequences, 1, CHECK)
    logits = [_logits(model, row, use_cache=False) for row in rows]
    return torch.cat(logits).float().softmax(-1)


def _logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """[T, V] of ids [1, T] by the model's own code, in the precision of a learner."""
    coarse = model.dtype != torch.float32
    given = {"inputs_embeds": model.get_input_embeddings()(ids).float()} if coarse else {"input_ids": ids}
    with torch.autocast(model.device.type, model.dtype, enabled=coarse):
        logits: torch.Tensor = model(**given, **options).logits[0]
    return logits


@torch.inference_mode()
def _in_passes(forward: Forward, cache: PagedCache, tokens: int) -> torch.Tensor:
    """The same with our forward, all sequences at once: the first two tokens of each, the next two, the last."""
    ids = torch.arange(tokens, device=cache.keys.device)
    rows, found = ids // CHECK, torch.empty(0)
    for turn in range(3):
        some = ids % CHECK // 2 == turn
        tables = (rows[::CHECK, None] + 1).int()
        cache.aim = Aim(rows=rows[some], positions=(ids % CHECK)[some], pages=rows[some] + 1, tables=tables)
        logits = forward(ids[some], torch.arange(int(some.sum()), device=ids.device)).float()
        found = found if found.numel() else logits.new_empty(tokens, logits.shape[1])
        found[some] = logits
    return found.softmax(-1)


def fits_compact(config: Any) -> bool:
    """Whether the compact forward computes what the model's own does."""
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    whole = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    return whole and config.model_type in FAMILIES and rotation in STATIC_ROTATIONS and config.hidden_act == "silu"


class _LibraryForward:
    """All tokens form one row of a batch of one; `PagedAttention` and `RecurrentStates` separate their sequences."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self._model, self._cache, self._states = model, cache, keep_states(model, cache)
        self.is_recurrent = self._states is not None
        self._products = InBlocks() if needs_blocks(model.get_input_embeddings().weight) else nullcontext()
        self._mask = torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=model.device)  # so that none is created
        for module in model.modules() if model.device.type == "cpu" else ():
            if hasattr(module, "_apply_gate"):  # each class of experts whose products transformers chooses
                module.forward = MethodType(_not_alone, module)
            if gate := getattr(module, "shared_expert_gate", None):
                gate.forward = MethodType(_wide, gate)

    def __call__(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        with self._products:
            return _logits(
                self._model,
                ids_T.unsqueeze(0),
                position_ids=self._cache.aim.positions.unsqueeze(0),
                attention_mask=self._mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=sampled_N,
            )

    def renew(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do: the model has them."""

    def sleep(self) -> None:
        if self._states is not None:
            self._states.clear()


Forward = CompactForward | GraphedForward | _LibraryForward
"""(ids [T], which of them [N]) -> the logits of those, [N, V]; the cache's `aim` gives positions and the pages for keys
and values. `is_recurrent`: whether layers keep a state of each sequence, which can't be rewound. `renew` takes the
model's new weights; `sleep` is called before the memory of weights and cache is freed, and `renew` follows."""


class InBlocks(TorchFunctionMode):
    """Within this context products of 16 bits are over a fixed number of rows, those of each expert too."""

    def __torch_function__(
        self, function: Any, types: Any, given: Sequence[Any] = (), more: Mapping[str, Any] | None = None
    ) -> Any:
        more = more or {}
        if function in (F.linear, F.grouped_mm, torch._grouped_mm):
            tokens, weights, *bias = given
            if function is F.linear:
                rows = tokens.reshape(-1, tokens.shape[-1])
                found = in_blocks(lambda block: function(block, weights, *bias, **more), rows)
                return found.view(*tokens.shape[:-1], -1)
            ends = more["offs"].tolist()
            parts = [tokens[begin:end] for begin, end in pairwise((0, *ends))]
            each = [in_blocks(partial(torch.matmul, other=one), part) for one, part in zip(weights, parts, strict=True)]
            return torch.cat(each)
        return function(*given, **more)


def _not_alone(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What experts make of tokens [T, hidden]. Tokens of which an expert has fewer than MIN_ROWS are given so often,
    since products of few rows round otherwise."""
    few = (chosen.flatten().bincount()[chosen] < MIN_ROWS).any(-1).nonzero().flatten()
    rows = torch.cat((torch.arange(len(hidden)), few.repeat(MIN_ROWS - 1)))
    found: torch.Tensor = type(experts).forward(experts, hidden[rows], chosen[rows], weights[rows])
    return found[: len(hidden)]


def _wide(gate: Any, tokens: torch.Tensor) -> torch.Tensor:
    """One number for each token, repeated over its width: alone, the product and the sigmoid that follows would round
    by the number of tokens."""
    return F.linear(tokens, gate.weight.expand(2, -1))[..., :1].expand(tokens.shape).contiguous()


# -- new weights ----------------------------------------------------------------------------------------------------


def drop_weights(model: Any) -> None:
    """Free the memory of a model's weights, until `take_weights`."""
    for tensor in model.state_dict().values():
        if tensor.untyped_storage().resizable():  # not of a mapped file
            tensor.untyped_storage().resize_(0)


def take_weights(model: Any, weights: Weights) -> Mapping[str, torch.Tensor]:
    """Copy `weights` into `model`, to its device and dtype, and return them by name. Raises EngineUnavailable, and then
    changes nothing, when they can't be read or names or shapes differ; tied weights may be given once or twice."""
    own = model.state_dict()
    tensors = _read(weights, model, own.keys()) if weights.tensors is None else weights.tensors
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}  # each once: adapters are merged to be read
    wrong = sorted(
        name for name in (own.keys() - tied) | shapes.keys() if name not in own or own[name].shape != shapes.get(name)
    )
    if wrong:
        raise EngineUnavailable(
            f"weights {weights.version} do not fit the model: {len(wrong)} tensors are missing, unknown or of another "
            f"shape, such as {wrong[0]}"
        )
    for tensor in reversed(own.values()):  # the last part of a fused matrix first, whose end is its end
        storage, end = tensor.untyped_storage(), tensor.storage_offset() + tensor.numel()
        if storage.nbytes() < end * tensor.element_size():
            storage.resize_(end * tensor.element_size())
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if tied and head is not embedding:  # a copy, such as one in fp32
            head.copy_(tensors[next(name for name, each in model.named_parameters() if each is embedding)])
    return tensors


def _read(weights: Weights, model: Any, names: Set[str]) -> Mapping[str, torch.Tensor]:
    """The weights under `names`, also if the folder uses other names, such as a tensor for each expert."""
    try:
        tensors: dict[str, torch.Tensor] = load_file(f"{weights.folder}/model.safetensors")
        if tensors.keys() <= names:
            return tensors
        options = {"dtype": model.dtype, "output_loading_info": True}
        loaded, loading_info = type(model).from_pretrained(weights.folder, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineUnavailable(
            f"weights {weights.version} could not be read from {weights.folder}: {error}"
        ) from error
    if loading_info["missing_keys"] or loading_info["mismatched_keys"]:
        return tensors
    return {**loaded.state_dict(), **{name: tensor for name, tensor in tensors.items() if name in names}}
