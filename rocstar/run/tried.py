"""The result of learning from a run's step (`replay.py`) under one set of settings, and which tokens carry its
gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rocstar.learning.learner import Gradient, GrpoLearner
from rocstar.types import BatchRow, Group, Update

FORKS = 0.2  # share of tokens of highest entropy, as in arXiv 2506.01939
MOST_TOKENS, MOST_ATTEMPTS = 10, 8
BEFORE = 8  # tokens shown before one


@dataclass(slots=True, kw_only=True)
class Tried:
    """The result of a step under one set of settings."""

    settings: str
    groups: Sequence[Group]
    """The attempts that it was learnt from."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over its updates."""
    gradient: Gradient = field(default_factory=dict)
    """The sum of its updates' clipped gradients, by parameter."""
    rows: list[tuple[BatchRow, Sequence[float]]] = field(default_factory=list)
    """Rows of all its updates, with each token's share of the gradient."""

    def add(self, learner: GrpoLearner, update: Update) -> None:
        """Add the learner's latest update."""
        more = {name: self.gradient.get(name, 0) + value for name, value in learner.gradient().items()}
        self.gradient = {**self.gradient, **more}
        self.rows += zip(update.rows, update.carried, strict=True)

    def summary(self, own: Gradient) -> dict[str, Any]:
        """own: the gradient of the run's own settings."""
        tokens, (length, other) = self._tokens(), (math.sqrt(_product(one, one)) for one in (self.gradient, own))
        forks = sorted(tokens, key=lambda one: -one[1].entropies[one[2]])[: round(FORKS * len(tokens))]
        return {
            "settings": self.settings,
            "loss": self.metrics.get("learn/loss"),
            "clip_share": self.metrics.get("learn/clip_share"),
            "gradient_norm": length,
            "cosine": _product(self.gradient, own) / (length * other) if length * other else None,
            "attempts": len({row.origin[:2] for row, _ in self.rows}),
            "tokens": len(tokens),
            "fork_share": sum(share for share, _, _ in forks) if tokens else None,
        }

    def heaviest(self, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
        """The tokens that carry most of the gradient."""
        found = sorted(self._tokens(), key=lambda one: -one[0])[:MOST_TOKENS]
        return [
            {
                "share": share,
                **_attempt(row, self.groups),
                "place": place + _before(row, self.groups),
                "before": decode(row.token_ids[max(0, place - BEFORE) : place]),
                "token": decode(row.token_ids[place : place + 1]),
                "probability": math.exp(row.old_logprobs[place]),
                "advantage": row.token_advantages[place],
            }
            for share, row, place in found
        ]

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that carry most of the gradient, with each token's share of it."""
        total, whole = self._total, dict[tuple[int, ...], tuple[BatchRow, list[float]]]()
        for row, norms in sorted(self.rows, key=lambda one: one[0].origin.conversation):
            whole.setdefault(row.origin[:2], (row, []))[1].extend(norms)
        found = sorted(whole.values(), key=lambda one: -sum(one[1]))[:MOST_ATTEMPTS]
        return [
            {
                "share": sum(carried) / total,
                **_attempt(row, self.groups),
                "advantage": row.advantage,
                "carried": [float(f"{norm / total:.3g}") for norm in carried],
            }
            for row, carried in found
            if sum(carried) > 0
        ]

    def _tokens(self) -> list[tuple[float, BatchRow, int]]:
        """Tokens with a gradient: their share of the sum of norms, their row and their place in it."""
        total = self._total
        return [(norm / total, row, place) for row, norms in self.rows for place, norm in enumerate(norms) if norm > 0]

    @property
    def _total(self) -> float:
        return sum(sum(norms) for _, norms in self.rows)


def _attempt(row: BatchRow, groups: Sequence[Group]) -> dict[str, Any]:
    """`row` counts rows of the file of attempts, from 0."""
    number, place, _ = row.origin
    one, before = groups[number].trajectories[place], sum(len(group.trajectories) for group in groups[:number])
    return {"problem_id": one.problem_id, "index": one.index, "row": before + place}


def _before(row: BatchRow, groups: Sequence[Group]) -> int:
    """Tokens of its attempt's earlier conversations."""
    number, place, part = row.origin
    return sum(len(conversation.token_ids) for conversation in groups[number].trajectories[place].conversations[:part])


def _product(one: Gradient, other: Gradient) -> float:
    both = sorted(one.keys() & other.keys())
    return sum(float(one[name].double().flatten() @ other[name].double().flatten()) for name in both)
