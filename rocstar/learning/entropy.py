"""A pass over attempts that others wrote, for the entropy of each token: no optimizer, no update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rocstar.config.sections import ModelSection
from rocstar.learning.forward import hidden_states, prepare, shares_tokens
from rocstar.learning.head import Head, score_tokens
from rocstar.learning.models import compute_dtype, device_of, load_model
from rocstar.learning.pack import pack

TOKENS = 4096  # of one pass on a CPU; what a layer leaves stays near its caches


class EntropyPass:
    """A model folder, loaded once."""

    def __init__(self, folder: Path, vocab_size: int, temperature: float, section: ModelSection | None = None) -> None:
        """vocab_size: ids below it have a token. temperature: of the distribution whose entropy is meant, above 0.
        Raises ConfigError for a folder that is no model."""
        section = section or ModelSection()
        self._device = device_of(section)
        dtype = compute_dtype(section, self._device)
        self._model = load_model(folder, device=self._device, dtype=dtype)
        prepare(self._model, self._device, dtype)
        embeddings = self._model.get_output_embeddings()
        self._head = Head(weight=embeddings.weight, bias=embeddings.bias, temperature=temperature, known=vocab_size)

    @torch.no_grad()
    def entropies(self, ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]]) -> list[list[float]]:
        """[T] nats for each row of token ids, 0 where it is not counted."""
        self._model.eval()
        found = [[0.0] * len(row) for row in ids]
        for micro in pack(ids, counted, TOKENS, self._device, share=shares_tokens(self._model)):
            hidden = hidden_states(self._model, micro)
            _, entropies = score_tokens(self._head, hidden[micro.places_K], micro.targets_K)
            places = ((row, t) for row in micro.indices for t, yes in enumerate(counted[row]) if yes and t)
            for (row, t), entropy in zip(places, entropies.tolist(), strict=True):
                found[row][t] = entropy
        return found
