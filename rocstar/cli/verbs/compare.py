"""`rocstar compare`: two evaluations of the same problems, paired; or how large one must be to show a difference."""

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
    b: Annotated[str | None, typer.Argument(metavar="B", help="The other; may be left out with --detect.")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="A field of `setup` in which they may differ.")
    ] = None,
    detect: Annotated[
        float | None, typer.Option(metavar="D", help="Also: what it takes to see a difference of D.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Compare the greedy attempts.")] = False,
    power: Annotated[float, typer.Option(help="Chance of seeing it, with --detect.")] = 0.8,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """B against A on the same problems: difference with interval, exact tests, problems won and lost.

    Example: rocstar compare last/before last/after --detect 0.02"""
    from rocstar.errors import ConfigError
    from rocstar.evaluation.compare import Kept, compared, planned, read_kept, refuse_different
    from rocstar.record.evaluations import find_evaluation, label_of
    from rocstar.support.screen import Screen

    if b is None and detect is None:
        raise ConfigError("compare needs two evaluations; give a second one, or --detect D to plan for one")

    def kept(name: str) -> Kept:
        folder = find_evaluation(name, runs)
        return read_kept(folder, label_of(folder, runs), greedy=greedy)

    first, second = kept(a), kept(b) if b is not None else None
    result: dict[str, Any] = {}
    with Screen() as screen, screen.never_silent(screen.working):
        if second is not None:
            refuse_different(first, second, allow or [])
            result = compared(first, second)
        if detect is not None:
            result["plan"] = planned(first, second, detect, power)
    if as_json:
        print_json(result)
        return
    if second is not None:
        print(_comparison(result))
    if detect is not None:
        print(_plan(result["plan"]))


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
    accuracy = subject["accuracy"]
    low, high = accuracy["interval"]
    open_ones = f", {accuracy['undecided']:.1%} undecided" if "undecided" in accuracy else ""
    measured = f"{accuracy['value']:.1%} ({low:.1%} to {high:.1%}), {subject['attempts']} attempts each{open_ones}"
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


def _plan(plan: Mapping[str, Any]) -> str:
    attempts = plan["attempts_needed"]
    more = (
        f"{attempts} attempts at each of these {plan['problems']}"
        if attempts
        else (f"no number of attempts at these {plan['problems']}, because problems differ too much")
    )
    return (
        f"to see a difference of {plan['difference']:.1%} with chance {plan['wanted_power']:.0%}: "
        f"{plan['problems_needed']} problems at {plan['attempts']} attempts each, or {more}; as it is the chance is "
        f"{plan['power']:.0%} (assumed: {plan['assumed']})"
    )
