"""Programs and answers with known results, sent through the run's own sandbox and grader: before the first RL step, and
every `run.probe_seconds` between steps. A service that gives wrong answers would otherwise look like a policy that gets
worse. Source: ours."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

from rocstar.answers.grade import Grader
from rocstar.errors import RunHalted
from rocstar.protocols import Tool
from rocstar.types import Status, ToolCall, Verdict

PROGRAMS = (
    ("print(6 * 7)\n2 ** 10", Status.OK, "42\n", "1024"),
    ("print(input())\nraise ValueError", Status.CODE_ERROR, "said\n", None),
)
"""Code and its expected result: status, standard output, value of the last expression."""
ANSWERS = (
    ("1/2", "0.5", Verdict.RIGHT),
    ("42", "41", Verdict.WRONG),
    (r"\sqrt{8}", r"2\sqrt{2}", Verdict.RIGHT),
    ("x+1", "x-1", Verdict.WRONG),
)
"""Reference, answer, verdict; the last two need the grader's worker processes."""


def prober(python: Tool, grader: Grader, seconds: float) -> Callable[[], Awaitable[None]]:
    """What probes when it is first called, and then every `seconds`. It raises RunHalted if the sandbox or the grader
    gives a wrong result."""
    probed_at = -math.inf

    async def probe_when_due() -> None:
        nonlocal probed_at
        if time.monotonic() - probed_at >= seconds:
            await probe(python, grader)
            probed_at = time.monotonic()

    return probe_when_due


async def probe(python: Tool, grader: Grader) -> None:
    """Raises RunHalted for an unexpected result, SandboxUnavailable or VerifierUnavailable if there is none. python:
    the tool that runs a program by itself."""
    for code, *wanted in PROGRAMS:
        call = ToolCall(id="probe", tool=python.spec.name, arguments={"code": code, "input": "said\n"}, raw="")
        result = await python.run(call)
        _refuse_other(f"the sandbox ran {code!r}", wanted, [result.status, result.stdout, result.value], result.stderr)
    for gold, answer, verdict in ANSWERS:
        grade = await grader.grade(gold, answer)
        _refuse_other(f"the grader compared {answer!r} with {gold!r}", verdict, grade.verdict)


def _refuse_other(what: str, expected: object, got: object, stderr: str = "") -> None:
    if got != expected:
        last = stderr.strip().rpartition("\n")[2]
        error = f" and said {last!r}" if last else ""
        raise RunHalted(
            f"{what} and gave {got}{error} instead of {expected}; no attempt can be judged like this, so repair that "
            "service and go on with: rocstar train --resume RUN"
        )
