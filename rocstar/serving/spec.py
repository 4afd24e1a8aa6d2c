"""The arguments of `rocstar chat` and `rocstar serve`, defined only here. Imports nothing heavy, because the command
line builds its help pages from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to talk to."""

    model: Annotated[str, Argument(metavar="MODEL_OR_RUN", help="A model folder, a hub id, a run's name or `last`.")]
    settings: Annotated[
        list[str] | None,
        Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the recipe to change.", show_default=False),
    ] = None
    context: Annotated[
        int | None,
        Option(min=1, metavar="TOKENS", help="Of the longest conversation; default: by the model.", show_default=False),
    ] = None
    runs: Annotated[Path, Option("--runs", help="Folder that holds the runs.")] = Path("runs")


@dataclass(frozen=True, kw_only=True)
class ChatSpec(ModelSpec):
    prompt: Annotated[
        str | None, Option("-p", "--prompt", help="Ask once and stop; `-` reads stdin.", show_default=False)
    ] = None
    system: Annotated[str | None, Option(help="System message.", show_default=False)] = None
    max_tokens: Annotated[
        int | None, Option(min=1, help="Of one answer, tools' too; default: the recipe's.", show_default=False)
    ] = None
    temperature: Annotated[float, Option(min=0.0, help="0: always the most likely token.")] = 0.0
    fresh: Annotated[bool, Option("--fresh", help="Each question begins a new conversation.")] = False
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False


@dataclass(frozen=True, kw_only=True)
class ServeSpec(ModelSpec):
    host: Annotated[str, Option(help="Another than loopback needs ROCSTAR_SERVE_TOKEN.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8701
    rows: Annotated[int, Option(min=1, help="Answers written at once; more wait.")] = 8
