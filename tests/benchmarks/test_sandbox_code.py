"""The comparison with bare Python: what it calls alike, and that its fork server does as `python FILE` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sandbox_code import TIME, Bare, End, end, end_of

from rocstar.sandbox.call import Failure, ProgramOutcome, Response


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    with ExitStack() as stack:
        yield Bare(stack, loaded=((),))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(1 + 1)", End(stdout="2\n", ended="0", said="")),
        ("print(__name__, open(0).read())", End(stdout="__main__ \n", ended="0", said="")),
        ("print(1); 1 / 0", End(stdout="1\n", ended="1", said="ZeroDivisionError: division by zero")),
        ("x = = 1", End(stdout="", ended="1", said="SyntaxError: invalid syntax")),
        ("raise ValueError('a\\nb')", End(stdout="", ended="1", said="ValueError: a\nb")),
        ("import sys; sys.exit('why')", End(stdout="", ended="1", said="why")),
        ("import sys; sys.stderr.write('w'); sys.exit(3)", End(stdout="", ended="3", said="")),
        ("import os; os.abort()", End(stdout="", ended="SIGABRT", said="")),
        ("while True: pass", End(stdout="", ended=TIME, said="")),
        ("import os; print(os.listdir()); open('left', 'w')", End(stdout="[]\n", ended="0", said="")),
    ],
)
def test_a_fork_ends_as_a_new_interpreter_does(bare: Bare, code: str, expected: End) -> None:
    assert [bare.run(code, 1), bare.run(code, 1, new=True)] == [expected, expected]


def test_ends_are_alike_when_all_they_tell_is_equal_or_both_reached_a_time_limit() -> None:
    done = End(stdout="1\n", ended="0", said="")
    assert done.is_like(End(stdout="1\n", ended="0", said=""))
    assert not done.is_like(End(stdout="1", ended="0", said=""))
    assert not end("", "E: a", "1").is_like(end("", "E: b", "1"))
    assert End(stdout="1\n", ended=TIME, said="").is_like(End(stdout="", ended=TIME, said=""))
    assert not End(stdout="1\n", ended=TIME, said="").is_like(done)


def test_the_end_of_a_response_is_its_status_signal_or_limit() -> None:
    told = 'Traceback (most recent call last):\n  File "<program>", line 1\n    1 / 0\n    ~~^~~\nE: m\n'
    failure = Failure(type="E", message="m", line=1)
    raised = Response(id="", outcome=ProgramOutcome.EXCEPTION, exit_code=1, exception=failure, stderr=told)
    assert end_of(raised) == End(stdout="", ended="1", said="E: m")
    killed = Response(id="", outcome=ProgramOutcome.SIGNAL, signal="SIGSEGV")
    assert end_of(killed).ended == "SIGSEGV"
    assert (
        end_of(Response(id="", outcome=ProgramOutcome.CPU_TIMEOUT, signal="SIGXCPU", kill_reason="cpu")).ended == TIME
    )
    cut = Response(id="", outcome=ProgramOutcome.OUTPUT_LIMIT, signal="SIGKILL", kill_reason="output")
    assert end_of(cut).ended == "output_limit"
