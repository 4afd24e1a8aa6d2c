"""Packed rows against each row alone, for the shapes that are trained."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rocstar.config.sections import LearningSection
from rocstar.engines.torch_engine import TorchEngine
from rocstar.errors import ConfigError
from rocstar.learning import attention
from rocstar.learning.attention import PACKED_SDPA, DocumentLayout, calls_of, layout_of, packed_sdpa
from rocstar.learning.forward import is_packed
from rocstar.learning.learner import GrpoLearner
from rocstar.types import BatchRow, Sampling
from tests.engines.models import MODELS, VOCAB, naive_logprobs
from tests.learning.examples import assert_gradients, naive_values, policy_of, rows, written

SMALL = {
    "vocab_size": 104,  # as many as `codec` has
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}

ALTERNATING = {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


def causal_lm(kind: str, **changes: Any) -> Any:
    """A random model of one of the shapes, output embeddings tied or not as its real sizes have it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def behind(ids: list[int], row: BatchRow) -> BatchRow:
    """The row after more tokens, which the policy did not write."""
    return replace(
        row,
        token_ids=[*ids, *row.token_ids],
        loss_mask=[*[False] * len(ids), *row.loss_mask],
        sampled_logprobs=[*[0.0] * len(ids), *row.sampled_logprobs],
    )


def with_siblings(batch: tuple[BatchRow, ...]) -> tuple[BatchRow, ...]:
    """Rows one and two, and four and five, begin with the same long prompt."""
    prompt = list(range(20))
    longer = [behind(prompt, row) for row in batch]
    return (batch[0], longer[1], longer[2], batch[3], longer[4], longer[5])


def with_a_system_message(batch: tuple[BatchRow, ...]) -> tuple[BatchRow, ...]:
    """All rows begin alike."""
    system = list(range(30, 60))
    return tuple(behind(system, row) for row in batch)


@pytest.mark.parametrize(
    ("kind", "changes", "begun"),
    [
        ("Qwen2", {"tie_word_embeddings": True}, tuple),
        ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}, with_a_system_message),
        ("Mistral", {"sliding_window": 96}, with_a_system_message),
        ("Mistral", {"sliding_window": 16}, tuple),
        ("Qwen3", ALTERNATING, with_a_system_message),
    ],
)
def test_packed_gradients_are_those_of_each_row_alone(
    kind: str, changes: dict[str, Any], begun: Callable[[tuple[BatchRow, ...]], tuple[BatchRow, ...]]
) -> None:
    batch = begun(with_siblings(rows((60, 5, 33, 34, 36, 9))))
    model, twin = causal_lm(kind, **changes), causal_lm(kind, **changes)
    learner = GrpoLearner(policy_of(model), LearningSection(max_grad_norm=1e9), temperature=0.7)
    learner.update(batch)
    total = torch.zeros(())
    for row in batch:
        values = naive_values(twin, row, 0.7)
        total = total - ((values - values.detach()).exp() * row.advantage * torch.tensor(row.loss_mask[1:])).sum()
    (total / sum(sum(row.loss_mask) for row in batch)).backward()
    assert_gradients(learner._policy, twin)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Olmo2", "Phi3", "Gemma", "Granite", "Mixtral"])
