"""`rocstar verify` and `rocstar reward test`: the answer checker on files. Nothing here loads torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json, write
from rocstar.support.exits import FAILED, OK

if TYPE_CHECKING:
    from rocstar.answers.cases import Case
    from rocstar.answers.plugin import Scored
    from rocstar.types import Verdict

app = typer.Typer(**STYLE, help="Reward functions, ours and others'.")

Text = Annotated[str, typer.Option(metavar="COLUMN", help="Column with what the model wrote.")]
Gold = Annotated[str, typer.Option(metavar="COLUMN", help="Column with the reference answer.")]
Strict = Annotated[bool, typer.Option("--strict", help="Only a box inside <answer> counts.")]
Expected = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Column with the verdict, or reward, that is expected.")
]
Graders = Annotated[
    str | None, typer.Option("--graders", metavar="NAMES", help="Comma list, in order: numbers,text,prime,math_verify.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many rows.")]
Deadline = Annotated[float, typer.Option("--deadline", min=0.05, help="Seconds for one symbolic comparison.")]
COLUMNS = ("line", "text", "gold", "verdict", "method", "milliseconds")


def verify(
    cases: Annotated[str, typer.Option("--cases", metavar="FILE", help="JSONL, plain or gzip.")],
    text: Text = "text",
    gold: Gold = "gold",
    expected: Expected = None,
    strict: Strict = False,
    graders: Graders = None,
    deadline: Deadline = 5.0,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of a file with its references and show what decided each.

    Example: rocstar verify --cases answers.jsonl --text response --gold answer"""
    from rocstar.answers.cases import load_cases, summary
    from rocstar.data.rows import read_rows

    loaded = load_cases(cases, read_rows(cases), text=text, gold=gold, expected=expected, limit=limit)
    rows = _decide(loaded, strict=strict, graders=graders, deadline=deadline)
    figures = summary(rows)
    if as_json:
        print_json({"rows": rows, "summary": figures})
        return
    _print(rows, (*COLUMNS, "expected") if expected else COLUMNS, figures)


