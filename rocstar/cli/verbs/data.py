"""`rocstar data ...`: training problems, built into a pool and looked at; SFT rows, built from published sets. Nothing
here loads torch."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json, stoppable, write
from rocstar.support.exits import OK, USAGE, visible
from rocstar.support.signals import terminated_as_interrupted

if TYPE_CHECKING:
    from rocstar.data.pool.build import Datasheet
    from rocstar.data.pool.check import FileReport, Wording
    from rocstar.data.pool.rules import Check
    from rocstar.parts.build import AttemptParts
    from rocstar.types import Problem

BAR_COLUMNS = 40
SELDOM = ("unread", "reordered", "held_out", "asked_again")
"""Findings that are told only where there are any."""
READ = ("data.columns.", "rollout.", "sandbox.tools", "model.path", "run.modules", "evaluate.verifier")
"""The beginnings of the keys that `check` reads."""

app = typer.Typer(**STYLE, help="Training problems: build a pool, look at a file.")


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of sources and weights.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where rows and datasheet go.")],
    as_json: AsJson = False,
) -> None:
    """Build SFT rows: many layouts into one JSON form, checked, capped, mixed; refused rows with their reasons.

    Example: rocstar data sft recipes/data/sft_mix.toml --out sft"""
    from rocstar.config.layers import load
    from rocstar.data.sft.build import build
    from rocstar.data.sft.recipe import MixRecipe
    from rocstar.protocols import ToolSpec
    from rocstar.support.screen import Screen
    from rocstar.tools.python import DESCRIPTION, NAMES, PARAMETERS

    tool = ToolSpec(name=NAMES[0], description=DESCRIPTION, parameters=PARAMETERS)
    kept = f"stopped; what is in {out} is as it was, and answers of an endpoint are kept; the same command begins again"
    mix = load(recipe, MixRecipe)
    with terminated_as_interrupted(), stoppable(kept), Screen() as screen, screen.never_silent(screen.working):
        sheet = build(mix, out, code_tool=tool, environment=os.environ, note=screen.note)
    print_json(sheet) if as_json else _print_mix(sheet, out)


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file that lists sources and benchmarks.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build a pool of problems; every dropped row is written down with its rule and evidence.

    Example: rocstar data build recipes/data/math_pool.toml data=../shared/data"""
    from rocstar.answers.extract import lenient_answer
    from rocstar.config.layers import load
    from rocstar.data.pool.build import build_pool
    from rocstar.data.pool.config import PoolConfig
    from rocstar.evaluation.contamination import beside_known
    from rocstar.support.screen import Screen

    config, absent = beside_known(load(recipe, PoolConfig, settings or []))
    kept = f"stopped; what is in {config.out} is as it was; the same command begins again"
    with (
        terminated_as_interrupted(),
        stoppable(kept),
        Screen() as screen,
        screen.never_silent(screen.working),
        verifier(lenient_answer) as check,
    ):
        sheet = build_pool(config, check, screen.note, absent)
    print_json(sheet.as_json()) if as_json else _print_funnel(sheet)


