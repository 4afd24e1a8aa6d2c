"""The child process that runs math-verify; started by path, never imported by rocstar, imports nothing of it.

Consumes one JSON line per question on stdin: {"gold", "predicted", "prose", "seconds"}. Produces one JSON line on
stdout: {"ready": true} or {"failed": reason} at the start, then {"verdict", "method"} per question. Ends when stdin
ends, which happens when the parent closes it or dies. A question that outlives its seconds by one more is ended by
the kernel's alarm, so a child whose parent died in the middle of it does not live on; the parent normally kills first.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, TextIO

ADDRESS_SPACE_BYTES = 4 * 2**30  # a backstop only: the parent kills far below it, see worker_process.py
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


def main() -> None:
    answers = _claim_stdout()
    _limit_address_space()
    logging.disable(logging.CRITICAL)
    try:
        decide("\\frac{1}{2}+x", "x+0.5")  # compiles the patterns and builds the grammar before the clock runs
    except ImportError as error:
        _say(answers, {"failed": f"{error}; install math-verify"})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question["seconds"] + 1.0)
        verdict, method = decide(question["gold"], question["predicted"], prose=question["prose"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(answers, {"verdict": verdict, "method": method})


def decide(gold: str, predicted: str, *, prose: bool = False) -> tuple[str, str]:
    """(verdict, method). Unbounded in time. A prediction that does not parse is wrong; a reference that does not
    parse leaves the question undecided, unless the two texts come out equal."""
    from math_verify import verify

    wanted = _parse(gold, everything=True)
    given = _parse(predicted, everything=prose)
    if verify(wanted, given, timeout_seconds=None):
        return "right", "math_verify"
    if all(isinstance(part, str) for part in wanted):
        return "undecided", "gold_unparsed"
    return "wrong", "math_verify"


def _parse(text: str, *, everything: bool) -> list[Any]:
    """math-verify's reading of a text. Without `everything` it must parse as LaTeX in whole: the library otherwise
    falls back to the last number it sees, so that `1 + \\foo{ 5` would pass for 5."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = text if everything else text.replace("\\$", "")
    delimited = any(mark in text for mark in _DELIMITERS)
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()] if everything else [LatexExtractionConfig()]
    parsed: list[Any] = parse(text if delimited else f"${text}$", kinds, parsing_timeout=None)
    return parsed


def _limit_address_space() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = ADDRESS_SPACE_BYTES if hard == resource.RLIM_INFINITY else min(hard, ADDRESS_SPACE_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _claim_stdout() -> TextIO:
    """Keep the pipe for answers and send anything a library prints elsewhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
