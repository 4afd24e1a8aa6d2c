"""What a program sees and what comes back of it."""

from __future__ import annotations

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Failure, Limits, ProgramOutcome, Request
from tests.sandbox.support import run


async def test_output_and_exit_code_come_back(client: SandboxClient) -> None:
    response = await run(client, "import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (response.outcome, response.exit_code) == (ProgramOutcome.OK, 0)
    assert (response.stdout, response.stderr, response.value) == ("out\n", "err\n", None)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 3\nx", "3"),
        ("'text'", "'text'"),
        ("None", None),
        ("print(5)", None),
        ("x = 3", None),
        ("x = 3\nx;", None),
        ("x = 3; x", "3"),
        ("(1,\n2)", "(1, 2)"),
        ("if True:\n    7", None),
        ("x = 1 + \\\n2", None),
        ("5  # a comment; with a semicolon", "5"),
        ("5\n# a comment after it\n\n", "5"),
        ("from __future__ import annotations\ndef f(a: nothing): ...\nf.__annotations__", "{'a': 'nothing'}"),
        ("def f():\n    return 1\nf()", "1"),
        ("'''a\nb'''", "'a\\nb'"),
        ("", None),
    ],
)
async def test_value_is_that_of_a_last_expression_as_ipython_shows_it(
    client: SandboxClient, code: str, value: str | None
) -> None:
    response = await run(client, code)
    assert (response.outcome, response.value) == (ProgramOutcome.OK, value)


async def test_value_stays_apart_from_standard_output(client: SandboxClient) -> None:
    response = await run(client, "print('a')\n'b'")
    assert (response.stdout, response.value) == ("a\n", "'b'")


async def test_traceback_shows_only_lines_of_the_program(client: SandboxClient) -> None:
    code = "import json\ndef f(text):\n    return json.loads(text)\nprint('before')\nf('{')"
    response = await run(client, code)
    assert response.outcome is ProgramOutcome.EXCEPTION
    assert response.stdout == "before\n"
    assert response.stderr.splitlines()[1:5] == [
        '  File "<program>", line 5, in <module>',
        "    f('{')",
        '  File "<program>", line 3, in f',
        "    return json.loads(text)",
    ]
    assert response.stderr.count("File ") == 2
    assert response.exception is not None
    assert (response.exception.type, response.exception.line) == ("json.decoder.JSONDecodeError", 3)


async def test_syntax_error_names_its_line(client: SandboxClient) -> None:
    response = await run(client, "x = 1\ny = = 2\n")
    assert response.outcome is ProgramOutcome.EXCEPTION
    assert response.exception == Failure(type="SyntaxError", message="invalid syntax (<program>, line 2)", line=2)
    assert "y = = 2" in response.stderr


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code", "stderr"),
    [
        ("import sys; sys.exit()", ProgramOutcome.OK, 0, ""),
        ("exit(0)", ProgramOutcome.OK, 0, ""),
        ("raise SystemExit(3)", ProgramOutcome.EXIT_NONZERO, 3, ""),
        ("import sys; sys.exit('bad input')", ProgramOutcome.EXIT_NONZERO, 1, "bad input\n"),
        ("import os; os._exit(7)", ProgramOutcome.EXIT_NONZERO, 7, ""),
    ],
)
async def test_exit_codes_are_those_of_the_interpreter(
    client: SandboxClient, code: str, outcome: ProgramOutcome, exit_code: int, stderr: str
) -> None:
    response = await run(client, code)
    assert (response.outcome, response.exit_code, response.stderr) == (outcome, exit_code, stderr)


async def test_stdin_is_delivered_whole_and_then_ends(client: SandboxClient) -> None:
    text = "ä line\n" * 200_000
    code = "import sys\nprint(input(), len(sys.stdin.read()))\nprint(repr(sys.stdin.read()))"
    response = await run(client, code, stdin=text)
    assert response.stdout == f"ä line {len(text) - 7}\n''\n"


async def test_stdin_is_empty_unless_given(client: SandboxClient) -> None:
    response = await run(client, "input()")
    assert response.exception is not None
    assert response.exception.type == "EOFError"


async def test_program_need_not_read_its_stdin(client: SandboxClient) -> None:
    response = await run(client, "print(1)", stdin="x" * 2_000_000)
    assert response.stdout == "1\n"


