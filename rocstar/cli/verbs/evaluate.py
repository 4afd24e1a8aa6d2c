"""`rocstar eval`: a model, a run or an endpoint on a file of problems or on the paper's benchmarks; `rocstar evals`:
the evaluations that were kept; `rocstar compare`: two of them, paired."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, Runs, options_of, print_json, stoppable, tell_next
from rocstar.evaluation.spec import RUNS, EvalSpec
from rocstar.support.exits import need, visible
from rocstar.support.signals import terminated_as_interrupted

STOPPED = "stopped; the answers so far are kept, and the same command asks only for the others"
SHOWN = 10  # compared problems on the screen, from each end; --json has all
QUESTION = 60  # characters of a question that tell which problem it is
app = typer.Typer(**STYLE, help="The evaluations that were kept.")


@options_of(EvalSpec)
def evaluate(spec: EvalSpec, as_json: AsJson = False) -> None:
    """Measure a model on problems: avg@k and pass@k with 95% intervals. Killed, it goes on with the same command.

    Example: rocstar eval last --benchmark aime24,math500 --data-folder data"""
    need("train")
    _refuse_absent(spec)
    from rocstar.evaluation.command import evaluations
    from rocstar.support.screen import Screen

    with terminated_as_interrupted(), stoppable(STOPPED), Screen() as screen:
        results = []
        for result in evaluations(spec, screen):
            results.append(result)
            if not as_json:
                screen.figures(result)
    for result in results:
        name = shlex.quote(result["evaluation"] if spec.runs == RUNS else result["saved"])
        tell_next(f"rocstar view {name}", f"rocstar runs rollouts {name} --wrong")
    if as_json:
        print_json(results[0] if len(results) == 1 else {"results": results})


def _refuse_absent(spec: EvalSpec) -> None:
    """Refuse what is not there, and columns that the first row lacks, before anything slow is loaded. Raises
    ConfigError, DataError."""
    from rocstar.data.problems import load_problems
    from rocstar.evaluation.benchmark import find_benchmarks, refuse_no_folder
    from rocstar.parts.modelfolder import model_named

    if spec.endpoint is None:
        model_named(spec.model, spec.runs)
    for one in find_benchmarks(spec.benchmark) if spec.benchmark is not None else ():
        refuse_no_folder(spec.data_folder, one.name)
    if spec.data is not None and spec.benchmark is None:
        load_problems(spec.data, question=spec.columns, answer=spec.answer, limit=1)


@app.command(name="list")
def list_all(as_json: AsJson = False, runs: Runs = RUNS) -> None:
    """All evaluations, by the name that compare, analyze, view and runs rollouts take."""
    from rocstar.record.evaluations import list_evaluations, row_of
    from rocstar.support.screen import Screen

    rows = list(map(row_of, list_evaluations(runs)))
    if as_json:
        print_json({"evaluations": rows})
    elif rows:
        Screen().evaluations(rows)
    else:
        Screen().note(f"there are no evaluations in {runs}; make one with rocstar eval")


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
        print(visible(_comparison(result)))


def _comparison(result: Mapping[str, Any]) -> str:
    difference = result["difference"]
    low, high = difference["interval"]
    alone = result["only_a"] + result["only_b"]
    a, b = result["a"], result["b"]
    parts = [name for name in a if name.startswith("reward/parts/") and name in b]
    lines = [
        *(f"{name.upper()}  {_subject(result[name])}" for name in ("a", "b")),
        f"B - A {difference['value']:+.1%} (95%: {low:+.1%} to {high:+.1%}) over {result['problems']} problems"
        + (f"; {alone} that only one has are left out" if alone else ""),
        f"exact paired test p = {result['p_value']:.3g}; {result['better']} problems better, {result['worse']} worse, "
        f"{result['same']} the same, sign test p = {result['sign_p_value']:.3g}",
        *(f"  {name}  {a[name]:.3g} -> {b[name]:.3g}" for name in parts),
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
    text = " ".join(question.split())
    return text if len(text) <= QUESTION else f"{text[: QUESTION - 3]}..."
