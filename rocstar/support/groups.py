"""Programs of others that we wait for, each in a process group of its own. Not here: what they are told and say."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


async def run_in_group(words: Sequence[str], **options: Any) -> int:
    """Run a program to its end; its exit code. What is left of its process group then, or when this is cancelled, is
    killed. options: of asyncio.create_subprocess_exec; files are better than pipes, which end with the last child.
    Raises OSError where it can't be started."""
    process = await asyncio.create_subprocess_exec(*words, start_new_session=True, **options)
    try:
        return await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
