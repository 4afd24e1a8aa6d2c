"""`rocstar eval`: a model, a run or an endpoint on a file of problems or on the paper's benchmarks; `rocstar evals`:
the evaluations that were kept."""

from __future__ import annotations

import shlex

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, Runs, options_of, print_json, stoppable, tell_next
from rocstar.evaluation.spec import RUNS, EvalSpec
from rocstar.support.exits import need

STOPPED = "stopped; the same command goes on where this one ended"
app = typer.Typer(**STYLE, help="The evaluations that were kept.")


@options_of(EvalSpec)
def evaluate(spec: EvalSpec, as_json: AsJson = False) -> None:
    """Measure a model on problems: avg@k and pass@k with 95% intervals. Killed, it goes on with the same command.

    Example: rocstar eval last --benchmark aime24,math500 --data-folder data"""
    need("train")
    _refuse_absent(spec)
    from rocstar.evaluation.command import evaluations
    from rocstar.support.screen import Screen

    with stoppable(STOPPED), Screen() as screen:
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
