"""The error tree. One error per boundary crossed; a failed program is data and never appears here.

RocstarError
  ConfigError            the person must change something; names file, line, key, nearest valid key
  DataError              an input file is wrong; names file, line, field
  Unavailable            we are at fault; safe to retry
    EngineUnavailable
    SandboxUnavailable
    VerifierUnavailable
  RunHalted              a run stopped itself on purpose (fault budget passed, disk full); nothing was lost
  ContractBroken         a bug of ours; never caught
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SQLITE_FULL = 13
FULL = (errno.ENOSPC, errno.EDQUOT)
OF_A_DISK = (*FULL, errno.EIO, errno.EFBIG, errno.EROFS)
SHORTAGES = (*FULL, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class RocstarError(Exception):
    """Base of everything rocstar raises on purpose. `str(error)` is one sentence for a person."""


class ConfigError(RocstarError):
    """The person must change something: a key, a value, a flag, an installed extra."""


class DataError(RocstarError):
    """An input file is wrong; the message names file, line and field."""


class Unavailable(RocstarError):
    """A service of ours failed. Safe to retry; never a reward, never a tool result."""


class EngineUnavailable(Unavailable):
    """The engine could not finish a completion."""


class SandboxUnavailable(Unavailable):
    """The sandbox could not run a program (which says nothing about the program)."""


class VerifierUnavailable(Unavailable):
    """The verifier could not reach a verdict because a worker of ours failed."""


class RunHalted(RocstarError):
    """A run stopped itself on purpose; the message says why and how to go on."""


class ContractBroken(RocstarError):
    """A promise between two rooms was broken: a bug of ours. Never caught."""


def first_line(error: BaseException) -> str:
    """What a library's error says, for a sentence of ours, up to 1,000 characters; its type where it says nothing."""
    lines = (repr if isinstance(error, KeyError) else str)(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])[:1000]


def is_shortage(error: BaseException) -> bool:
    """Whether an error of the user's code, or one behind it, says that this machine has run out of something."""
    found: list[BaseException] = []
    behind: BaseException | None = error
    while behind is not None and not any(behind is one for one in found):  # after `raise error from error` it is
        found.append(behind)
        behind = behind.__cause__ or behind.__context__
    return any(getattr(one, "errno", 0) in SHORTAGES for one in found)


def is_disk_full(error: Exception) -> bool:
    # sqlite3 has an error of its own for it; where it was never loaded it was never raised.
    sqlite = sys.modules.get("sqlite3")
    if sqlite is not None and isinstance(error, sqlite.OperationalError):
        return getattr(error, "sqlite_errorcode", None) == SQLITE_FULL
    return isinstance(error, OSError) and error.errno in FULL


def full_disk(error: Exception) -> str:
    """That a disk is full, and of which file; a run writes to several disks."""
    return f"the disk is full ({getattr(error, 'filename', None) or 'while writing'})"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of a disk within is an OSError that names a file, `path` where it named none; also one of SQLite and of
    libraries in Rust, which have kinds of their own."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else errno.ENOSPC if is_disk_full(error) else getattr(error, "errno", None)
        if number not in OF_A_DISK or isinstance(error, RocstarError) or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error
