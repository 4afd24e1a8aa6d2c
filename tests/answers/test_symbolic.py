"""The checker with real workers: scripted targets for how they fail, the judge for what it decides."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rocstar.answers.symbolic import Found, Question, SymbolicChecker
from rocstar.errors import VerifierUnavailable
from rocstar.types import Verdict
from tests.answers.targets import worker_pids

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED


def scripted(**settings: Any) -> SymbolicChecker:
    """A checker whose workers run `targets.scripted`."""
    settings = {"deadline_seconds": 20.0, "start_seconds": 20.0, "workers": 1, "prepare": "", **settings}
    return SymbolicChecker(target="tests.answers.targets:scripted", **settings)


def question(predicted: str, gold: str = "1", grader: str = "math_verify") -> Question:
    return Question(graders=(grader,), gold=gold, predicted=predicted)


async def ask(checker: SymbolicChecker, *predicted: str) -> list[Found | VerifierUnavailable]:
    return await checker.compare([question(text) for text in predicted])


def verdict_of(found: Found | VerifierUnavailable) -> Verdict:
    assert not isinstance(found, VerifierUnavailable)
    return found[0]


def is_alive(pid: int) -> bool:
    """Running: a zombie that nobody reaps has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def worker_of(checker: SymbolicChecker) -> int:
    """Its worker's process id, once there is one."""
    while not worker_pids(checker):
        time.sleep(0.01)
    return worker_pids(checker)[0]


def wait_until_gone(pid: int) -> None:
    for _ in range(600):
        if not is_alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} outlived its parent")


@pytest.mark.parametrize(
    ("gold", "predicted", "verdict"),
    [
        ("x^2+2x+1", "(x+1)^2", RIGHT),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", RIGHT),
        (r"\frac{1}{2}+\pi", r"\pi+0.5", RIGHT),
        ("x^2+2x+1", "x^3+2x+1", WRONG),
        ("[0,1)", "(0,1)", WRONG),
        ("x<1", "-x > -1", RIGHT),
        (r"\sqrt{5}", r"1 + \foo{ 5", WRONG),
        ("5", r"1 + \foo{ 5", WRONG),
        (r"1-\frac{1}{\mathrm{q}}", "1", UNDECIDED),
        ("5", "3 or $5$", WRONG),
        ("$1$ and $2$", "1,2", RIGHT),
        ("S/S'", "1", WRONG),
        ("x", "", WRONG),
    ],
)
async def test_math_verify_decides(checker: SymbolicChecker, gold: str, predicted: str, verdict: Verdict) -> None:
    (found,) = await checker.compare([question(predicted, gold)])
    assert found == (verdict, "gold_unparsed" if verdict is UNDECIDED else "math_verify")


async def test_names_of_variables_matter_unless_another_grader_is_asked(checker: SymbolicChecker) -> None:
    strict, free = (question("f(y)", "f(x)", grader) for grader in ("math_verify", "math_verify_any_names"))
    assert await checker.compare([strict, free]) == [(WRONG, "math_verify"), (RIGHT, "math_verify")]


async def test_a_reference_that_does_not_parse_leaves_the_question_undecided(checker: SymbolicChecker) -> None:
    questions = [question("5", r"\frac{", grader) for grader in ("prime", "math_verify")]
    assert await checker.compare(questions) == [(UNDECIDED, "gold_unparsed")] * 2


def test_it_serves_several_event_loops_and_threads_at_once(checker: SymbolicChecker) -> None:
    def from_a_loop_of_its_own(n: int) -> list[Found | VerifierUnavailable]:
        return asyncio.run(checker.compare([question(f"b+{n}", f"{n}+b")]))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(from_a_loop_of_its_own, range(8)))
    assert found == [[(RIGHT, "math_verify")]] * 8


async def test_a_limit_is_held_against_a_prediction_unless_the_reference_alone_meets_it_and_is_remembered() -> None:
    checker = scripted(deadline_seconds=0.5)
    right, late = (RIGHT, "math_verify"), (WRONG, "deadline")
    assert await ask(checker, "fine", "hang", "hang", "well") == [right, late, late, right]
    pids = worker_pids(checker)
    assert await ask(checker, "hang") == [late]
    assert worker_pids(checker) == pids, "what hit a limit was asked again"
    assert await checker.compare([question("fine", "hang")]) == [(UNDECIDED, "deadline")]
    assert await checker.compare([question("hang", "slow")]) == [late], "a reference near the limit was a way out"
    await checker.close()


async def test_an_answer_that_eats_memory_is_wrong() -> None:
    checker = scripted(memory_bytes=100 << 20)
    for megabytes in (150, 10_000):
        assert await ask(checker, f"eat:{megabytes}", "fine") == [(WRONG, "memory"), (RIGHT, "math_verify")]
    await checker.close()


async def test_a_worker_that_dies_is_replaced_and_one_that_fails_again_makes_the_verifier_unavailable(
    tmp_path: Path,
) -> None:
    checker = scripted()
    assert await ask(checker, f"die-once:{tmp_path / 'died'}") == [(RIGHT, "math_verify")]
    for word, reason in (("die", "died 2 times"), ("raise", "a bug of ours")) * 2:  # what failed is asked again
        fine, failed = await ask(checker, "fine", word)
        assert fine == (RIGHT, "math_verify")
        assert isinstance(failed, VerifierUnavailable) and reason in str(failed)
    first, second = (asyncio.create_task(ask(checker, "nap:1")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [(RIGHT, "math_verify")], "one waiter that gave up took the answer from another"
    await checker.close()


@pytest.mark.parametrize("prepare", ["asleep", "broken"])
async def test_a_worker_that_does_not_start_makes_the_verifier_unavailable(prepare: str) -> None:
    checker = scripted(prepare=f"tests.answers.targets:{prepare}", start_seconds=1.0 if prepare == "asleep" else 20.0)
    (failed,) = await ask(checker, "fine")
    assert isinstance(failed, VerifierUnavailable) and "did not start" in str(failed)
    await checker.close()


async def test_close_ends_a_hanging_question_and_refuses_new_ones() -> None:
    checker = scripted(deadline_seconds=600.0)
    waiting = [asyncio.create_task(ask(checker, "hang", str(n))) for n in range(3)]
    pid = await asyncio.to_thread(worker_of, checker)
    await checker.close()
    await checker.close()
    answers = [answer for found in await asyncio.gather(*waiting) for answer in found]
    assert all(isinstance(answer, VerifierUnavailable) for answer in answers)
    wait_until_gone(pid)
    with pytest.raises(VerifierUnavailable, match="closed"):
        await ask(checker, "fine")


async def test_a_checker_that_was_never_asked_has_no_worker() -> None:
    checker = SymbolicChecker()
    assert await checker.compare([]) == []
    assert worker_pids(checker) == []
    await checker.close()


@pytest.mark.parametrize("busy", [False, True])
def test_the_workers_end_when_their_parent_is_killed(busy: bool) -> None:
    """Idle, and in the middle of a question that never ends."""
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(f"""
        import asyncio, time
        from rocstar.answers.symbolic import Found, Question, SymbolicChecker
        from tests.answers.targets import worker_pids
        checker = SymbolicChecker(
            deadline_seconds=2.0, workers=1, target="tests.answers.targets:scripted", prepare="")
        async def main():
            await checker.compare([Question(graders=("prime",), gold="a", predicted="b")])
            print(*worker_pids(checker), flush=True)
            if {busy}:
                await checker.compare([Question(graders=("prime",), gold="a", predicted="hang")])
            await asyncio.sleep(600)
        asyncio.run(main())
    """)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)  # into the second question
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)
