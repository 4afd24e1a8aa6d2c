"""What all verbs share: the style of help pages, common options, and how results are written. Loads nothing heavy."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, get_type_hints

import typer

from rocstar.support.exits import INTERRUPTED

# rich would be loaded for help pages and errors alike, which costs more than all the rest of the start.
# With a callback the only verb of a group keeps its name.
STYLE: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None, "callback": lambda: None}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the recipe to change.")
]


def options_of(spec: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb of a function (spec, further options): the fields of the dataclass `spec` become its arguments and
    options, before its own."""

    def verb_of(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(spec, include_extras=True)
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        def verb(**typed: Any) -> None:
            mine = {one.name: typed.pop(one.name) for one in own}
            function(spec(**typed), **mine)

        def parameter(field: Field[Any]) -> inspect.Parameter:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            keyword = inspect.Parameter.KEYWORD_ONLY
            return inspect.Parameter(field.name, keyword, default=default, annotation=hints[field.name])

        further = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        parameters = [*map(parameter, fields(spec)), *further]
        verb.__doc__, verb.__name__ = function.__doc__, function.__name__
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return verb

    return verb_of


def print_json(value: Any) -> None:
    """One JSON object on stdout; what JSON cannot say (nan) is null."""
    from rocstar.record.atomic import plain

    print(json.dumps(plain(value), indent=2))


def write(stream: TextIO, text: str) -> None:
    """A program's output may hold characters that this terminal cannot show."""
    stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
    stream.flush()


def tell_next(*commands: str) -> None:
    """The last line of a command: what its result can be looked at with. On stderr, as it is no result."""
    print(f"look at it with: {', '.join(commands)}", file=sys.stderr)


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
