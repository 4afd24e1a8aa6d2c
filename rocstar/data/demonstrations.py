"""Cold-start demonstrations for the arithmetic tasks: the shares of behaviours, and the outputs of programs.

Planning is pure; `perform` runs every program, so that demonstrations show the tool's true output. Not here: the tool
and the tokens.
"""

from __future__ import annotations

import io
import linecache
import random
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from rocstar.data.arithmetic import FAMILIES, Chain, Family
from rocstar.dialogue.calls import HERMES, render_call
from rocstar.errors import ConfigError
from rocstar.types import Demonstration, DemoTurn, Problem, Status, ToolCall, ToolResult, seed_for

PROGRAM = "<program>"  # as the sandbox calls a program in its tracebacks


class Move(StrEnum):
    """One thing a demonstration does."""

    RIGHT = "right"  # programs that print the answer, then the answer copied from the output
    WRONG = "wrong"  # programs that run and print something else, which is copied too
    BROKEN = "broken"  # a program that raises
    SILENT = "silent"  # a program that forgets to print
    GUESS = "guess"  # a made-up number of about the right size
    ANSWER = "answer"  # the reference answer, without any tool


Behaviour = tuple[Move, ...]

MIXES: Mapping[str, Mapping[Behaviour, int]] = {
    # The likeliest first move is a guess, so greedy decoding starts near zero and learning must really flip it.
    "majority_wrong": {
        (Move.GUESS,): 55,
        (Move.RIGHT,): 9,
        (Move.WRONG,): 9,
        (Move.BROKEN, Move.RIGHT): 12,
        (Move.BROKEN, Move.WRONG): 9,
        (Move.SILENT, Move.RIGHT): 3,
        (Move.SILENT, Move.GUESS): 3,
    },
    # Noisy, but the right choice is the likeliest at every point: greedy decoding is nearly perfect from the start.
    "majority_right": {
        (Move.GUESS,): 22,
        (Move.RIGHT,): 14,
        (Move.WRONG,): 16,
        (Move.BROKEN, Move.RIGHT): 20,
        (Move.BROKEN, Move.WRONG): 18,
        (Move.SILENT, Move.RIGHT): 5,
        (Move.SILENT, Move.GUESS): 5,
    },
    # Correct answers without the tool: the baseline that shows the tool is needed.
    "direct": {(Move.ANSWER,): 100},
}
"""Shares of behaviours, percent. Source: ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationPlan:
    """The plan of one demonstration, before any program runs."""

    problem: Problem
    behaviour: Behaviour
    """The moves it makes."""
    codes: tuple[str, ...]
    """Programs, one tool call each; `{out}` is replaced by the output of the call before."""
    final: str | None
    """The final answer; None to copy the last tool output."""
    guess: str
    """A wrong number of the answer's size, used if there is no output to copy."""


def plan_demonstrations(problems: Sequence[Problem], mix: str, seed: int) -> list[DemonstrationPlan]:
    """One plan a problem (problems may repeat), drawn from the named mix; pure.

    Problems must come from `arithmetic_problems`. Raises ConfigError for an unknown mix. Source: ours.
    """
    if mix not in MIXES:
        nearest = get_close_matches(mix, MIXES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"data.demo_mix {mix!r} is unknown; the nearest is {nearest!r}.")
    shares = MIXES[mix]
    return [
        _plan(problem, shares, random.Random(seed_for(seed, "demonstration", problem.id, n)))
        for n, problem in enumerate(problems)
    ]


def work_out(call: ToolCall) -> ToolResult:
    """The Python tool's result of a call whose `code` is one of our own programs, which ends by itself.

    Only for programs that rocstar itself wrote: they run without a sandbox in this process. A cold start shows tens of
    thousands of them, and a sandbox call each would cost more than learning from them. A test compares the answers with
    the sandbox's. Source: ours."""
    code = call.arguments["code"]
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            exec(compile(code, PROGRAM, "exec"), {"__name__": "__main__"})
    except Exception as error:
        linecache.cache[PROGRAM] = (len(code), None, code.splitlines(keepends=True), PROGRAM)
        within = error.__traceback__.tb_next if error.__traceback__ else None
        stderr = "".join(traceback.format_exception(type(error), error, within))
        return ToolResult(call_id=call.id, status=Status.CODE_ERROR, stdout=output.getvalue(), stderr=stderr)
    return ToolResult(call_id=call.id, status=Status.OK, stdout=output.getvalue())


def _plan(problem: Problem, shares: Mapping[Behaviour, int], rng: random.Random) -> DemonstrationPlan:
    family = FAMILIES[problem.metadata["family"]]
    behaviour = rng.choices(list(shares), weights=list(shares.values()))[0]
    chain = [code for move in behaviour for code in _chain(family, move, rng)]
    operands = problem.metadata["operands"]
    fields = {**operands, **family.fragments(operands)}
    guess = _wrong_number(problem.answer, rng)
    return DemonstrationPlan(
        problem=problem,
        behaviour=behaviour,
        codes=tuple(code.format(**fields) for code in chain),
        final={Move.GUESS: guess, Move.ANSWER: problem.answer}.get(behaviour[-1]),
        guess=guess,
    )


def _chain(family: Family, move: Move, rng: random.Random) -> Chain:
    """Programs of a move, as unfilled format strings."""
    if move is Move.RIGHT:
        return rng.choice(family.right)
    if move is Move.WRONG:
        return rng.choice(family.wrong)
    if move is Move.BROKEN:
        code = family.right[0][0]  # ends in a print: its last parenthesis may be lost, or `print` be a statement
        before, _, printed = code.rpartition("print(")
        return (rng.choice((*family.broken, code[:-1], f"{before}print {printed[:-1]}")),)
    if move is Move.SILENT:
        return (rng.choice(family.silent),)
    return ()


def _wrong_number(answer: str, rng: random.Random) -> str:
    """Another number of as many digits, of two at least."""
    length = max(2, len(answer))
    while True:
        guess = str(rng.randrange(10 ** (length - 1), 10**length))
        if guess != answer:
            return guess


def perform(plan: DemonstrationPlan, tool_name: str = "python") -> Demonstration:
    """The demonstration of a plan; tool results are those of its programs."""
    turns: list[DemoTurn] = []
    output = ""
    for n, code in enumerate(plan.codes):
        text = render_call(tool_name, {"code": code.replace("{out}", output)})
        result = work_out(HERMES.parse(text, first_id=n)[0])
        turns.append(DemoTurn(text=text, results=(result,)))
        output = "" if result.is_error else result.stdout.strip()
    final = plan.final or output or plan.guess
    turns.append(DemoTurn(text=f"<answer>\\boxed{{{final}}}</answer>"))
    return Demonstration(problem=plan.problem, turns=tuple(turns))
