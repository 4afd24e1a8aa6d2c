"""Concurrent work that succeeds or fails as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. If one fails, or the caller is cancelled, the others are cancelled and awaited. Not a
    TaskGroup, which would wrap the exception in a group."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
