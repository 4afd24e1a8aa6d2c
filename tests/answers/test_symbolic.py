"""The killable process, with real children: scripted ones for how they fail, math-verify for what it decides."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.answers.symbolic import SymbolicChecker
from rocstar.errors import VerifierUnavailable
from rocstar.types import Verdict

UNDECIDED = Verdict.UNDECIDED
GREET = "import sys, time, os; print('{\"ready\": true}', flush=True); "
ANSWER = 'print(\'{"verdict": "right", "method": "scripted"}\', flush=True)'


def scripted(program: str, **limits: float) -> SymbolicChecker:
    """A checker whose child runs `program`."""
    limits = {"deadline_seconds": 20.0, "start_seconds": 20.0, **limits}
    return SymbolicChecker(command=(sys.executable, "-c", program), **limits)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    """Running: a zombie that nobody reaps has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(checker: SymbolicChecker) -> int:
    """The child's process id, once there is one."""
    while checker.worker_pid is None:
        time.sleep(0.01)
    return checker.worker_pid


def wait_until_gone(pid: int) -> None:
    for _ in range(600):
        if not is_alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} outlived its parent")


@pytest.fixture(scope="module")
def checker() -> Iterator[SymbolicChecker]:
    """One warm math-verify for this module; every test uses it from an event loop of its own."""
    checker = SymbolicChecker(deadline_seconds=20.0)
    yield checker
    asyncio.run(checker.close())


@pytest.mark.parametrize(
    ("gold", "predicted", "verdict"),
    [
        ("x^2+2x+1", "(x+1)^2", Verdict.RIGHT),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", Verdict.RIGHT),
        (r"\frac{1}{2}+\pi", r"\pi+0.5", Verdict.RIGHT),
        ("x^2+2x+1", "x^3+2x+1", Verdict.WRONG),
        ("[0,1)", "(0,1)", Verdict.WRONG),
        (r"\sqrt{5}", r"1 + \foo{ 5", Verdict.WRONG),
        ("5", r"1 + \foo{ 5", Verdict.WRONG),
        ("x", "", Verdict.WRONG),
    ],
)
async def test_math_verify_decides(checker: SymbolicChecker, gold: str, predicted: str, verdict: Verdict) -> None:
    assert await checker.compare(gold, predicted) == (verdict, "math_verify")


async def test_a_reference_that_does_not_parse_leaves_the_question_undecided(checker: SymbolicChecker) -> None:
    assert await checker.compare(r"\frac{", "5") == (UNDECIDED, "gold_unparsed")


async def test_prose_is_searched_only_on_request(checker: SymbolicChecker) -> None:
    text = "so the number is 10 which is 1,000.99m²"
    assert (await checker.compare("1000.99", text))[0] is Verdict.WRONG
    assert (await checker.compare("1000.99", text, prose=True))[0] is Verdict.RIGHT


async def test_many_questions_at_once_each_get_their_own_answer(checker: SymbolicChecker) -> None:
    found = await asyncio.gather(*(checker.compare(f"x+{n}", f"{n % 3}+x") for n in range(9)))
    assert [verdict is Verdict.RIGHT for verdict, _ in found] == [n < 3 for n in range(9)]


def test_it_serves_several_event_loops_in_turn(checker: SymbolicChecker) -> None:
    assert asyncio.run(checker.compare("a+b", "b+a")) == asyncio.run(checker.compare("c+d", "d+c"))


async def test_a_deadline_kills_the_child_and_the_next_question_gets_a_new_one() -> None:
    checker = scripted(
        GREET + "line = sys.stdin.readline(); " + f"time.sleep(600) if 'hang' in line else {ANSWER}",
        deadline_seconds=0.5,
    )
    assert await checker.compare("1", "hang") == (UNDECIDED, "deadline")
    assert checker.worker_pid is None
    assert await checker.compare("1", "fine") == (Verdict.RIGHT, "scripted")
    await checker.close()


async def test_a_child_that_eats_memory_is_killed() -> None:
    checker = scripted(GREET + "sys.stdin.readline(); x = b'1' * (300 << 20); time.sleep(600)", memory_bytes=200 << 20)
    assert await checker.compare("1", "2") == (UNDECIDED, "memory")
    await checker.close()


async def test_a_child_that_dies_once_is_replaced(tmp_path: Path) -> None:
    flag = tmp_path / "died"
    die_once = f"p = {str(flag)!r}; sys.stdin.readline(); seen = os.path.exists(p); open(p, 'w').close(); "
    checker = scripted(GREET + die_once + f"{ANSWER} if seen else os.abort()")
    assert await checker.compare("1", "2") == (Verdict.RIGHT, "scripted")
    await checker.close()


async def test_a_child_that_keeps_dying_makes_the_verifier_unavailable() -> None:
    checker = scripted(GREET + "sys.stdin.readline(); os.abort()")
    with pytest.raises(VerifierUnavailable, match="died twice"):
        await checker.compare("1", "2")
    await checker.close()


@pytest.mark.parametrize("program", ["", "import time; time.sleep(600)", 'print(\'{"failed": "no math-verify"}\')'])
async def test_a_child_that_does_not_start_makes_the_verifier_unavailable(program: str) -> None:
    checker = scripted(program, start_seconds=0.5 if "sleep" in program else 20.0)
    with pytest.raises(VerifierUnavailable, match="did not start"):
        await checker.compare("1", "2")
    await checker.close()


async def test_close_ends_a_hanging_question_and_refuses_new_ones() -> None:
    checker = scripted(GREET + "sys.stdin.readline(); time.sleep(600)", deadline_seconds=600.0)
    waiting = [asyncio.create_task(checker.compare("1", str(n))) for n in range(3)]
    pid = await asyncio.to_thread(child_of, checker)
    await checker.close()
    await checker.close()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, VerifierUnavailable) for answer in answers)
    assert not is_alive(pid)
    with pytest.raises(VerifierUnavailable, match="closed"):
        await checker.compare("1", "2")


async def test_a_checker_that_was_never_asked_has_no_child() -> None:
    checker = SymbolicChecker()
    assert checker.worker_pid is None
    await checker.close()


@pytest.mark.parametrize("question", ["'x', 'y'", "'1', '10!!!!!!'"])
def test_the_child_ends_when_its_parent_is_killed(question: str) -> None:
    """Idle, and in the middle of a question that never ends."""
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(f"""
        import asyncio, time
        from rocstar.answers.symbolic import SymbolicChecker
        checker = SymbolicChecker(deadline_seconds=2.0)
        async def main():
            await checker.compare('a', 'b')
            print(checker.worker_pid, flush=True)
            await checker.compare({question})
            await asyncio.sleep(600)
        asyncio.run(main())
    """)], stdout=subprocess.PIPE)  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)  # into the second question
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)
