"""What a pass leaves is what is said of it, and what was freed goes back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rocstar.learning.forward import hidden_states, pass_shape, prepare
from rocstar.learning.memory import CHUNK_ELEMENTS
from rocstar.learning.models import give_back, keep_freed_memory
from rocstar.learning.pack import pack
from tests.engines.models import qwen3_5, resident

CPU = torch.device("cpu")
SHAPES = {  # heads, of keys, hidden, inner, layers
    "quickstart": (3, 1, 96, 256, 3),
    "wide inside": (4, 4, 128, 1024, 2),
    "many keys": (8, 8, 256, 512, 2),
    "deep": (2, 1, 64, 192, 9),
}


def made(kind: str, name: str) -> Any:
    heads, keys, hidden, inner, layers = SHAPES[name]
    size = {"num_key_value_heads": keys, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    return model(config(**size, num_attention_heads=heads, head_dim=hidden // heads, vocab_size=64)).train()


def held(model: Any, micro: Any) -> int:
    """Bytes that a forward pass keeps for its backward one, each once, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden_states(model, micro)
    return sum(kept.values())


@pytest.mark.parametrize(("name", "kind"), zip(SHAPES, ["llama", "qwen3"] * 2, strict=True))
@pytest.mark.parametrize("siblings", [False, True])
def test_a_pass_leaves_as_many_bytes_as_are_said(kind: str, name: str, siblings: bool) -> None:
    model = made(kind, name)
    prepare(model, CPU)
    counted = [[place > 100 for place in range(200)]] * 3
    (micro,) = pack([[1] * 200] * 3, counted, 10**6, CPU, share=siblings)
    shape = pass_shape(model, recomputed=False)
    said = shape.left(len(micro.ids_T), 3 * 199)
    assert said == pytest.approx(held(model, micro), rel=0.1)
    assert pass_shape(model, recomputed=True).left(100, 100) < shape.left(100, 100)


@pytest.mark.parametrize("heads", [4, 16])
def test_a_gated_delta_rule_keeps_as_many_bytes_as_are_said(heads: int) -> None:
    model = qwen3_5(linear_num_value_heads=heads)
    prepare(model, CPU)
    (micro,) = pack([[1] * 128] * 2, [[True] * 128] * 2, 10**6, CPU, share=False, side_by_side=True)
    assert pass_shape(model, recomputed=False).left(256, 256) == pytest.approx(held(model, micro), rel=0.1)


def test_layers_of_several_widths_are_counted_as_the_widest() -> None:
    config = Gemma4TextConfig(
        layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2, head_dim=8, global_head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48, vocab_size=64,
        vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
    )  # fmt: skip
    shape = pass_shape(Gemma4ForCausalLM(config), recomputed=False)
    assert (shape.layers, shape.queries, shape.keys, shape.inner) == (2, 64, 32, 48)


def test_memory_that_was_freed_goes_back() -> None:
    parts = [torch.ones(2**18) for _ in range(100)]  # 1 MiB each: below what the C library gives back by itself
    full = resident()
    del parts
    give_back()
    assert full - resident() > 80 * 2**20


def test_a_chunks_logits_go_back_at_once() -> None:
    """Kept, they left holes that the next chunk's did not fit: a run took 1.77 GB of the 1.09 that it was said to."""
    keep_freed_memory()
    logits = torch.ones(CHUNK_ELEMENTS)
    full = resident()
    del logits
    assert full - resident() > 2 * CHUNK_ELEMENTS
