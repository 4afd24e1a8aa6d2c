"""The compact forward against the transformers forward, for each family it runs, and what it leaves to the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rocstar.engines import torch_compact
from rocstar.engines.torch_compact import CompactForward
from rocstar.engines.torch_engine import TorchEngine
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.types import Completion, Sampling, Weights
from tests.engines.models import HEADS, MODELS, SHAPE, VOCAB, lively, llama, mistral, naive_logprobs, qwen

PROMPT = tuple(n * 7 % VOCAB for n in range(50))


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As matrices of larger models are."""
    monkeypatch.setattr(torch_compact, "PACKED_FROM", 0)


def qwen2(seed: int = 0) -> Any:
    """Biases on query, key and value."""
    size = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    model = Qwen2ForCausalLM(
        Qwen2Config(**size, num_attention_heads=2, num_key_value_heads=1, use_sliding_window=False)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
    return lively(model, seed)


def rounded(make: Callable[[int], Any], seed: int) -> Any:
    """The weights of bf16 in a model of fp32, angles unrounded."""
    model = make(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def llama3(seed: int = 0) -> Any:
    """Angles stretched by frequency."""
    rotation = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return lively(LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, rope_parameters=rotation)), seed)


def grouped_qwen3(seed: int = 0) -> Any:
    return lively(Qwen3ForCausalLM(Qwen3Config(**SHAPE, **HEADS, attention_bias=True)), seed)


def changing_rotation(seed: int = 0) -> Any:
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return lively(LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, rope_parameters=rotation)), seed)


def tanh_gates(seed: int = 0) -> Any:
    return lively(LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, hidden_act="tanh")), seed)


def windowed_qwen3(seed: int = 0) -> Any:
    """Every other layer attends to the last seven positions."""
    kinds = ["full_attention", "sliding_attention"] * SHAPE["num_hidden_layers"]
    windows = {"layer_types": kinds[: SHAPE["num_hidden_layers"]], "use_sliding_window": True, "sliding_window": 7}
    return lively(Qwen3ForCausalLM(Qwen3Config(**SHAPE, **HEADS, **windows)), seed)


COMPACT: list[Callable[[int], Any]] = [qwen, grouped_qwen3, qwen2, llama, llama3]
LIBRARY: list[Callable[[int], Any]] = [
    *(changing_rotation, tanh_gates, mistral, windowed_qwen3, MODELS["gemma3"], MODELS["qwen3_5"], MODELS["lfm2"])
]


async def written(engine: TorchEngine, tokens: int = 20) -> Completion:
    asked = Sampling(max_new_tokens=tokens, seed=3)
    completion = await engine.generate(PROMPT, asked, request_id="r", session_id="s")
    await engine.close()
    return completion


@pytest.mark.parametrize("make", [*COMPACT, *LIBRARY])
async def test_logprobs_are_those_of_transformers(make: Callable[[int], Any]) -> None:
    """Of a turn, and of the next one of its session."""
    model = make(0)
    # A state is summed token by token in the engine and in chunks here, where these weights make much of last digits.
    noise = 1e-4 if "linear_attention" in (getattr(model.config, "layer_types", None) or ()) else 1e-5
    engine, ids = TorchEngine(make(0), rows=2, positions=128), PROMPT
    assert isinstance(engine._decoder._forward, CompactForward) == (make in COMPACT)
    for turn in range(2):
        asked = Sampling(max_new_tokens=20, seed=3)
        completion = await engine.generate(ids, asked, request_id=f"{turn}", session_id="s")
        expected = naive_logprobs(model, ids, completion.token_ids, Sampling(max_new_tokens=1))
        assert completion.logprobs == pytest.approx(expected, abs=noise)
        ids = (*ids, *completion.token_ids, 5, 9)
    await engine.close()


@pytest.mark.parametrize("make", [grouped_qwen3, llama3])
async def test_a_bf16_model_runs_in_bf16(make: Callable[[int], Any]) -> None:
    completion = await written(TorchEngine(make(0).to(torch.bfloat16), rows=2, positions=128))
    expected = naive_logprobs(rounded(make, 0), PROMPT, completion.token_ids, Sampling(max_new_tokens=1))
    assert completion.logprobs == pytest.approx(expected, abs=0.3)
    assert completion.logprobs != pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("make", "dtype"), [(qwen2, torch.float32), (llama, torch.bfloat16)])
async def test_weights_from_memory_are_those_that_decode(make: Callable[[int], Any], dtype: torch.dtype) -> None:
    model = make(0)
    other = make(1) if dtype is torch.float32 else rounded(make, 1)
    tensors = {name: tensor.to(dtype) for name, tensor in other.state_dict().items()}
    engine = TorchEngine(model, rows=2, positions=128)
    await engine.load_weights(Weights(version=4, tensors=tensors))
    completion = await engine.generate(PROMPT, Sampling(max_new_tokens=10), request_id="r", session_id="s")
    with pytest.raises(EngineUnavailable, match=r"weights 5 do not fit the model: 1 tensors .* model.norm.weight"):
        await engine.load_weights(Weights(version=5, tensors={**tensors, "model.norm.weight": torch.ones(3)}))
    assert engine.load().policy_version == 4
    await engine.close()
    expected = naive_logprobs(other, PROMPT, completion.token_ids, Sampling(max_new_tokens=1))
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


async def test_ids_beyond_the_tokenizer_are_not_drawn_and_take_no_probability() -> None:
    completion = await written(TorchEngine(llama(0), rows=2, positions=128, vocab_size=9), tokens=60)
    assert max(completion.token_ids) < 9
    with torch.no_grad():
        logits = llama(0)(input_ids=torch.tensor([[*PROMPT, *completion.token_ids]]), use_cache=False).logits[0]
    laws = torch.log_softmax(logits[len(PROMPT) - 1 : -1, :9], -1)
    expected = laws.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1).tolist()
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}),
        ("falcon", {}),
        ("diffllama", {"head_dim": 16}),
        ("bert", {}),
        ("jetmoe", {"kv_channels": 16, "num_local_experts": 4}),
    ],
)
def test_a_model_that_does_more_than_our_attention_is_refused(kind: str, changes: dict[str, Any]) -> None:
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    more = {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 24}
    size |= more if kind == "deepseek_v3" else {}
    ids = {"vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = lively(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ids, **size, **changes)))
    with pytest.raises(ConfigError, match=f"the torch engine cannot run a model of type {kind}: "):
        TorchEngine(model, rows=2, positions=32)


def test_a_cache_of_one_page_is_enough_to_be_checked() -> None:
    TorchEngine(tanh_gates(), rows=1, positions=8, kv_tokens=8)
