"""Sizes, costs and rules of an engine for the simulator (simulated_engine.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rocstar.errors import ConfigError

COSTS = (
    "step_seconds",
    "seconds_per_cached_token",
    "seconds_per_sequence",
    "seconds_per_prefill_token",
    "seconds_per_request",
)
"""The cost fields of an EngineModel; 0 until they are measured or given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Sizes and costs of one engine."""

    capacity_tokens: int
    """Tokens that the KV cache holds."""
    step_seconds: float = 0.0
    """Fixed seconds of a decode step: reading the weights. This and the next four are COSTS."""
    seconds_per_cached_token: float = 0.0
    """Added to a step by each token in the caches that it reads."""
    seconds_per_sequence: float = 0.0
    """Added to a step by each running request."""
    seconds_per_prefill_token: float = 0.0
    """Added to a step by each token that is fed, first or again."""
    seconds_per_request: float = 0.0
    """Added by each request that begins, also after an eviction: receiving and answering it."""
    chunk_tokens: int = 8192
    """Most tokens fed in one step."""
    most_running: int = 1 << 30
    """Requests that run at once."""
    watermark: float = 0.0
    """Share of the cache that has to stay free when a request is admitted beside others (0 is vLLM's default)."""
    evicted_share: float = 0.0
    """Share of the running requests that are evicted when the next step does not fit; at least one. 0 is vLLM's rule,
    0.5 SGLang's according to the paper (3.2). Not with `oldest_first`."""
    page_tokens: int = 1
    """The cache is given out in pages of so many tokens; a page with a prompt's end is not shared."""
    prefix_cache: bool = True
    """Whether a request's cache is kept for its trajectory's next turn, and siblings share a prompt."""
    told_lengths: bool = False
    """Whether the engine knows the length of a turn in advance, as when lengths are dictated. It then keeps no page
    free for a request that is on its last page."""
    patience_seconds: float = 0.0
    """With nothing to compute, seconds until the cache of a trajectory that waits for its tool goes to a waiting
    request."""
    oldest_first: bool = False
    """False: requests are served in order of arrival; caches of trajectories that wait for a tool give way first, also
    to a request that comes, then the latest requests (vLLM). True: trajectories are served in the order in which they
    came to the engine, and the newest gives way, whatever it does (rocstar's torch engine)."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.oldest_first and self.evicted_share:
            raise ConfigError(
                f"evicted_share {self.evicted_share} is no rule of an engine whose newest trajectory gives way alone; "
                "leave it at 0"
            )

    def slower(self, factor: float) -> EngineModel:
        """The same engine, every step of it `factor` times as long."""
        return with_costs(self, [getattr(self, name) * factor for name in COSTS])

    def shared_tokens(self, prompt_tokens: int) -> int:
        """Tokens of a prompt in pages that siblings share."""
        whole = prompt_tokens if self.page_tokens == 1 else prompt_tokens - 1
        return whole // self.page_tokens * self.page_tokens

    def in_pages(self, tokens: int) -> int:
        """Tokens of the cache that so many of one trajectory take."""
        return -(-tokens // self.page_tokens) * self.page_tokens


def with_costs(model: EngineModel, costs: Iterable[float]) -> EngineModel:
    """The same engine with these costs, in the order of COSTS; seconds."""
    named: dict[str, Any] = {name: float(cost) for name, cost in zip(COSTS, costs, strict=True)}
    return replace(model, **named)


def torch_engine(*, capacity_tokens: int, most_running: int) -> EngineModel:
    """Sizes and rules of rocstar's torch engine; what it costs is to be measured."""
    return EngineModel(
        capacity_tokens=capacity_tokens,
        chunk_tokens=256,
        most_running=most_running,
        page_tokens=16,
        patience_seconds=1.0,
        oldest_first=True,
    )
