"""The arguments of `rocstar eval`, defined only here. Imports nothing heavy, because the command line builds its help
page from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ENDPOINT_KEY, JUDGE_KEY = "OPENAI_API_KEY", "ROCSTAR_JUDGE_API_KEY"
"""Environment variables that hold API keys; none is needed where an endpoint asks for none."""
RUNS = Path("runs")
OPTIONS = {
    "max_turns": "rollout.max_turns",
    "max_response_tokens": "rollout.max_response_tokens",
    "template": "rollout.template",
    "verifier": "evaluate.verifier",
}
"""Settings of the recipe that have an option: its name, and the key."""


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """The fields are the arguments and options of the command, None if not given."""

    model: Annotated[
        str,
        Argument(
            metavar="SUBJECT", help="A model folder, a run's name or `last`; with --endpoint the model's name there."
        ),
    ]
    settings: Annotated[
        list[str] | None,
        Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the recipe to change.", show_default=False),
    ] = None
    data: Annotated[
        str | None, Option(metavar="FILE", help="JSONL, CSV or parquet, plain or gzip.", show_default=False)
    ] = None
    benchmark: Annotated[
        str | None, Option(metavar="NAMES", help="Comma list of benchmarks, or paths to your own.", show_default=False)
    ] = None
    data_folder: Annotated[
        Path | None, Option(metavar="FOLDER", help="Holds the benchmarks' rows; default: the hub.")
    ] = None
    accept_rows: Annotated[
        bool, Option("--accept-rows", help="Take a benchmark's rows although their checksum differs.")
    ] = False
    endpoint: Annotated[
        str | None, Option(metavar="URL", help=f"OpenAI-compatible, up to /v1; key: {ENDPOINT_KEY}.")
    ] = None
    tools: Annotated[
        str | None,
        Option(
            help="With --endpoint: openai (default), its own form of calls; text, the paper's; or none: it runs tools "
            "of its own, as rocstar serve does, and is sent the question alone."
        ),
    ] = None
    system: Annotated[str | None, Option(metavar="TEXT", help="With --endpoint: the system message; '' for none.")] = (
        None
    )
    parallel: Annotated[int | None, Option(min=1, help="Attempts at once, or requests to a judge; default: 32.")] = None
    judge: Annotated[str | None, Option(metavar="URL", help=f"Endpoint that judges arena_hard; key: {JUDGE_KEY}.")] = (
        None
    )
    judge_model: Annotated[str | None, Option(metavar="NAME", help="The judge's name there.")] = None
    n: Annotated[
        int | None, Option("--n", min=1, metavar="K", help="Attempts per problem; default: 1, or the benchmark's.")
    ] = None
    temperature: Annotated[float | None, Option(min=0, help="0 is greedy; default: 1.0, or the benchmark's.")] = None
    max_turns: Annotated[int | None, Option(help="Of an attempt; default: the benchmark's, the run's, or 10.")] = None
    max_response_tokens: Annotated[
        int | None, Option(help="Default: the benchmark's, the run's, or 8,192; less where less fits.")
    ] = None
    question: Annotated[
        list[str] | None,
        Option(metavar="COLUMN", help="Column with the question; several are joined.", show_default=False),
    ] = None
    answer: Annotated[str, Option(metavar="COLUMN", help="Column with the reference answer.")] = "answer"
    limit: Annotated[int | None, Option(min=1, help="Only the first so many problems.")] = None
    template: Annotated[str | None, Option(help="As rollout.template; same default.")] = None
    verifier: Annotated[str | None, Option(help="As evaluate.verifier; same default.")] = None
    runs: Annotated[Path, Option("--runs", help="Folder that holds the runs.")] = RUNS

    @property
    def columns(self) -> list[str]:
        """Those of the question."""
        return self.question or ["question"]

    @property
    def options(self) -> Mapping[str, str]:
        """Settings of the recipe that were typed as options: as `section.key=value`, and as they were typed."""
        typed = {name: getattr(self, name) for name in OPTIONS}
        return {
            f"{OPTIONS[name]}={value}": f"--{name.replace('_', '-')} {value}"
            for name, value in typed.items()
            if value is not None
        }
