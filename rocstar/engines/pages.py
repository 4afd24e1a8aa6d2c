"""Which sequence holds which pages of the KV cache. Numbers only: keys and values are in torch_cache.py.

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

PAGE = 16  # positions; also in _attention.c


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
