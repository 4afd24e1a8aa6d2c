"""`rocstar compare`: two evaluations of the same problems, paired."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rocstar.cli.verbs.common import AsJson, Runs, print_json
from rocstar.support.exits import visible

SHOWN = 10  # problems on the screen, from each end; --json has all

QUESTION = 60  # characters of a question that tell which problem it is


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A name of `evals list`, the start of it, or a folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    allow: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="A field of `setup` in which they may differ.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Compare the greedy attempts.")] = False,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """B against A on the same problems: difference with interval, exact tests, problems won and lost.

    Example: rocstar compare last/before last/after"""
    from rocstar.evaluation.compare import Kept, compared, read_kept, refuse_different
    from rocstar.record.evaluations import find_evaluation, label_of
    from rocstar.support.screen import Screen

    def kept(name: str) -> Kept:
        folder = find_evaluation(name, runs)
        return read_kept(folder, label_of(folder, runs), greedy=greedy)

    first, second = kept(a), kept(b)
    with Screen() as screen, screen.never_silent(screen.working):
        refuse_different(first, second, allow or [])
        result = compared(first, second)
    if as_json:
        print_json(result)
    else:
        print(_comparison(result))


def _comparison(result: Mapping[str, Any]) -> str:
    difference = result["difference"]
    low, high = difference["interval"]
    alone = result["only_a"] + result["only_b"]
    lines = [
        *(f"{name.upper()}  {_subject(result[name])}" for name in ("a", "b")),
        f"B - A {difference['value']:+.1%} (95%: {low:+.1%} to {high:+.1%}) over {result['problems']} problems"
        + (f"; {alone} that only one has are left out" if alone else ""),
        f"exact paired test p = {result['p_value']:.3g}; {result['better']} problems better, {result['worse']} worse, "
        f"{result['same']} the same, sign test p = {result['sign_p_value']:.3g}",
        *_problems(result["table"]),
    ]
    return "\n".join(lines)


def _subject(subject: Mapping[str, Any]) -> str:
    from rocstar.support.screen import plural

    accuracy, attempts = subject["accuracy"], plural(subject["attempts"], "attempt")
    low, high = accuracy["interval"]
    open_ones = f", {accuracy['undecided']:.1%} undecided" if "undecided" in accuracy else ""
    measured = f"{accuracy['value']:.1%} ({low:.1%} to {high:.1%}), {attempts} each{open_ones}"
    return f"{measured}: {subject['evaluation']}"


def _problems(table: list[Mapping[str, Any]]) -> list[str]:
    won = [row for row in table if row["difference"] > 0][:SHOWN]
    lost = [row for row in reversed(table) if row["difference"] < 0][:SHOWN]
    return [
        f"  {row['problem_id']}  {row['a']:4.0%} -> {row['b']:4.0%}  {_start(row['question'])}"
        for rows in (won, lost)
        for row in rows
    ]


def _start(question: str) -> str:
    text = visible(" ".join(question.split()))
    return text if len(text) <= QUESTION else f"{text[: QUESTION - 3]}..."
