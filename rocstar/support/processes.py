"""Programs of the user's own: the words of a command, and a process that is ended with all that it has started."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from rocstar.errors import ConfigError


def words_of(command: str, *, said: str, remedy: str) -> tuple[str, ...]:
    """said: the setting and its value; remedy: what to write. Raises ConfigError for what can't be read, and where
    there is no such program."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"{said} can't be read as a command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"{said} names no program that is here; {remedy}")
    return words


@asynccontextmanager
async def process_group(*words: str, **given: Any) -> AsyncIterator[Process]:
    """A process in a group of its own, which is killed when the context ends. given: of
    `asyncio.create_subprocess_exec`. Raises OSError where it can't be started."""
    process = await asyncio.create_subprocess_exec(*words, start_new_session=True, **given)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
