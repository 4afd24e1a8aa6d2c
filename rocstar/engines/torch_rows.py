"""What the decode loop keeps of each request and of each cache row. Data only; the loop is in torch_decoder.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rocstar.types import Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One request inside the decoder."""

    request_id: str
    session_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    owner: Any = None
    """Whatever the caller wants back with the completion."""


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """Who sits in a cache row."""

    session_id: str
    work: Work | None = None
    behind: list[Work] = field(default_factory=list)
    """Requests of the same session that came while `work` decodes, in order."""
    last_used: int = 0
    opening: tuple[int, ...] = ()
    """Tokens it was first started with, all but the last: what siblings may copy."""


@dataclass(slots=True)
class Columns:
    """Per-row numbers as arrays, so that a step touches Python objects only for rows that finish."""

    rows: int
    positions: int
    ids: np.ndarray = field(init=False)
    logprobs: np.ndarray = field(init=False)
    versions: np.ndarray = field(init=False)
    cached: np.ndarray = field(init=False)
    known: np.ndarray = field(init=False)
    start: np.ndarray = field(init=False)
    limit: np.ndarray = field(init=False)
    seeds: np.ndarray = field(init=False)
    temperatures: np.ndarray = field(init=False)
    top_ps: np.ndarray = field(init=False)
    top_ks: np.ndarray = field(init=False)
    stops: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        n = self.rows
        self.ids = np.zeros((n, self.positions + 1), dtype=np.int64)
        self.logprobs = np.zeros((n, self.positions + 1), dtype=np.float32)
        self.versions = np.zeros((n, self.positions + 1), dtype=np.int64)
        self.cached, self.known, self.start, self.limit, self.seeds, self.top_ks = (
            np.zeros(n, dtype=np.int64) for _ in range(6)
        )
        self.temperatures, self.top_ps = np.ones(n), np.ones(n)
        self.stops = np.full((n, 1), -1, dtype=np.int64)

    def set_stops(self, row: int, stop_token_ids: Sequence[int]) -> None:
        lacking = len(stop_token_ids) - self.stops.shape[1]
        if lacking > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, lacking)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(stop_token_ids)] = stop_token_ids

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for name in ("ids", "logprobs", "versions", "cached", "known", "start", "limit", "seeds", "temperatures",
                     "top_ps", "top_ks", "stops"):  # fmt: skip
            column = getattr(self, name)
            column[list(targets)] = column[list(sources)]
