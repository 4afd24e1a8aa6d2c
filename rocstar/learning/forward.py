"""One forward pass of a transformers decoder over many rows, up to the LM head."""

from __future__ import annotations

import copy
import math
from operator import mul
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import rms_norm

from rocstar.errors import ConfigError, first_line
from rocstar.learning.attention import PACKED_SDPA, packed_sdpa
from rocstar.learning.head import Head, score_tokens
from rocstar.learning.memory import PassShape, of_rules
from rocstar.learning.pack import MicroBatch, pack
from rocstar.support.layers import knows_documents, sum_in_float64, windows_of

CHECK_ROWS = ((5, 4, 3), (1, 2, 3, 4, 5), (1, 2, 5, 3, 4))  # token ids of three documents, the last two siblings
CHECKED = 2  # tokens of each, the last ones
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Classes of transformers that compute what torch's rms_norm does."""
CHECK_TOLERANCE = 1e-3  # nats; the same numbers in another order of summation differ by 1e-6


def prepare(model: Any, device: torch.device) -> None:
    """Choose how the model learns from rows on `device`: packed into one sequence, or side by side where its layers
    can't separate documents. If it has weights, check that rows get the log-probabilities of each row alone.

    Raises ConfigError for a model that can't be trained so: one that attends to later tokens, or whose logits are not
    just those of its output embeddings."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    if device.type == "cpu":
        sum_in_float64(model)
    if model.device.type != "meta":
        _choose(model)
    model.get_input_embeddings().register_forward_hook(_coarse)
    for module in model.modules():
        if hasattr(module, "_apply_gate"):  # each class of experts whose products transformers chooses
            module.forward = MethodType(_of_rounded, module)
    if device.type == "cuda":
        _fuse_norms(model)
        # cuDNN plans a call for each new shape, in 56 ms and 84 ms backward, and a step's rows bring new shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)


def _choose(model: Any) -> None:
    """Rows in one sequence where the model's layers separate documents, else side by side. Raises ConfigError if both
    layouts change the log-probabilities that each row gets alone, or if no program could load the model's checkpoints.
    config.json decides first: with untrained weights, leaks between documents are too small to measure."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    refused = f"a model of type {model.config.model_type} can't be trained here"
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{refused}: transformers loads no causal language model that was saved with its config")
    gaps: dict[str, float] = {}
    failed: Exception | None = None
    with windows_of(model, CHECKED):
        try:
            own = _own_attention(model)
            expected = _each_alone(model)
            pass_shape(model, recomputed=False)  # an update needs it
        except Exception as error:  # the model's own code may raise anything
            raise ConfigError(f"{refused}: {first_line(error)}") from error
        for way in (PACKED_SDPA, own) if knows_documents(model.config.get_text_config().to_dict()) else (own,):
            try:
                model.set_attn_implementation(way)
                gaps[way] = float((_as_learnt(model) - expected).abs().max())
            except Exception as error:  # likewise
                failed = error
            if gaps.get(way, math.inf) <= CHECK_TOLERANCE:
                return
    if failed is not None and not gaps:
        raise ConfigError(f"{refused}: {first_line(failed)}") from failed
    raise ConfigError(
        f"{refused}: rows learnt from together get log-probabilities that differ by {min(gaps.values()):.2g} "
        "from those of each row alone"
    )


def _own_attention(model: Any) -> str:
    """The attention of a pass over whole rows: torch's kernel, or the model's own code where it supports no other."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    return str(model.config._attn_implementation)


def _fuse_norms(model: Any) -> None:
    """Make each norm over whole tokens one kernel, and under autocast round its output once for all its readers: at
    0.5B an update takes 0.40 s instead of 0.47 and keeps 25 GB instead of 30 (one H100). Gradients are then summed in
    16 bits too."""
    width, last = model.config.get_text_config().hidden_size, getattr(model.base_model, "norm", None)
    for name, module in model.named_modules():
        of_heads = name.endswith(("q_norm", "k_norm"))
        if type(module).__name__ in RMS_NORMS and module.weight.shape == (width,) and not of_heads:
            module.forward = MethodType(_normed if module is last else _normed_and_rounded, module)


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _normed_and_rounded(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return _rounded(_normed(norm, hidden))


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _coarse(embedding: Any, given: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Under autocast, round an embedding like all other matrices, as engines do."""
    return _rounded(embedded).float()


def _of_rounded(experts: Any, *given: Any, **more: Any) -> Any:
    """Under autocast, round matrices of experts like all others, as engines do: autocast leaves the grouped products of
    transformers' experts in the dtype of the weights, fp32."""
    own = copy.copy(experts)
    own._parameters = {name: _rounded(parameter) for name, parameter in experts._parameters.items()}
    return type(own).forward(own, *given, **more)


def is_packed(model: Any) -> bool:
    """Whether the model's rows are packed into one sequence. Where layers can't separate documents, such as recurrent
    ones, rows form a batch, padded at the end, which causal layers never read."""
    return str(model.config._attn_implementation) == PACKED_SDPA


def pass_shape(model: Any, *, recomputed: bool) -> PassShape:
    """The widths that decide the memory of a pass, of the model's widest layer; if the config does not give the MLP's
    inner width, four times the hidden size."""
    config = model.config.get_text_config()
    each = list(getattr(config, "per_layer_config", (config,)))  # transformers before it had one for all layers
    heads = [layer.num_attention_heads for layer in each]
    widths = [getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in each]
    keys = [getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in each]
    rules, rule, _ = of_rules(config.to_dict())
    return PassShape(
        parameters=model.num_parameters(),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        queries=max(map(mul, heads, widths)),
        keys=max(map(mul, keys, widths)),
        inner=max(getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size for layer in each),
        normed=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        rules=rules,
        rule=rule,
        recomputed=recomputed,
    )


def hidden_states(model: Any, micro: MicroBatch) -> torch.Tensor:
    """[T, D], after the last norm."""
    if not is_packed(model):
        ids = micro.ids_T[micro.layout.tokens_S].view(micro.layout.calls[0])
        places: torch.Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return places.index_select(0, micro.layout.places_T)
    ids, positions = micro.ids_T[None], micro.positions_T[None]
    # The attention function reads from the layout where documents begin.
    output = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, layout=micro.layout)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def _each_alone(model: Any) -> torch.Tensor:
    values = []
    for row in CHECK_ROWS:
        ids = torch.tensor([row], device=model.device)
        everything = model.eval()(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        values.append(everything.gather(1, ids[0, 1:, None]).squeeze(1)[-CHECKED:])
    return torch.cat(values).cpu()


@torch.no_grad()
def _as_learnt(model: Any) -> torch.Tensor:
    counted = [[t >= len(row) - CHECKED for t in range(len(row))] for row in CHECK_ROWS]
    packed = is_packed(model)
    (micro,) = pack(CHECK_ROWS, counted, 99, model.device, share=packed, side_by_side=not packed)
    embeddings = model.get_output_embeddings()
    head = Head(weight=embeddings.weight, bias=embeddings.bias)
    return score_tokens(head, hidden_states(model.eval(), micro)[micro.places_K], micro.targets_K)[0].cpu()