async def test_files_lie_in_the_working_directory(client: SandboxClient) -> None:
    code = "print(open('data/a.txt').read())"
    response = await client.run(Request(id="f", code=code, files={"data/a.txt": "hello"}))
    assert response.stdout == "hello\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
async def test_files_outside_the_working_directory_are_refused(client: SandboxClient, path: str) -> None:
    response = await client.run(Request(id="f", code="1", files={path: ""}))
    assert response.outcome is ProgramOutcome.REJECTED
    assert "relative path" in response.message


async def test_impossible_limits_are_refused(client: SandboxClient) -> None:
    response = await client.run(Request(id="f", code="1", limits=Limits(wall_seconds=-1.0)))
    assert response.outcome is ProgramOutcome.REJECTED
    assert "wall_seconds" in response.message


async def test_same_seed_gives_the_same_random_numbers_and_another_seed_others(client: SandboxClient) -> None:
    code = "import random\nrandom.random()"
    first, again, other = [await run(client, code, seed=seed) for seed in (1, 1, 2)]
    assert first.value == again.value != other.value


async def test_order_of_a_set_of_strings_is_the_same_in_every_sandbox(client: SandboxClient) -> None:
    code = "list({'a', 'b', 'c', 'd', 'e'})"
    here = await run(client, code)
    with SandboxClient.start(slots=1, preload=()) as other:
        assert (await run(other, code)).value == here.value


async def test_threads_and_exit_hooks_finish_before_the_call_does(client: SandboxClient) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "hook")
def late():
    time.sleep(0.05)
    print("thread")
threading.Thread(target=late).start()
print("main")
"""
    assert (await run(client, code)).stdout == "main\nthread\nhook\n"


async def test_program_is_main_and_can_use_processes_and_asyncio(client: SandboxClient) -> None:
    code = """
import asyncio, multiprocessing
def double(x):
    return 2 * x
async def main():
    return await asyncio.to_thread(double, 4)
if __name__ == "__main__":
    print(asyncio.run(main()))
    with multiprocessing.Pool(2) as pool:
        print(pool.map(double, [1, 2]))
"""
    assert (await run(client, code)).stdout == "8\n[2, 4]\n"


async def test_lone_surrogates_survive_and_bad_bytes_are_replaced(client: SandboxClient) -> None:
    assert (await run(client, "print('\\ud800')")).stdout == "\ud800\n"
    assert (await run(client, "import os; os.write(1, b'a\\xffb\\x00')")).stdout == "a\ufffdb\x00"


async def test_code_that_cannot_be_source_is_the_programs_error(client: SandboxClient) -> None:
    for code in ("print(1)\0", "x = '\ud800'"):
        response = await run(client, code)
        assert response.outcome is ProgramOutcome.EXCEPTION
        assert response.exception is not None


async def test_exceptions_that_cannot_be_shown_are_still_reported(client: SandboxClient) -> None:
    code = "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad"
    response = await run(client, code)
    assert response.outcome is ProgramOutcome.EXCEPTION
    assert response.exception is not None
    assert response.exception.type == "Bad"
    assert "line 3, in <module>" in response.stderr


async def test_groups_and_causes_are_shown_with_the_programs_lines(client: SandboxClient) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ExceptionGroup('g', [ValueError('v')]) from e"
    response = await run(client, code)
    assert "line 2, in <module>" in response.stderr
    assert "ValueError: v" in response.stderr


async def test_preloaded_modules_are_there_and_numpy_is_seeded() -> None:
    code = "import sys\nprint('numpy' in sys.modules)\nimport numpy\nnumpy.random.rand()"
    with SandboxClient.start(slots=1, preload=("numpy",)) as client:
        first, again, other = [await run(client, code, seed=seed) for seed in (1, 1, 2)]
    assert first.stdout == "True\n"
    assert first.value == again.value != other.value


async def test_modules_that_are_not_preloaded_can_be_imported_under_default_limits(client: SandboxClient) -> None:
    response = await client.run(Request(id="n", code="import numpy\nint(numpy.linalg.det(numpy.eye(4)))"))
    assert (response.outcome, response.value) == (ProgramOutcome.OK, "1")
