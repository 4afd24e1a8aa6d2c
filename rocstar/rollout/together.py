"""Work that is done together, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. Where one fails, or the caller is cancelled, the others are cancelled and seen out. Not a
    TaskGroup: the caller wants the plain exception."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
