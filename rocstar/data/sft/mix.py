"""Chooses the rows that a mix takes from each source; and the store of rows on disk. The choice is pure: it uses only
row ids.

No row is ever taken twice. A source with fewer rows than its share runs dry: it gives all its rows, the others do not
fill the gap, and the mix is smaller by that; the datasheet records it."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rocstar.data.sft.format import Chat, dumped, row_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Number of rows that one source gives to a mix."""

    available: int
    wanted: int
    """Rows due to its weight."""

    @property
    def taken(self) -> int:
        return min(self.wanted, self.available)

    @property
    def short(self) -> int:
        """Rows that the source could not give."""
        return self.wanted - self.taken


def shares(available: Mapping[str, int], weights: Mapping[str, float], rows: int | None) -> dict[str, Share]:
    """Rows by source. weights: any positive numbers, only their ratios count; empty for "by size", which takes every
    row when `rows` is None. rows: of the mix; None for the most that keeps the ratios without a source running dry."""
    parts = dict(weights) or {name: float(count) for name, count in available.items()}
    whole = sum(parts.values())
    if not whole:
        return {name: Share(available=count, wanted=0) for name, count in available.items()}
    if rows is None:
        # The slack keeps a quotient like 299.9999999 from losing a row.
        rows = math.floor(min(available[name] * whole / part for name, part in parts.items() if part) + 1e-6)
    exact = {name: rows * part / whole for name, part in parts.items()}
    wanted = {name: math.floor(count) for name, count in exact.items()}
    left = rows - sum(wanted.values())
    by_remainder = sorted(exact, key=lambda name: (wanted[name] - exact[name], list(exact).index(name)))
    for name in by_remainder[:left]:
        wanted[name] += 1
    return {name: Share(available=count, wanted=wanted[name]) for name, count in available.items()}


def smaller(taken: Mapping[str, Share], rows: int | None) -> list[str]:
    """Sentences on what limits the mix: sources that ran dry, or, without a number of rows, the scarcest source."""
    dry = [
        f"{name} ran dry: {share.short:,} rows fewer than its weight asks for, which are not replaced"
        for name, share in taken.items()
        if rows and share.short
    ]
    whole = sum(share.taken for share in taken.values())
    over = sum(share.available for share in taken.values()) - whole
    if dry:
        return [
            *dry,
            f"the mix has {whole:,} of the {rows:,} rows that mix.rows asks for, in another ratio than the weights'",
        ]
    if rows or not over:
        return []
    scarce = max(taken, key=lambda name: taken[name].taken / taken[name].available)
    return [f"{scarce} sets the size of the mix, {whole:,} rows, by its weight; {over:,} of others are left over"]


def chosen(ids: Sequence[str], count: int, seed: int) -> list[int]:
    """Positions of the rows taken, drawn without replacement; a row's place in the draw depends on the seed and its
    id alone, so more rows in the file or a larger count change nothing for the others."""
    return sorted(ordered(range(len(ids)), ids, f"{seed}\x1fdraw")[:count])


def ordered(positions: Iterable[int], ids: Sequence[str], salt: str) -> list[int]:
    """Positions in a random order that depends on the salt and each row's id alone."""
    return sorted(positions, key=lambda n: (hashlib.sha256(f"{salt}\x1f{ids[n]}".encode()).digest(), n))


def quantiles(values: Sequence[int]) -> dict[str, int]:
    """p50, p95 (nearest rank) and max; empty when there are none."""
    if not values:
        return {}
    ranked = sorted(values)
    return {name: ranked[math.ceil(p * len(ranked)) - 1] for name, p in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}


class RowStore(AbstractContextManager["RowStore"]):
    """Checked rows, in one file in order of arrival, with an index in memory of about 350 bytes a row. A context
    manager that removes its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._places = array("Q")
        self._tokens = array("L")
        self.ids: list[str] = []
        """`Chat.id` of each row."""
        self._known: set[str] = set()
        self._starts: dict[str, range] = {}

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)  # first: closing fails on a full disk
        self._file.close()

    def add(self, conversation: Chat, tokens: int) -> bool:
        """Store a row, `tokens` long; returns False for a duplicate. Rows of a source must be adjacent."""
        identity = conversation.id
        if identity in self._known:
            return False
        self._known.add(identity)
        self._places.append(self._file.tell())
        self._tokens.append(tokens)
        self.ids.append(identity)
        self._file.write(dumped(row_of(conversation)).encode() + b"\n")
        name, end = conversation.source, len(self.ids)
        self._starts[name] = range(self._starts.get(name, range(end - 1, end)).start, end)
        return True

    def positions(self, source: str) -> range:
        """Positions of the rows of a source."""
        return self._starts.get(source, range(0))

    def lengths(self, positions: list[int] | range) -> list[int]:
        """Tokens of each row; 0 where nothing was measured."""
        return [self._tokens[n] for n in positions]

    def line(self, position: int) -> bytes:
        """A row as one line, line end included."""
        self._file.seek(self._places[position])
        return self._file.readline()
