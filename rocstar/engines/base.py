"""Shared by engines: the requests that all of them refuse, and counters that persist over restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rocstar.errors import ConfigError
from rocstar.types import EngineLoad, Sampling

NOTHING = EngineLoad(capacity_tokens=0, used_tokens=0, running=0, waiting=0)


def refuse_impossible(token_ids: Sequence[int], sampling: Sampling, known: int) -> None:
    """Raises ConfigError for an invalid request; token ids are below `known`."""
    if not token_ids:
        raise ConfigError("a request must have at least one token to continue, got none")
    if max(token_ids) >= known or min(token_ids) < 0:
        raise ConfigError(f"token ids must lie below {known}, got {min(token_ids)} to {max(token_ids)}")
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"a request must allow at least one new token, got {sampling.max_new_tokens}")


def with_earlier(load: EngineLoad, before: EngineLoad) -> EngineLoad:
    """`load` of an engine since its last restart, with the counts from before it."""
    return replace(
        load,
        produced_tokens=before.produced_tokens + load.produced_tokens,
        recomputed_tokens=before.recomputed_tokens + load.recomputed_tokens,
        evictions=before.evictions + load.evictions,
    )