@app.command()
def test(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Also FILE.py:FUNCTION.")],
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="Cases, or problems as train reads them.")],
    text: Text = "text",
    gold: Gold = "gold",
    question: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Of problems, as of eval.")] = None,
    expected: Expected = None,
    limit: Limit = None,
    right_above: Annotated[float, typer.Option(help="As evaluate.right_above: a larger reward is right.")] = 0.5,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Run a reward function of TRL's or verl's signature over a file, as training calls it, and set our verdicts beside
    its rewards. Without a column `text` of what a model wrote, it judges for each problem the reference in a box and a
    wrong answer.

    Example: rocstar reward test my_rewards:accuracy --data answers.jsonl"""
    import asyncio

    from rocstar.answers.cases import agreement, load_cases
    from rocstar.answers.plugin import load_function, reward_of, scores
    from rocstar.data.rows import read_rows
    from rocstar.errors import ConfigError

    called = reward_of(function, load_function(function), function)
    if question or _are_problems(data, text):
        if expected is not None:
            raise ConfigError(f"--expected names a column of cases, and {data} holds problems; leave it out.")
        print(f"{data} holds problems: each is judged with its own reference and with another one", file=sys.stderr)
        loaded = _made_up(data, question or ["question"], "answer" if gold == "gold" else gold, limit)
    else:
        loaded = load_cases(data, read_rows(data), text=text, gold=gold, expected=expected, limit=limit, graded=True)
    scored = asyncio.run(scores(called, loaded))
    ours, has_parts = _decide(loaded, strict=strict), any(one.parts for one in scored)
    rows = [
        {
            "line": one.case.line,
            "text": one.case.text,
            "gold": one.case.gold,
            "reward": one.reward,
            **({"parts": one.parts} if has_parts else {}),
            "rocstar": our["verdict"],
            "method": our["method"],
            "milliseconds": round(one.milliseconds, 3),
            **({} if one.case.expected is None else {"expected": str(one.case.expected)}),
            "error": one.error,
        }
        for one, our in zip(scored, ours, strict=True)
    ]
    figures = {
        **_reward_figures(rows, right_above),
        **agreement([(_judged(one, right_above), one.case.expected) for one in scored if one.reward is not None]),
    }
    print_json({"rows": rows, "summary": figures}) if as_json else _print(rows, tuple(rows[0]), figures)
    raise typer.Exit(FAILED if figures["errors"] else OK)


def _are_problems(data: str, text: str) -> bool:
    """Whether the first row has nothing that a model wrote. Raises DataError."""
    from rocstar.data.rows import read_rows

    _, row = next(iter(read_rows(data)), (0, None))
    return text == "text" and isinstance(row, dict) and text not in row


def _made_up(data: str, question: Sequence[str], answer: str, limit: int | None) -> list[Case]:
    """Two cases for each problem: its own reference, which must be right, and another's, which must be wrong; nothing
    is expected where there is none. Raises DataError."""
    from rocstar.answers.cases import Case
    from rocstar.data.problems import load_problems
    from rocstar.types import Verdict

    problems = load_problems(data, question=question, answer=answer, limit=limit)
    golds = list(dict.fromkeys(problem.answer for problem in problems))
    made = []
    for problem in problems:
        wrong = golds[(golds.index(problem.answer) + 1) % len(golds)] if len(golds) > 1 else "unknown"
        prompt = list(problem.messages) or problem.question
        known = {"prompt": prompt, "question": problem.question, "data_source": problem.source, **problem.metadata}
        for said, verdict in ((problem.answer, Verdict.RIGHT), (wrong, Verdict.WRONG)):
            text = f"<answer>\\boxed{{{said}}}</answer>"
            line, expected = int(problem.metadata.get("line", 0)), verdict if problem.answer else None
            made.append(Case(line=line, text=text, gold=problem.answer, expected=expected, columns=known))
    return made


def _decide(
    cases: Sequence[Case],
    *,
    strict: bool = False,
    graders: str | None = None,
    deadline: float = 5.0,
) -> list[dict[str, Any]]:
    import asyncio

    from rocstar.answers.cases import decide
    from rocstar.answers.grade import DEFAULT, Grader
    from rocstar.answers.symbolic import SymbolicChecker

    names = DEFAULT if graders is None else [name.strip() for name in graders.split(",")]
    grader = Grader(SymbolicChecker(deadline_seconds=deadline), graders=names)

    async def run() -> list[dict[str, Any]]:
        try:
            return await decide(grader, cases, strict=strict)
        finally:
            await grader.close()

    return asyncio.run(run())


def _reward_figures(rows: Sequence[Mapping[str, Any]], right_above: float) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    decided = [row for row in rows if row["reward"] is not None and row["rocstar"] != "undecided"]
    return {
        "cases": len(rows),
        "mean_reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
        "right": sum(reward > right_above for reward in rewards),
        "no_reward": len(rows) - len(rewards),
        "errors": sum(bool(row["error"]) for row in rows),
        "agrees_with_rocstar": sum(_said(row["reward"], right_above) == row["rocstar"] for row in decided),
        "compared": len(decided),
    }


def _said(reward: float, right_above: float) -> Verdict:
    """The verdict that training takes from a reward."""
    from rocstar.types import Verdict

    return Verdict.RIGHT if reward > right_above else Verdict.WRONG


def _judged(one: Scored, right_above: float) -> Verdict | float:
    """What the reward says, in the form of what was expected."""
    assert one.reward is not None
    if not isinstance(one.case.expected, float):
        return _said(one.reward, right_above)
    return one.case.expected if math.isclose(one.reward, one.case.expected, abs_tol=1e-6) else one.reward


def _print(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], figures: Mapping[str, Any]) -> None:
    from rocstar.answers.cases import table

    write(sys.stdout, table(rows, columns) + "\n\n")
    for name, value in ((name, value) for name, value in figures.items() if value is not None):
        shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, Mapping) else value
        write(sys.stdout, f"{name.replace('_', ' ')}: {shown}\n")
