"""From token ids to logits over the paged cache: our own compact forward, or the model's own; and new weights for both.

The compact forward runs Qwen2, Qwen3 and Llama shapes: for small models the overhead between operations of the
transformers forward exceeds the operations. It fuses query, key and value projections into one matrix, and gate and up
into another. Everything else runs through the transformers forward with our attention.

On a CPU the compact forward stores the matrices in oneDNN's packed order, and the transformers model's own copy is
dropped. A plain product reorders the weights each time, which is expensive in a step with few tokens: without that 64
tokens run 1.2 to 1.5 times as fast, 8 tokens twice as fast. A row of a product has the same bits whatever the other
rows hold, from MIN_ROWS rows up (tests/engines/test_torch_linear.py).

In bf16 both compute what a learner does under autocast: products in bf16; norms, rotary angles and the sums between
layers in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from importlib import import_module
from types import MethodType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from rocstar.engines.torch_cache import Aim, PagedAttention, PagedCache, cache_shape, use_paged_attention
from rocstar.engines.torch_states import MIN_ROWS, keep_states
from rocstar.errors import ConfigError, EngineUnavailable, first_line
from rocstar.support.layers import windows_of
from rocstar.types import Weights

FAMILIES = frozenset({"qwen2", "qwen3", "llama"})
CHECK = 5  # tokens of a sequence
CHECK_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.25  # of fp32 and 16 bits, where near ties of experts may flip
STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})  # their angles depend only on the position
PACKED_FROM = 2**18  # numbers of a matrix in fp32; for smaller ones code that oneDNN compiles by rows costs too much
USUAL_ROWS = 64  # tokens of a step for which oneDNN chooses the order; other values make no measured difference


class Forward(Protocol):
    is_recurrent: bool
    """Whether layers keep a state of each sequence, which can't be rewound."""

    def __call__(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        """(ids [T], which of them [N]) -> the logits of those, [N, V]. The cache's `aim` gives positions and the pages
        for keys and values."""
        ...

    def renew(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Update to the model's new weights."""
        ...

    def sleep(self) -> None:
        """Called before the memory of weights and cache is freed; `renew` follows."""
        ...


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
        return CompactForward(model, cache, attention, positions)
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
        self._mask = torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=model.device)  # so that none is created
        for module in model.modules() if model.device.type == "cpu" else ():
            if hasattr(module, "_apply_gate"):  # each class of experts whose products transformers chooses
                module.forward = MethodType(_not_alone, module)
            if gate := getattr(module, "shared_expert_gate", None):
                gate.forward = MethodType(_wide, gate)

    def __call__(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
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


class CompactForward:
    """Tokens share one axis, [T, hidden], from the embedding to the head."""

    is_recurrent = False

    def __init__(self, model: Any, cache: PagedCache, attention: PagedAttention, positions: int) -> None:
        base = model.model
        self._names = {module: f"{name}.weight" for name, module in model.named_modules()}
        self._embedding, self._norm, self.head = base.embed_tokens, base.norm, Product(model.lm_head)
        with torch.inference_mode():
            everywhere = torch.arange(positions, device=model.device).unsqueeze(0)
            cos, sin = base.rotary_emb(torch.zeros(0, device=model.device), everywhere)  # fp32
        half = cos.shape[-1] // 2
        turns = cos[0].contiguous(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self.can_be_captured = attention.can_be_captured
        self._between = (_InTriton if self.can_be_captured else _InTorch)(cache, *turns)
        parts = (self._between, attention, model.config)
        self._layers = [_Layer(layer, place, *parts) for place, layer in enumerate(base.layers)]
        products = (self.head, *(product for layer in self._layers for product in layer.products))
        self._reordered = [product for product in products if product.reorders]

    def __call__(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(ids_T, sampled_N))

    def body(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        """[N, hidden] of the sampled tokens after all layers."""
        self._between.begin()
        hidden, more = F.embedding(ids_T, self._embedding.weight).float(), None
        for layer in self._layers:
            hidden, more = layer(hidden, more)
        return _normed((hidden if more is None else hidden + more)[sampled_N], self._norm)

    def renew(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy new weights into the reordered matrices; the others are views of the model's."""
        for product in self._reordered:
            product.renew([self._of(part, weights) for part in product.parts])

    def sleep(self) -> None:
        for product in self._reordered:
            product.weight = torch.empty(0)

    def _of(self, part: Any, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A layer's weight; a tied head's is the embedding's if only that is given."""
        found = weights.get(self._names[part])
        return weights[self._names[self._embedding]] if found is None else found


class _Layer:
    def __init__(self, layer: Any, place: int, between: _InTorch, attend: PagedAttention, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _, _, self._width = cache_shape(config)
        self._between, self._attend_to_pages = between, attend
        self._place, self._scaling = place, self._width**-0.5
        self._first, self._second = layer.input_layernorm, layer.post_attention_layernorm
        self._project = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_norms = (attention.q_norm, attention.k_norm) if config.model_type == "qwen3" else None
        self._gate_up = Product(mlp.gate_proj, mlp.up_proj)
        self._output, self._down = Product(attention.o_proj), Product(mlp.down_proj)
        self.products = (self._project, self._output, self._gate_up, self._down)

    def __call__(self, hidden: torch.Tensor, more: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream [T, hidden], addend not yet added to it) before the layer -> the same after it."""
        hidden, normed = self._between.add_normed(hidden, more, self._first)
        projected = self._project(normed).view(len(normed), -1, self._width)
        queries = self._between.turn(self._place, projected, self._head_norms)
        mixed = self._attend_to_pages(self._place, queries, self._scaling).flatten(1)
        hidden, normed = self._between.add_normed(hidden, self._output(mixed), self._second)
        return hidden, self._down(self._between.gated(self._gate_up(normed)))


class _InTorch:
    """The operations between matrix products, in plain torch.

    cos, sin: [positions, head_dim], the first half of sin negative."""

    def __init__(self, cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cache, self._tables, self._turns = cache, (cos, sin), (cos, sin)

    def begin(self) -> None:
        """Called once the cache is aimed at the tokens of a step."""
        self._turns = tuple(table[self._cache.aim.positions].unsqueeze(1) for table in self._tables)  # type: ignore[assignment]

    def add_normed(
        self, hidden: torch.Tensor, more: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums with `more`, and their norm."""
        hidden = hidden if more is None else hidden + more
        return hidden, _normed(hidden, norm)

    def turn(self, layer: int, projected: torch.Tensor, norms: Any) -> torch.Tensor:
        """Queries, keys and values, [T, all heads, head_dim] -> rotated queries; the others go to the cache."""
        kv_heads, (cos, sin) = self._cache.keys.shape[2], self._turns
        heads = projected.shape[1] - 2 * kv_heads
        turned, values = projected.tensor_split((heads + kv_heads,), 1)
        turned = turned.float()
        for norm, part in zip(norms or (), turned.tensor_split((heads,), 1), strict=False):
            part.copy_(_normed(part, norm))
        torch.addcmul(turned * cos, turned.roll(projected.shape[2] // 2, -1), sin, out=turned)
        queries, keys = turned.tensor_split((heads,), 1)
        self._cache.write(layer, keys, values)
        return queries

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        """[T, 2 inner], gates and gated values -> [T, inner]."""
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)


class _InTriton(_InTorch):
    """The same, each as one kernel."""

    def __init__(self, cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__(cache, cos, sin)
        self._kernels = import_module("rocstar.engines.torch_kernels")

    def begin(self) -> None:
        """Nothing to do: kernels look angles up by themselves."""

    def add_normed(
        self, hidden: torch.Tensor, more: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self._kernels.add_normed(hidden, more, norm, self._cache.keys.dtype)

    def turn(self, layer: int, projected: torch.Tensor, norms: Any) -> torch.Tensor:
        cache = self._cache
        turned: torch.Tensor = self._kernels.turn(
            projected, *self._tables, norms, cache.keys[layer], cache.values[layer], cache.aim
        )
        return turned

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._kernels.gated(both)
        return found


def _normed(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


# -- products with weights ------------------------------------------------------------------------------------------


class Product:
    """tokens [T, in] -> [T, out]: several linear layers of the same input as one.

    Their weights and biases become views of one tensor, so that writing to the layers writes here. Reordered weights
    leave a layer without data; new ones are passed to `renew`."""

    def __init__(self, *parts: nn.Linear) -> None:
        self.parts = parts
        biases = [part.bias for part in parts]
        self._bias = None if biases[0] is None else _one_of(biases)
        self.weight = _one_of([part.weight for part in parts])
        self._dtype = self.weight.dtype
        self.reorders = packs(self.weight)
        if self.reorders:
            self.renew([self.weight])
            for part in parts:
                part.weight = nn.Parameter(part.weight.to("meta"), requires_grad=False)

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """Take the layers' new weights, reordered."""
        whole = torch.cat([weight.detach().to(self._dtype) for weight in weights])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole, USUAL_ROWS)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self._dtype)
        if not self.reorders:
            return F.linear(tokens, self.weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(tokens, self.weight, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """Whether products run over a reordered matrix."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return cpu_multiplies_bf16()
    return weight.dtype is torch.float32 and weight.numel() >= PACKED_FROM


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN has products in bf16 for this CPU, as with AVX-512; torch's own have a tenth of fp32's speed."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _one_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = whole[begin : begin + len(parameter)]
        begin += len(parameter)
    return whole


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
    wrong = sorted(
        name
        for name in (own.keys() - tied) | tensors.keys()
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape
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
