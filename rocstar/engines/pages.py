"""The pages of the KV cache: how many there are, their memory, and which sequence holds which. Numbers only, and no
torch, so that a recipe can be checked before anything starts: keys and values are in torch_cache.py.

A page has PAGE positions of one sequence. Sequences that open with the same tokens hold the same pages; one of them,
the page's writer, feeds their tokens, the others wait for it. A sequence that goes on differently takes a copy.

    prompt of 40 tokens, PAGE 16    A  a0 a1 a2        a2 holds positions 32 to 38 of the prompt, and what A writes
                                    B  a0 a1 b2        b2 began as a copy of a2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from rocstar.errors import ConfigError

PAGE = 16  # positions; also in _attention.c
CacheShape = tuple[int, int, int]
"""Layers, key heads and width of a head."""


@dataclass(slots=True, eq=False)
class Page:
    number: int
    """Its place in the cache, from 1; what is written to page 0 is never read."""
    writer: Any
    """The sequence that may write into it; None once that sequence has released it."""
    name: bytes
    """Hash of its shared tokens and all before them; empty if it shares none."""
    holders: int = 1
    reach: int = 0
    """Position up to which it is filled, once the writer has released it."""


class PagePool:
    """`count` pages, each free or held by any number of sequences."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._named: dict[bytes, Page] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - self.free

    def known(self, names: Iterable[bytes]) -> list[Page]:
        """Pages with these names, in order, up to the first name that no page has."""
        found: list[Page] = []
        for name in names:
            page = self._named.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def take(self, writer: Any, name: bytes = b"") -> Page:
        """A free page; there must be one."""
        page = Page(self._free.pop(), writer, b"" if name in self._named else name)
        if page.name:
            self._named[page.name] = page
        return page

    def leave(self, page: Page, holder: Any, reach: int) -> None:
        """`holder`, which has fed its sequence up to `reach`, releases the page."""
        self.resign(page, holder, reach)
        page.holders -= 1
        if page.holders == 0:
            self._free.append(page.number)
            if page.name:
                del self._named[page.name]

    def resign(self, page: Page, holder: Any, reach: int) -> None:
        """`holder` keeps the page and stops writing into it."""
        if page.writer is holder:
            page.writer, page.reach = None, reach


def names_of(ids: npt.NDArray[np.integer[Any]]) -> list[bytes]:
    """One name for each page of `ids`: a hash of all tokens up to its end. The last page may be only partly full."""
    names, name = [], b""
    for begin in range(0, len(ids), PAGE):
        name = blake2b(name + ids[begin : begin + PAGE].astype(np.int32).tobytes(), digest_size=16).digest()
        names.append(name)
    return names


def kv_pages(kv_tokens: int | None, rows: int, positions: int) -> int:
    """Pages of cache for `rows` sequences of at most `positions` tokens: `kv_tokens` in all, or by default enough for
    all sequences at their longest. Raises ConfigError when they can't hold one sequence."""
    longest = -(-positions // PAGE)
    if kv_tokens is None:
        return rows * longest
    if kv_tokens < positions:
        raise ConfigError(
            f"rollout.kv_tokens {kv_tokens} is less than the {positions} tokens of the longest attempt; raise it, or "
            "lower rollout.max_response_tokens"
        )
    return -(-kv_tokens // PAGE)


def cache_bytes(shape: CacheShape, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of `tokens` tokens; `itemsize`: of one number."""
    layers, heads, width = shape
    return 2 * layers * tokens * heads * width * itemsize


def refuse_too_many_tokens(needed: int, there: int, tokens: int) -> None:
    """Raises ConfigError when a cache of `needed` bytes would take more than there is."""
    if needed > there:
        raise ConfigError(
            f"the keys and values of {tokens} tokens take {needed / 1e9:.1f} GB and {there / 1e9:.1f} GB of memory are "
            "available; lower rollout.kv_tokens, or if it is not set rollout.engine_rows or "
            "rollout.max_response_tokens, which determine it"
        )
