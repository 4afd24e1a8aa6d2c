"""Packed rows against each row alone, for the shapes that are trained."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config import LearningSection
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError
from rocstar.learning.attention import blocks_of
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.policy import Policy
from rocstar.types import Batch
from tests.learning.examples import codec, rows

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

TEMPLATE = template_named("compact")


def causal_lm(kind: str, **changes: Any) -> Any:
    """A random model of one of the shapes, output embeddings tied or not as its real sizes have it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
        ("Llama", {"tie_word_embeddings": False}),
        ("Mistral", {"sliding_window": 64}),
    ],
)
def test_packed_gradients_are_those_of_each_row_alone(kind: str, changes: dict[str, Any]) -> None:
    batch = rows((60, 5, 33, 34, 36, 9))
    model, twin = causal_lm(kind, **changes), causal_lm(kind, **changes)
    learner = GrpoLearner(Policy(model, codec(), TEMPLATE), LearningSection(max_grad_norm=1e9), temperature=0.7)
    learner.update(Batch(rows=batch))
    total = torch.zeros(())
    for row in batch:
        ids = torch.tensor([row.token_ids])
        everything = torch.log_softmax(twin(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7, -1)
        values = everything.gather(1, ids[0, 1:, None]).squeeze(1)
        total = total - ((values - values.detach()).exp() * row.advantage * torch.tensor(row.loss_mask[1:])).sum()
    (total / sum(sum(row.loss_mask) for row in batch)).backward()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_row_longer_than_the_sliding_window_is_refused() -> None:
    learner = GrpoLearner(Policy(causal_lm("Mistral", sliding_window=64), codec(), TEMPLATE), LearningSection())
    with pytest.raises(ConfigError, match="65 tokens and the model attends over a sliding window of 64"):
        learner.update(Batch(rows=rows((65,))))


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    with pytest.raises(ConfigError, match="cohere can't be trained here: rows packed into one sequence"):
        Policy(causal_lm("Cohere", logit_scale=0.5), codec(), TEMPLATE)


def test_documents_of_like_length_share_a_call() -> None:
    blocks = blocks_of([5, 9, 30, 90, 100, 200], torch.device("cpu"))
    assert [(b.begin, b.end, b.count, b.longest) for b in blocks] == [
        (0, 44, 3, 30),
        (44, 234, 2, 100),
        (234, 434, 1, 200),
    ]
    assert blocks[0].slots is not None and blocks[0].slots.tolist()[:8] == [0, 1, 2, 3, 4, 30, 31, 32]
    assert blocks[2].slots is None
