"""Runs the user's programs: splits a command, and ends a process with all of its children. Also describes how a process
ended, and gives memory of this one back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryFile
from typing import IO, Any

from rocstar.errors import ConfigError

OUTPUT_BYTES = 1 << 24  # of a program's output, from its end


def words_of(command: str, *, said: str, remedy: str) -> tuple[str, ...]:
    """The words of a command. The program is looked up in PATH, then beside the interpreter: Debian has no `python`
    outside of an environment, and ours need not be activated. said: the setting and its value; remedy: what to write.
    Raises ConfigError for an unreadable command or a missing program."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"{said} can't be read as a command: {error}") from None
    if words and shutil.which(words[0]):
        return words
    if words and (found := shutil.which(words[0], path=os.path.dirname(sys.executable))):
        return found, *words[1:]
    raise ConfigError(f"{said} names no program that exists here; {remedy}")


@asynccontextmanager
async def process_group(*words: str, ends: int = signal.SIGKILL, **given: Any) -> AsyncIterator[Process]:
    """A process in a group of its own, to which the signal `ends` is sent when the context ends. given: of
    `asyncio.create_subprocess_exec`. Raises OSError where it can't be started."""
    starting = asyncio.create_task(asyncio.create_subprocess_exec(*words, start_new_session=True, **given))
    try:
        yield await asyncio.shield(starting)  # one that is cancelled meanwhile would leave its children behind
    finally:
        process = await starting
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ends)
        await process.wait()


async def run_to_end(*words: str, given: bytes = b"", **settings: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a program in a `process_group`, in files and no pipes: a child that outlives it
    would hold those open. given: on stdin. Raises OSError where it can't be started."""
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        async with process_group(*words, stdin=stdin, stdout=stdout, stderr=stderr, **settings) as process:
            code = await process.wait()
        return code, _end_of(stdout), _end_of(stderr)


def how_ended(code: int) -> str:
    """An exit code in words: `ended with exit code 1`, `ended with SIGKILL`; shells tell the latter as 137."""
    with suppress(ValueError):
        return f"ended with {signal.Signals(-code if code < 0 else code - 128).name}"
    return f"ended with exit code {code}"


def give_memory_back() -> None:
    """Return to the system what this process has freed: glibc keeps it, and what one thread freed no other one gets."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    return file.read().decode(errors="replace").strip()
