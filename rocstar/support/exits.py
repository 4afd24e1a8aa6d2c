"""Reports failures on the command line: exit code and one sentence without terminal control characters. Our own bugs
show their traceback.

Not here: the sentences of our own errors, which are written where they are raised.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import sys
import unicodedata
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rocstar
from rocstar.errors import ConfigError, ContractBroken, DataError, RocstarError, Unavailable, full_disk, is_disk_full

OK = 0
FAILED = 1
USAGE = 2
"""An error of the user's input: command line, recipe or data."""
NOT_READY = 3
"""Something this machine lacks."""
INTERRUPTED = 130
"""Ctrl-C, after a clean save."""

EXTRA_OF = {
    **dict.fromkeys(("typer", "rich", "pydantic", "math_verify", "msgspec"), ""),
    **dict.fromkeys(("torch", "transformers", "safetensors", "jinja2"), "train"),
    **dict.fromkeys(("numpy", "sympy", "starlette", "uvicorn", "uvloop", "httptools", "websockets"), "sandbox"),
    **dict.fromkeys(("pyarrow", "tokenizers", "httpx", "datasets"), "data"),
    **dict.fromkeys(("gguf", "accelerate"), "gguf"),
    "peft": "lora",
    "mcp": "mcp",
    "ray": "cluster",
    "matplotlib": "plot",
    "duckdb": "view",
    **dict.fromkeys(("nltk", "langdetect"), "eval"),
}
"""Module -> the lightest extra of pyproject.toml that brings it; "" for the base."""

MOST_SENTENCE = 2000  # characters, about a screen
STDOUT, STDERR = 1, 2  # their descriptors


def visible(text: str) -> str:
    """Escape control and direction characters, so that text of a model, a program or a file can't control a
    terminal."""
    return "".join(map(_shown, text))


def shortened(sentence: str) -> str:
    """Its beginning and its end, where it repeats a long value: what happened, and what to do."""
    half = MOST_SENTENCE // 2
    return sentence if len(sentence) <= MOST_SENTENCE else f"{sentence[:half]} ... {sentence[-half:]}"


def with_pages(sentence: str) -> str:
    """A sentence whose pages (`docs/sandbox.md`) can be opened: an installed package carries a copy of them."""
    pages = Path(rocstar.__file__).parent / "docs"

    def opened(found: re.Match[str]) -> str:
        return str(page) if (page := pages / found[1]).is_file() else found[0]  # or a file of the user's

    return re.sub(r"(?<![\w/.-])docs/([\w-]{1,99}\.md)", opened, sentence)


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return f"\\u{ord(character):04x}"


def failure(error: Exception) -> tuple[int, str] | None:
    """Exit code and sentence for an error that the user can act on; None for our own bug."""
    if isinstance(error, ContractBroken):
        return None
    if isinstance(error, ConfigError | DataError):
        return USAGE, str(error)
    # sandbox/ stands alone, so its error is no RocstarError; where it was never loaded it was never raised.
    call = sys.modules.get("rocstar.sandbox.call")
    if isinstance(error, Unavailable) or (call is not None and isinstance(error, call.SandboxDown)):
        return NOT_READY, str(error)
    if isinstance(error, RocstarError):
        return FAILED, str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "rocstar":
        extra = EXTRA_OF.get(error.name.split(".")[0])
        remedy = "rocstar does not bring it: install it, or put its folder on PYTHONPATH"
        if extra is not None:
            remedy = f"install what is missing with: {install_command(extra)}"
        steps = (remedy, *getattr(error, "__notes__", ()))
        return NOT_READY, f"{error.name} is not installed; {', and then with: '.join(steps)}"
    if is_disk_full(error):
        return FAILED, f"{full_disk(error)}; free some space and try again"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        limits = "raise the limit of this user (ulimit -u) or of the container (pids.max)"
        return NOT_READY, f"no further thread or process can be started here; {limits}"
    if isinstance(error, MemoryError):
        remedy = "end other programs, or raise the limit of memory, and try again"
        return NOT_READY, f"{str(error) or 'the memory is full'}; {remedy}"
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):  # of tempfile
        return NOT_READY, f"{error.strerror}; free some space there, or name another folder with TMPDIR"
    if isinstance(error, OSError) and error.filename:
        return FAILED, f"{error.filename}: {error.strerror}"
    return None


def need(extra: str) -> None:
    """Check before work begins that an extra is installed. Raises ModuleNotFoundError for its first missing module, and
    ConfigError where Python drops docstrings."""
    if extra == "train" and sys.flags.optimize > 1:
        raise ConfigError("PYTHONOPTIMIZE=2 (-OO) drops docstrings, which transformers reads; unset it")
    for module in (name for name, bringing in EXTRA_OF.items() if bringing == extra):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def install_command(extra: str) -> str:
    """The command that brings an extra, or with "" the base, to this very interpreter; from a checkout, one that pins
    the tested set: scripts/install where it made the environment."""
    chosen = f"[{extra}]" if extra else ""
    checkout = Path(rocstar.__file__).parent.parent
    if extra and Path(sys.prefix).resolve() == checkout / ".venv":
        return f"cd {checkout} && scripts/install {extra}"
    if (checkout / "constraints" / "cpu.txt").is_file():
        return f"cd {checkout} && {sys.executable} -m pip install -c constraints/cpu.txt -e '.{chosen}'"
    return f"{sys.executable} -m pip install 'rocstar{chosen}'"


def open_closed_streams() -> None:
    """Open /dev/null as each standard stream that this process was started without (`>&-`): a file opened later would
    take its number, and get what libraries and child processes print there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, this one
        setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class _Telling(io.FileIO):
    """What it cannot write is lost."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            if (written := super().write(data)) is not None:  # None: a terminal that does not block, and is full
                return written
        return memoryview(data).nbytes


class _Results(io.FileIO):
    """Takes nothing after a failure, which is raised unless it is that the reader of a pipe (`| head`) or the terminal
    has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)  # isatty is false of one that has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # else the shutdown would try once more
            if error.errno != errno.EPIPE and not (is_terminal and error.errno == errno.EIO):
                raise
        return memoryview(data).nbytes


def tell_without_fail() -> None:
    """From now on a message that cannot be written is lost, and so is a result that nobody reads any more: a run of
    days must not end because its terminal, the pipe of `| tee` or the disk of its log is gone."""
    for name, number, kind in (("stdout", STDOUT, _Results), ("stderr", STDERR, _Telling)):
        given = getattr(sys, name)
        with suppress(OSError):  # a stream that is no file, of a program that calls `main` itself, stays
            if given.fileno() == number:
                raw = io.BufferedWriter(kind(number, "wb", closefd=False))
                text = io.TextIOWrapper(raw, given.encoding, given.errors, line_buffering=True)
                vars(sys).update({name: text, f"__{name}__": text})


@cache
def tell_once(sentence: str) -> None:
    """Print on stderr, once per process."""
    print(f"warning: {sentence}", file=sys.stderr)
