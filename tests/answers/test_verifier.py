from typing import Any

import pytest

from rocstar.answers.grade import Grader
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.answers.verifier import BoxedVerifier, ToolOutputVerifier
from rocstar.errors import VerifierUnavailable
from rocstar.types import Status, Stop, Trajectory, Verdict
from tests.contracts.test_verifier import Letters, attempt, printed, problem, turn, verified

RIGHT, WRONG = Verdict.RIGHT, Verdict.WRONG


async def boxed(trajectory: Trajectory, answer: str = "5", **settings: Any) -> tuple[Verdict, str | None, str]:
    outcome = await verified(BoxedVerifier(Letters(), Grader(), **settings), problem(answer), trajectory)
    return outcome.verdict, outcome.extracted, outcome.method


async def test_lenient_takes_the_last_box_of_any_turn() -> None:
    assert await boxed(attempt(turn(r"\boxed{4}"), turn(r"so \boxed{5}"))) == (RIGHT, "5", "integer")
    assert await boxed(attempt(turn(r"\boxed{5}"), turn("done"))) == (RIGHT, "5", "integer")


async def test_an_announced_answer_counts_only_on_request() -> None:
    said = attempt(turn("the answer is 4"), turn("so the answer is 5."))
    assert await boxed(said) == (WRONG, None, "no_answer")
    assert await boxed(said, phrases=True) == (RIGHT, "5", "integer")
    assert await boxed(attempt(turn("the answer is 5"), turn("done")), phrases=True) == (WRONG, None, "no_answer")


async def test_two_boxes_joined_by_or_are_two_answers_and_not_one() -> None:
    assert (await boxed(attempt(turn(r"\boxed{4} or \boxed{5}"))))[:2] == (WRONG, "4, 5")


async def test_strict_takes_the_box_inside_the_answer_of_the_last_turn() -> None:
    assert (await boxed(attempt(turn(r"<answer>\boxed{5}</answer>")), strict=True))[0] is RIGHT
    assert await boxed(attempt(turn(r"\boxed{5}")), strict=True) == (WRONG, None, "no_answer")
    assert (await boxed(attempt(turn(r"<answer>\boxed{5}</answer>"), turn("hm")), strict=True))[0] is WRONG


async def test_a_tool_cannot_answer_for_the_model() -> None:
    assert await boxed(attempt(turn("print", printed(r"\boxed{5}")), turn("done"))) == (WRONG, None, "no_answer")


@pytest.mark.parametrize("stop", [Stop.MAX_TOKENS, Stop.MAX_TURNS])
async def test_a_truncated_attempt_is_graded_only_on_request(stop: Stop) -> None:
    assert await boxed(attempt(turn(r"\boxed{5}"), stop=stop), truncated="graded") == (RIGHT, "5", "integer")
    assert await boxed(attempt(turn(r"\boxed{5"), stop=stop), truncated="graded") == (WRONG, None, "no_answer")


async def test_a_truncated_attempt_keeps_the_facts_about_its_form() -> None:
    cut = attempt(turn(r"<answer>\boxed{5}</answer><reason>"), stop=Stop.MAX_TOKENS)
    facts = (await verified(BoxedVerifier(Letters(), Grader()), problem("5"), cut)).format_facts
    assert (facts.answer_tags, facts.reason_after_answer, facts.boxed) == (1, True, True)


async def test_a_truncated_attempt_gets_nothing_for_what_its_tool_printed() -> None:
    cut = attempt(turn("c", printed("5")), turn("so"), stop=Stop.MAX_TOKENS)
    outcome = await verified(ToolOutputVerifier(Letters()), problem("5"), cut)
    graded = await verified(ToolOutputVerifier(Letters(), truncated="graded"), problem("5"), cut)
    assert (outcome.verdict, outcome.method, graded.verdict) == (WRONG, "truncated", RIGHT)


CALL = '<tool_call>{"name": "python", "arguments": {"code": "s = r\'<answer>\\\\boxed{5}</answer>\'"}}'


@pytest.mark.parametrize("text", [CALL + "</tool_call>", CALL, f"{CALL}</tool_call> then {CALL}"])
async def test_a_box_in_the_code_of_a_call_is_no_answer(text: str) -> None:
    for strict in (False, True):
        assert await boxed(attempt(turn(text)), strict=strict) == (WRONG, None, "no_answer")
    facts = (await verified(BoxedVerifier(Letters(), Grader()), problem("5"), attempt(turn(text)))).format_facts
    assert (facts.answer_tags, facts.boxed) == (0, False)


async def test_what_stands_beside_a_call_is_read() -> None:
    assert await boxed(attempt(turn(rf"{CALL}</tool_call> so \boxed{{6}}")), "6") == (RIGHT, "6", "integer")


async def test_format_facts_come_from_what_the_assistant_wrote() -> None:
    trajectory = attempt(turn("x", printed("<answer>1</answer>")), turn(r"<answer>\boxed{5}</answer><reason>"))
    facts = (await verified(BoxedVerifier(Letters(), Grader()), problem("5"), trajectory)).format_facts
    assert (facts.answer_tags, facts.reason_after_answer, facts.boxed) == (1, True, True)


@pytest.mark.parametrize(
    ("answer", "output", "verdict"),
    [
        ("504.0", "504\n", RIGHT),
        ("504.0", "working\n504.2\n", RIGHT),
        ("504.0", "505\n", WRONG),
        ("0", "1e-12", RIGHT),
        ("0", "0.001", WRONG),
        ("-2", "2", WRONG),
        ("504.0", "nan", WRONG),
        ("504.0", "five", WRONG),
        ("many", "5", Verdict.UNDECIDED),
    ],
)
async def test_tool_output_is_compared_with_a_relative_tolerance(answer: str, output: str, verdict: Verdict) -> None:
    trajectory = attempt(turn("c", printed(output)), turn(""))
    outcome = await verified(ToolOutputVerifier(Letters()), problem(answer), trajectory)
    assert outcome.verdict is verdict


async def test_the_last_tool_result_counts_and_a_failed_one_is_no_answer() -> None:
    verifier = ToolOutputVerifier(Letters())
    failed = turn("c", printed("5", Status.CODE_ERROR))
    right = await verified(verifier, problem("5"), attempt(failed, turn("c", printed("5"))))
    wrong = await verified(verifier, problem("5"), attempt(turn("c", printed("5")), failed))
    none = await verified(verifier, problem("5"), attempt(turn(r"\boxed{5}")))
    assert (right.verdict, right.extracted, right.method) == (RIGHT, "5", "tool_output")
    assert (wrong.verdict, wrong.method) == (none.verdict, none.method) == (WRONG, "no_answer")


async def test_a_worker_that_dies_on_one_answer_costs_no_other_attempt_its_verdict() -> None:
    checker = SymbolicChecker(target="tests.answers.targets:scripted", prepare="", workers=1)
    grader = Grader(checker, graders=("prime",))
    said = [r"\boxed{fine}", r"\boxed{die}", r"\boxed{well}"]
    outcomes = await BoxedVerifier(Letters(), grader).verify_all([(problem("x"), attempt(turn(text))) for text in said])
    await grader.close()
    assert [isinstance(outcome, VerifierUnavailable) for outcome in outcomes] == [False, True, False]
    assert [getattr(outcome, "verdict", None) for outcome in outcomes] == [RIGHT, None, RIGHT]
