"""Rows of fixed tokens with what the current weights give them, for engines that could hold other weights unnoticed.

    row     t0 t1 t2 ...      any ids: what counts is that every layer and the head take part
    given   -  l1 l2 ...      log-probability of each under a forward of its own

Source: ours. What they find: weights that did not arrive, arrived in part, or are computed from an older copy (vLLM's
tied LM head on CPUs). Not found: a difference smaller than the engine's tolerance, as one step's at a low rate."""

from __future__ import annotations

import random
from typing import Any

import torch

from rocstar.learning.forward import hidden_states
from rocstar.learning.head import Head, score_tokens
from rocstar.learning.pack import pack
from rocstar.types import Canary

ROWS, TOKENS = 3, 32


def canary_rows(model: Any, head: Head, known: int, device: torch.device) -> tuple[Canary, ...]:
    """ROWS rows of TOKENS ids below `known`, the same ones in every run."""
    chance = random.Random(0)
    rows = [[chance.randrange(known) for _ in range(TOKENS)] for _ in range(ROWS)]
    counted = [[place > 0 for place in range(TOKENS)]] * ROWS
    (micro,) = pack(rows, counted, ROWS * TOKENS, device, share=False)
    logprobs, _ = score_tokens(head, hidden_states(model.eval(), micro)[micro.places_K], micro.targets_K)
    given = logprobs.reshape(ROWS, TOKENS - 1).tolist()
    return tuple(
        Canary(token_ids=tuple(rows[index]), logprobs=tuple(numbers))
        for index, numbers in zip(micro.indices, given, strict=True)
    )