@app.command(name="check")
def check_problems(
    file: Annotated[str, typer.Argument(metavar="FILE", help="As data.train_files: file, folder or hf:NAME@SPLIT.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe.")] = None,
    recipe: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Training recipe that will read FILE.")] = None,
    question: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="As data.columns.question.")] = None,
    answer: Annotated[str | None, typer.Option(metavar="COLUMN", help="As data.columns.answer.")] = None,
    against: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Benchmark, or a pool's recipe.")] = None,
    template: Annotated[str | None, typer.Option(help="As rollout.template.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Count lengths in its tokens; default: model.path's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what train and eval read of a file, one prompt, its lengths, and what is wrong with its rows. Exit code 2
    for rows that they refuse.

    Example: rocstar data check train.jsonl --recipe my.toml --against recipes/data/math_pool.toml"""
    from rocstar.answers.extract import boxed_answer
    from rocstar.config.recipe import changed, load_recipe, refuse_others
    from rocstar.config.sections import Recipe
    from rocstar.data.pool.check import check_file
    from rocstar.data.problems import columns_of
    from rocstar.parts.build import AttemptParts
    from rocstar.run.material import task_of
    from rocstar.support.screen import Screen

    options = {"data.columns.question": question, "data.columns.answer": answer, "rollout.template": template}
    given = [*(settings or []), *(f"{key}={json.dumps(value)}" for key, value in options.items() if value)]
    refuse_others(given, READ, "a check")
    chosen = load_recipe(recipe, given) if recipe else changed(Recipe(), ["data.source=files", *given], {})
    columns = next((s.data.columns for s in chosen.rollout_stages if file in s.data.train_files), chosen.data.columns)
    asked = tuple(columns.question)
    is_for_training = chosen.data.source == "files" and file not in chosen.data.test_files
    held_out = task_of(chosen, chosen).heldout() if is_for_training else []
    with (
        Screen() as screen,
        screen.never_silent(screen.working),
        verifier(boxed_answer, chosen.evaluate.verifier) as verify,
    ):
        report = check_file(
            file,
            lambda row, where: columns_of(row, where, asked, columns.answer),
            verify,
            _wording(AttemptParts(chosen), tokenizer),
            _benchmarks(against or []),
            held_out,
        )
    lines = (f"{line}\n" for line in _report_lines(report))
    print_json(report.as_json()) if as_json else write(sys.stdout, visible("".join(lines)))
    raise typer.Exit(USAGE if report.findings["bad"].rows or report.columns is None else OK)


@contextmanager
def verifier(answer_of: Callable[[str], str | None], name: str = "boxed") -> Iterator[Check]:
    """Our verifier as it grades rewards, for one (reference, response) at a time; verdicts are remembered. name: of
    `evaluate.verifier`, whose graders are used; where it is the user's own function, letters are compared."""
    import asyncio
    from functools import lru_cache

    from rocstar.answers.grade import BY_VERIFIER, DEFAULT, Grader
    from rocstar.types import Verdict

    grader = Grader(graders=BY_VERIFIER.get("boxed_text" if ":" in name else name, DEFAULT))
    with asyncio.Runner() as runner:

        @lru_cache(maxsize=1 << 16)
        def grade(gold: str, predicted: str | None) -> tuple[bool, str]:
            found = runner.run(grader.grade(gold, predicted))
            return found.verdict is Verdict.RIGHT, found.method

        try:
            yield lambda gold, response: grade(gold, answer_of(response))
        finally:
            runner.run(grader.close())


def _benchmarks(files: list[str]) -> Iterator[Problem]:
    """Questions of plain files, and of all benchmarks of pool recipes."""
    from rocstar.config.layers import load
    from rocstar.data.pool.build import Datasheet, benchmark_questions
    from rocstar.data.pool.config import InputSection, PoolConfig
    from rocstar.evaluation.contamination import beside_known

    for file in files:
        if file.endswith(".toml"):
            config, absent = beside_known(load(file, PoolConfig))
            for name, why in absent.items():
                print(f"not compared with {name}: {why}", file=sys.stderr)
        else:
            itself = InputSection(name=Path(file).name, path=file)
            config = PoolConfig(data=".", source=[itself], benchmark=[itself])
        yield from benchmark_questions(Datasheet(config=config, rules=[]))


def _wording(parts: AttemptParts, tokenizer: Path | None) -> Wording:
    from rocstar.data.pool.check import Wording
    from rocstar.dialogue.codec import Codec
    from rocstar.dialogue.segments import text_of
    from rocstar.dialogue.template import ChatMl, prompt_of
    from rocstar.parts.modelfolder import find_model, model_facts

    def render(problem: Problem) -> str:
        parts.refuse_rows([problem])
        return text_of(prompt_of(chosen, problem, parts.shown_specs))

    recipe, path = parts.recipe, parts.recipe.model.path
    folder = None if path is None else find_model(path)
    chosen, counted = parts.template(folder), tokenizer or folder
    codec = Codec.load(counted) if counted else None
    room = math.inf
    if folder and recipe.rollout_stages and not (tokenizer or recipe.rollout.environment):
        longest = max(rollout.max_response_tokens for rollout in recipe.rollouts)
        fitting = model_facts(folder, torch_engine=False).positions - longest
        kept = max(stage.data.max_prompt_tokens or math.inf for stage in recipe.rollout_stages)
        room = fitting if kept > fitting else math.inf
    return Wording(
        render=render,
        markers=codec.added_tokens if codec else chosen.markers if isinstance(chosen, ChatMl) else (),
        length=(lambda prompt: len(codec.encode(prompt))) if codec else len,
        unit="characters" if counted is None else "tokens",
        room=room,
    )


def _print_funnel(sheet: Datasheet) -> None:
    print(f"{'rows':20}{'all':>10}" + "".join(f"{source[:14]:>16}" for source in sheet.sources))
    for fate, rows, by_source in sheet.funnel():
        print(f"{fate:20}{rows:>10,}" + "".join(f"{by_source[source]:>16,}" for source in sheet.sources))
    if sheet.asked.total():
        print(f"  of them rewritten {sheet.asked.total():>10,}", end="")
        print("".join(f"{sheet.asked[source]:>16,}" for source in sheet.sources))
    if sheet.unasked:
        print(f"{sheet.unasked:,} kept rows had no answers to compare their label with")
    print("\n".join(sheet.benchmarks))
    print(f"written to {sheet.config.out}: {', '.join(sheet.outputs)}, datasheet.json")


def _print_mix(sheet: Mapping[str, Any], out: Path) -> None:
    columns = ("read", "refused", "built", "calls", "p50", "p95", "max", "wanted", "taken", "short")
    print(f"{'source':16}" + "".join(f"{name:>14}" for name in columns))
    for source in sheet["sources"]:
        lengths = [source["tokens"].get(name, "-") for name in ("p50", "p95", "max")]
        before = (source["rows_read"], sum(source["refused"].values()), source["built"])
        cells = (*before, source["calls_validated"], *lengths, source["wanted"], source["taken"], source["short"])
        print(f"{source['name']:16}" + "".join(f"{value:>14}" for value in cells))
    for source in sheet["sources"]:
        for reason, count in source["refused"].items():
            print(f"{source['name']}: {count} refused for {reason}")
    print(f"{sheet['rows']} rows in {out / 'rows.jsonl'}, sha256 {sheet['rows_sha256'][:16]}...")


def _report_lines(report: FileReport) -> Iterator[str]:
    from rocstar.data.pool.check import FINDINGS
    from rocstar.support.screen import plural

    yield f"{report.file}: {plural(report.rows, 'row')}, sha256 {(report.sha256 or '-')[:16]}"
    if report.columns is not None:
        asked = " + ".join(report.columns.question)
        layout = "columns" if report.columns.layout == "given" else f"layout {report.columns.layout}"
        yield f"{layout}: question from {asked}, answer from {report.columns.answer}"
        yield f"further columns, for code of your own: {', '.join(report.others) or 'none'}"
    if report.lengths:
        yield from ("", "one prompt, special tokens in «»:", "", report.prompt, "")
        yield f"its answer, as rewards compare with it: {report.answer}"
        yield (
            f"length in {report.unit}: half up to {report.quantile(0.5):,}, 95% up to {report.quantile(0.95):,}, "
            f"longest {report.quantile(1.0):,}"
        )
        most = max((rows for *_, rows in report.histogram()), default=1)
        for start, end, rows in report.histogram():
            yield f"  {start:>7,} to {end - 1:<7,}{rows:>9,} {'#' * -(-BAR_COLUMNS * rows // most)}"
        yield ""
    read = report.rows - report.findings["bad"].rows
    compared = sum(report.compared_with.values())
    against = f"of {compared:,} benchmark questions" if compared else "nothing given"
    of = {"refused": f", of {read:,}", "overlaps": f" ({against})"}
    for name, finding in report.findings.items():
        if finding.rows or (read and name not in SELDOM):
            yield f"{finding.rows:>7,} {FINDINGS[name]}{of.get(name, '')}"
            yield from (f"          {example}" for example in finding.examples)
            if more := finding.not_shown:
                yield f"          and {more:,} more"
    for name, rows in report.by_benchmark.most_common():
        yield f"    {rows:>7,} {name}"
