"""What all verbs share: the style of help pages, common options, and how results are written. Loads nothing heavy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, TextIO

import typer

from rocstar.exits import INTERRUPTED

# rich would be loaded for help pages and errors alike, which costs more than all the rest of the start.
STYLE: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def print_json(value: Any) -> None:
    """One JSON object on stdout; what JSON cannot say (nan) is null."""
    from rocstar.runs.atomic import plain

    print(json.dumps(plain(value), indent=2))


def write(stream: TextIO, text: str) -> None:
    """A program's output may hold characters that this terminal cannot show."""
    stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
    stream.flush()


def tell_next(*commands: str) -> None:
    """The last line of a command: what its result can be looked at with. On stderr, as it is no result."""
    print(f"look at it with: {', '.join(commands)}", file=sys.stderr)


def quiet() -> None:
    """Before anything loads torch."""
    from rocstar.threads import quiet_torch

    quiet_torch()


@contextmanager
def stoppable(sentence: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C ends the command with its exit code and this sentence, which says what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        stop(INTERRUPTED, sentence if isinstance(sentence, str) else sentence())


def stop(code: int, sentence: str) -> NoReturn:
    """End the command."""
    print(f"rocstar: {sentence}", file=sys.stderr)
    raise typer.Exit(code)