def test_on_a_gpu_all_that_attention_gets_is_in_the_compute_dtype(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is played by meta tensors, which SDPA checks as it checks those of a GPU."""
    calls: list[set[torch.dtype]] = []

    def spy(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append({tensor.dtype for tensor in qkv})
        return scaled_dot_product_attention(*qkv, **options)

    def as_on_a_gpu(module: Any, *given: Any, layout: DocumentLayout, **options: Any) -> Any:
        there = [tensor.detach().to("meta") for tensor in given[:3]]
        whole = layout_of([[(0, there[0].shape[2])]], torch.device("meta"))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "autocast", lambda device, enabled: nullcontext())  # there is none for meta tensors
            patch.setattr(attention, "scaled_dot_product_attention", spy)
            packed_sdpa(module, *there, None, layout=whole, **options)
        return packed_sdpa(module, *given, layout=layout, **options)

    mine = policy_of(causal_lm(kind, sliding_window=None), dtype="bfloat16")
    AttentionInterface.register(PACKED_SDPA, as_on_a_gpu)
    try:
        GrpoLearner(mine, LearningSection()).update(rows())
    finally:
        AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    assert calls and all(found == {torch.bfloat16} for found in calls)


def test_rows_are_not_packed_where_attention_is_not_told_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows within its window would be learnt from as they should, and longer ones not."""
    assert is_packed(policy_of(causal_lm("Mistral", sliding_window=64)).model)
    untold = lambda *given, sliding_window, **options: packed_sdpa(*given, **options)  # noqa: E731
    monkeypatch.setattr("rocstar.learning.forward.packed_sdpa", untold)
    try:
        assert not is_packed(policy_of(causal_lm("Mistral", sliding_window=64)).model)
    finally:
        AttentionInterface.register(PACKED_SDPA, packed_sdpa)


def emu3() -> Any:
    """Its language model is loaded by the config of the whole, and would be saved with its own."""
    from transformers import Emu3ForCausalLM, Emu3TextConfig

    return Emu3ForCausalLM(Emu3TextConfig(**{**SMALL, "pad_token_id": 0}))


def blt() -> Any:
    """Its config says what its passes take of four parts and not of the whole."""
    from transformers import BltConfig, BltForCausalLM

    parts = ("patcher", "encoder", "decoder", "global")
    inner = {f"{part}_config": {**SMALL, "num_key_value_heads": 4, "hidden_size_global": 32} for part in parts}
    return BltForCausalLM(BltConfig(vocab_size=SMALL["vocab_size"], encoder_hash_byte_group_vocab=16, **inner))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: causal_lm("Cohere", logit_scale=0.5), "cohere can't be trained here: rows learnt from together"),
        (emu3, "emu3_text_model can't be trained here: transformers loads no causal"),
        (blt, "blt can't be trained here: 'BltConfig' object has no attribute"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(made: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        policy_of(made())


@pytest.mark.parametrize("name", [*MODELS])
def test_rows_learn_what_each_would_alone_by_weights_that_care_for_every_token_before(name: str) -> None:
    """Siblings, rows of one token and of more than a chunk, together and apart: a layer that sees the row beside it, or
    the padding, tells at once."""
    model = MODELS[name](0)
    shared = [7 * n % VOCAB for n in range(20)]
    ids = [[*shared, *((n * k + 5) % VOCAB for n in range(length))] for k, length in ((3, 4), (5, 9), (11, 90))]
    ids.append([3, 4])
    expected = [naive_logprobs(model, row[:1], row[1:], Sampling(max_new_tokens=1)) for row in ids]
    asked = [written(row) for row in ids]
    learner = GrpoLearner(policy_of(MODELS[name](0)), LearningSection())
    for parts in ([asked], [[row] for row in asked]):
        found = [row.old_logprobs[1:] for some in parts for row in learner.score(some)]
        assert found == [pytest.approx(row, abs=1e-4) for row in expected]


async def test_a_learner_scores_what_an_engine_wrote_by_a_gated_delta_rule() -> None:
    """Token by token there, in chunks here. With both in fp32 some differ by more than 1e-4."""
    begun = [1, 2, 3]
    engine = TorchEngine(MODELS["qwen3_5"](2), rows=4, positions=256)
    sampling = Sampling(max_new_tokens=100, seed=1)
    found = await engine.generate(begun, sampling, request_id="a", session_id="a")
    await engine.close()
    row = written([*begun, *found.token_ids], begin=3)
    learner = GrpoLearner(policy_of(MODELS["qwen3_5"](2)), LearningSection())
    assert learner.score([row])[0].old_logprobs[3:] == pytest.approx(found.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_recurrent_layers_are_never_packed_however_little_their_weights_say(name: str) -> None:
    """By weights as they are drawn, a row's first tokens move those of the next by less than the check sees."""
    model = MODELS[name](0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
    assert not is_packed(policy_of(model).model)


def test_siblings_take_less_work_than_rows_alone() -> None:
    model = causal_lm("Qwen3")
    tokens: list[int] = []
    model.model.layers[0].register_forward_hook(lambda module, given, output: tokens.append(given[0].shape[1]))
    learner = GrpoLearner(policy_of(model), LearningSection())
    tokens.clear()
    prompt = rows((40,))[0]
    batch = [replace(prompt, loss_mask=[t >= 30 for t in range(40)]) for _ in range(4)]
    learner.update(tuple(batch))
    assert tokens == [29 + 4 * 10]


def test_a_gpu_gets_fewer_calls_and_at_most_a_third_of_padding() -> None:
    lengths = sorted(random.Random(0).choices(range(1, 2000), k=200))
    calls, rest = calls_of(lengths, "cuda"), iter(lengths)
    own = [[next(rest) for _ in range(count)] for count, _ in calls]
    assert [length for part in own for length in part] == lengths
    assert [part[-1] for part in own] == [longest for _, longest in calls]
    assert all(len(part) * part[-1] <= 4 / 3 * sum(part) for part in own)
    assert len(calls) < len(calls_of(lengths, "cpu"))
    assert calls_of([130, 160, 200, 240], "cuda") == ((4, 240),)
