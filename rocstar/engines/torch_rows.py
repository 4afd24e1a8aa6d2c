"""What the decode loop keeps of each request and of each sequence. Data only; who decides is torch_table.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rocstar.engines.pages import PAGE, Page
from rocstar.types import Sampling

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One request inside the decoder."""

    request_id: str
    session_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    owner: Any = None
    """Whatever the caller wants back with the completion."""
    written: tuple[int, ...] = ()
    """Tokens sampled so far, as long as it does not decode."""
    logprobs: tuple[float, ...] = ()
    """Of these."""
    versions: tuple[int, ...] = ()
    """Of the policy that wrote each."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The tokens of one session, and what is cached of them."""

    session_id: str
    age: int
    """Sessions are numbered in the order in which they were opened."""
    work: Work | None = None
    """None while its tool runs."""
    behind: deque[Work] = field(default_factory=deque)
    """Requests that came while `work` had not ended, in order."""
    row: int | None = None
    """Of `Columns`, as long as anything of it is cached or it decodes."""
    pages: list[Page] = field(default_factory=list)
    opening: int = 0
    """Positions that may be other sequences' to fill: its pages show the same tokens to them."""
    lost: int = 0
    """Positions that were cached when its pages were last given up under pressure."""


class Columns:
    """Numbers of each sequence as arrays, so that a step touches Python objects only for the few that need more than
    one more token. Grows with the sequences whose cache is kept while their tools run."""

    def __init__(self, rows: int, positions: int) -> None:
        self.positions = positions
        self.ids = np.zeros((rows, positions), dtype=np.int32)
        self.logprobs = np.zeros((rows, positions), dtype=np.float32)
        self.versions = np.zeros((rows, positions), dtype=np.int32)
        self.tables = np.zeros((rows, -(-positions // PAGE)), dtype=np.int32)
        """Numbers of its pages."""
        self.cached = np.zeros(rows, dtype=np.int64)
        """Tokens with keys and values."""
        self.known = np.zeros(rows, dtype=np.int64)
        """Tokens that are there."""
        self.room = np.zeros(rows, dtype=np.int64)
        """Positions up to which it may write without asking for a page."""
        self.ready = np.zeros(rows, dtype=np.int64)
        """Tokens that the next pass feeds."""
        self.lost = np.zeros(rows, dtype=np.int64)
        self.start = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.seeds = np.zeros(rows, dtype=np.int64)
        self.top_ks = np.zeros(rows, dtype=np.int64)
        self.temperatures, self.top_ps = np.ones(rows), np.ones(rows)
        self.stops = np.full((rows, 1), -1, dtype=np.int64)
        self._free = list(range(rows - 1, -1, -1))

    def take(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)

    def set_work(self, row: int, work: Work) -> None:
        """What a request asks for."""
        sampling, count, known = work.sampling, len(work.token_ids), len(work.token_ids) + len(work.written)
        self.ids[row, :count], self.ids[row, count:known] = work.token_ids, work.written
        self.logprobs[row, count:known], self.versions[row, count:known] = work.logprobs, work.versions
        self.start[row], self.known[row] = count, known
        self.limit[row] = min(count + sampling.max_new_tokens, self.positions)
        self.seeds[row], self.top_ks[row] = sampling.seed, sampling.top_k
        self.temperatures[row], self.top_ps[row] = sampling.temperature, sampling.top_p
        self._set_stops(row, sampling.stop_token_ids)

    def save_work(self, row: int, work: Work) -> None:
        """What it has written so far."""
        begin, end = int(self.start[row]), int(self.known[row])
        work.written = tuple(self.ids[row, begin:end].tolist())
        work.logprobs = tuple(self.logprobs[row, begin:end].tolist())
        work.versions = tuple(self.versions[row, begin:end].tolist())

    def _set_stops(self, row: int, stop_token_ids: Many[int]) -> None:
        lacking = len(stop_token_ids) - self.stops.shape[1]
        if lacking > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, lacking)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(stop_token_ids)] = stop_token_ids

    def _grow(self) -> None:
        rows = len(self.ids)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self._free = list(range(2 * rows - 1, rows - 1, -1))
