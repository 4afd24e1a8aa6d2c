"""What passes between an engine and those who ask it to continue token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple


class Finish(StrEnum):
    """Why one *completion* ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn for one completion."""

    max_new_tokens: int
    """Hard cap on sampled tokens, the stop token included."""
    temperature: float = 1.0
    """0 means greedy; logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """Nucleus mass kept, 1 for all."""
    top_k: int = 0
    """Tokens kept, 0 for all."""
    seed: int = 0
    """Seed by identity; token t of the completion uses (seed, t) and nothing else."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; it is part of it."""


class VersionSpan(NamedTuple):
    """Consecutive tokens that one policy version wrote."""

    version: int
    """Policy version, counts optimizer steps."""
    tokens: int
    """How many, at least 1."""


def spans_of(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Per-token versions [n] as spans: 5 5 6 -> (5, 2), (6, 1)."""
    return tuple(VersionSpan(version, sum(1 for _ in same)) for version, same in groupby(versions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    token_ids: tuple[int, ...]
    """[n] exactly what was sampled, stop token included."""
    logprobs: tuple[float, ...]
    """[n] natural log of the probability after temperature and before top_p and top_k, over the tokenizer's ids:
    what a learner computes again from the same weights. Truncation only changes which tokens can be drawn."""
    finish: Finish
    """Why it ended."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Which policy versions wrote its tokens, in order; the token counts add up to n. A token's logprob is that of a
    forward pass of its version over everything before it. Empty where no token is, or no policy wrote them."""


def without_tokens(finish: Finish) -> Completion:
    """A completion that ended before its first token."""
    return Completion(token_ids=(), logprobs=(), finish=finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What certain weights must give, for an engine that could hold others without noticing."""

    token_ids: tuple[int, ...]
    """[n]"""
    logprobs: tuple[float, ...]
    """[n-1] of each token but the first, from a plain forward of the weights at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Published weights: tensors of this process, or a folder that another process can read."""

    version: int
    """Policy version, counts optimizer steps."""
    folder: str | None = None
    """Hugging Face model folder that holds them; in /dev/shm they never touch a disk."""
    tensors: Mapping[str, Any] | None = None
    """State dict of the live policy, detached: read before its next update. Used where both are given."""
    canary: tuple[Canary, ...] = ()
    """Rows to check them by once an engine in another process has taken them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine holds right now, in tokens of KV cache and in requests, and what it has done so far."""

    capacity_tokens: int
    """Of KV cache; what one request needs beyond it is refused."""
    used_tokens: int
    """Held by requests that decode, and by sessions that wait for their next request."""
    running: int
    waiting: int
    policy_version: int = 0
    """Of the weights it holds."""
    produced_tokens: int = 0
    """Sampled since the engine started."""
    recomputed_tokens: int = 0
    """Fed again since then because their cache had been given up under pressure."""
    evictions: int = 0
    """How often a session's cache was given up under pressure."""
