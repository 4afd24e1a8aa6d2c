"""A tiny policy and rows to learn from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rocstar.config.sections import ModelSection
from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.templates import template_named
from rocstar.learning.models import random_model
from rocstar.learning.policy import Policy
from rocstar.learning.ranks import ALONE, Ranks
from rocstar.types import BatchRow, RowOrigin, SftRow

SHAPE = ModelSection(
    vocab_size=104,  # as many as `codec` has
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    rope_theta=1000.0,
    max_positions=64,
)


def model(seed: int = 0) -> Any:
    """Output projections of random_model are zero; here they are not, so that layers matter."""
    import torch

    made = random_model(SHAPE, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(0, 0.1, generator=generator)
    return made


def codec() -> Codec:
    markers = template_named("compact").markers
    return train_bpe(["print(1) 2 3"], vocab_size=104, markers=markers, word_merges=False)


def policy_of(made: Any, *, ranks: Ranks = ALONE, seed: int = 0, **section: Any) -> Policy:
    settings = ModelSection.model_validate(section)
    return Policy(made, codec(), template_named("compact"), settings, ranks=ranks, seed=seed)


def policy(seed: int = 0, **section: Any) -> Policy:
    return policy_of(model(seed), **section)


def naive_laws(made: Any, row: BatchRow, temperature: float = 1.0) -> Any:
    """[T - 1, V] log-probabilities by a plain forward of one row alone."""
    import torch

    logits = made(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1)


def naive_values(made: Any, row: BatchRow, temperature: float = 1.0) -> Any:
    """[T - 1] of the row's own tokens."""
    import torch

    return naive_laws(made, row, temperature).gather(1, torch.tensor(row.token_ids)[1:, None]).squeeze(1)


def same_weights(one: Policy, other: Policy) -> bool:
    import torch

    return all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


def assert_gradients(mine: Policy, expected: Any) -> None:
    """They are those of `expected`, a model or tensors in the same order."""
    import torch

    others = [one.grad for one in expected.parameters()] if isinstance(expected, torch.nn.Module) else expected
    for parameter, other in zip(mine.parameters, others, strict=True):
        torch.testing.assert_close(parameter.grad, other, atol=1e-6, rtol=1e-4, check_dtype=False)


def rows(lengths: Sequence[int] = (12, 5, 9, 20, 7), seed: int = 0) -> tuple[BatchRow, ...]:
    """Two prompt tokens, then written ones with a reply of two tokens in the middle of the longer rows."""
    rng = random.Random(seed)
    return tuple(
        BatchRow(
            token_ids=[rng.randrange(SHAPE.vocab_size) for _ in range(length)],
            loss_mask=[t >= 2 and not 5 <= t < 7 for t in range(length)],
            sampled_logprobs=[0.0] * length,
            advantage=rng.choice((-1.0, -0.5, 0.5, 1.5)),
            origin=RowOrigin(0, place),
        )
        for place, length in enumerate(lengths)
    )


def written(ids: Sequence[int], begin: int = 1) -> BatchRow:
    """Tokens that the policy wrote, from place `begin`."""
    mask = [t >= begin for t in range(len(ids))]
    return BatchRow(token_ids=ids, loss_mask=mask, sampled_logprobs=[0.0] * len(ids), advantage=1.0)


def sft_rows(count: int = 6) -> list[SftRow]:
    return [SftRow(token_ids=tuple(row.token_ids), loss_mask=tuple(row.loss_mask)) for row in rows((9,) * count)]
