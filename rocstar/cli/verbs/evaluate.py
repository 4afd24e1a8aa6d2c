"""`rocstar eval`: a model, a run or an endpoint on a file of problems or on the paper's benchmarks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocstar.cli.verbs.common import AsJson, print_json, quiet, stoppable, tell_next
from rocstar.support.exits import need

if TYPE_CHECKING:
    from rocstar.evaluation.plan import Given

ENDPOINT_KEY, JUDGE_KEY = "OPENAI_API_KEY", "ROCSTAR_JUDGE_API_KEY"
"""Environment variables that hold API keys; none is needed where an endpoint asks for none."""
RUNS = Path("runs")
STOPPED = "stopped; the same command goes on where this one ended"


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT", help="A model folder, a run's name or `last`; with --endpoint the model's name there."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the recipe to change.", show_default=False),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSONL, CSV or parquet, plain or gzip.", show_default=False)
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma list of benchmarks, or paths to your own.", show_default=False),
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Holds the benchmarks' rows; default: the hub.")
    ] = None,
    accept_rows: Annotated[
        bool, typer.Option("--accept-rows", help="Take a benchmark's rows although their checksum differs.")
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help=f"OpenAI-compatible, up to /v1; key: {ENDPOINT_KEY}.")
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            help="With --endpoint: openai (default), its own form of calls; text, the paper's; or none: it runs tools "
            "of its own, as rocstar serve does, and is sent the question alone."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --endpoint: the system message; '' for none.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Requests at once to an endpoint or judge; default: 32.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="URL", help=f"Endpoint that judges arena_hard; key: {JUDGE_KEY}.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(metavar="NAME", help="The judge's name there.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, metavar="K", help="Attempts per problem; default: 1, or the benchmark's."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: 1.0, or the benchmark's.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(help="Default: the benchmark's, the run's, else the recipe default.")
    ] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option(help="Same default, or what fits into the model where that is less.")
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Column with the question; several are joined.", show_default=False),
    ] = None,
    answer: Annotated[str, typer.Option(metavar="COLUMN", help="Column with the reference answer.")] = "answer",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems.")] = None,
    template: Annotated[str | None, typer.Option(help="As rollout.template; same default.")] = None,
    verifier: Annotated[str | None, typer.Option(help="As evaluate.verifier; same default.")] = None,
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")] = RUNS,
) -> None:
    """Measure a model on problems: avg@k and pass@k with 95% intervals. Killed, it goes on with the same command.

    Example: rocstar eval last --benchmark aime24,math500 --data-folder data"""
    typed = {name: value for name, value in locals().items() if name != "as_json"}  # as Given's fields are called
    need("train")
    _refuse_absent(model if endpoint is None else None, benchmark, data_folder, runs)
    if data is not None and benchmark is None:
        _refuse_columns(data, question, answer)
    quiet()
    from rocstar.evaluation.plan import Given

    _measure(Given(**typed, endpoint_key=_key_in(ENDPOINT_KEY), judge_key=_key_in(JUDGE_KEY)), as_json=as_json)


def _measure(given: Given, *, as_json: bool) -> None:
    from rocstar.evaluation.plan import evaluations
    from rocstar.support.screen import Screen

    with stoppable(STOPPED), Screen() as screen:
        results = []
        for result in evaluations(given, screen):
            results.append(result)
            if not as_json:
                screen.figures(result)
    for result in results:
        name = result["evaluation"] if given.runs == RUNS else result["saved"]
        tell_next(f"rocstar view {name}", f"rocstar runs rollouts {name} --wrong")
    if as_json:
        print_json(results[0] if len(results) == 1 else {"results": results})


def _refuse_absent(model: str | None, benchmark: str | None, data_folder: Path | None, runs: Path) -> None:
    """What is not there, before anything that takes seconds is loaded. Raises ConfigError."""
    from rocstar.evaluation.benchmark import find_benchmarks, refuse_no_folder
    from rocstar.parts.modelfolder import model_named

    if model is not None:
        model_named(model, runs)
    for one in find_benchmarks(benchmark) if benchmark is not None else ():
        refuse_no_folder(data_folder, one.name)


def _refuse_columns(data: str, question: list[str] | None, answer: str) -> None:
    """By the first row, at the same moment. Raises ConfigError, DataError."""
    from rocstar.evaluation.source import ProblemFile

    ProblemFile(path=data, question=question or ["question"], answer=answer, limit=1).problems()


def _key_in(variable: str) -> str | None:
    """The API key that the environment holds; an empty one is none."""
    return os.environ.get(variable) or None
