from dataclasses import replace
from typing import Any

import pytest

from rocstar.answers.extract import format_facts
from rocstar.answers.grade import Grader
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.answers.verifier import BoxedVerifier, ToolOutputVerifier
from rocstar.errors import VerifierUnavailable
from rocstar.evaluation.endpoint import CodePoints
from rocstar.types import FormatFacts, Status, Stop, Trajectory, Verdict
from tests.contracts.test_verifier import attempt, printed, problem, turn, verified

RIGHT, WRONG = Verdict.RIGHT, Verdict.WRONG


async def boxed(trajectory: Trajectory, answer: str = "5", **settings: Any) -> tuple[Verdict, str | None, str]:
    outcome = await verified(BoxedVerifier(CodePoints(), Grader(), **settings), problem(answer), trajectory)
    return outcome.verdict, outcome.extracted, outcome.method


CALL = '<tool_call>{"name": "python", "arguments": {"code": "s = r\'<answer>\\\\boxed{5}</answer>\'"}}'
FIVE, NONE = (RIGHT, "5", "integer"), (WRONG, None, "no_answer")
CUT = attempt(turn(r"\boxed{5}"), stop=Stop.MAX_TOKENS)
SAID = attempt(turn("the answer is 4"), turn("so the answer is 5."))


@pytest.mark.parametrize(
    ("trajectory", "settings", "found"),
    [
        (attempt(turn(r"\boxed{4}"), turn(r"so \boxed{5}")), {}, FIVE),
        (attempt(turn(r"\boxed{5}"), turn("done")), {}, FIVE),
        (attempt(turn("print", printed(r"\boxed{5}")), turn("done")), {}, NONE),  # a tool cannot answer for the model
        (attempt(turn(r"\boxed{4} or \boxed{5}")), {}, (WRONG, "4, 5", "not_a_number")),
        (attempt(turn(rf"{CALL}</tool_call> so \boxed{{5}}")), {}, FIVE),  # beside a call
        (SAID, {}, NONE),
        (SAID, {"phrases": True}, FIVE),
        (attempt(turn("the answer is 5"), turn("done")), {"phrases": True}, NONE),
        (attempt(turn(r"<answer>\boxed{5}</answer>")), {"strict": True}, FIVE),
        (attempt(turn(r"\boxed{5}")), {"strict": True}, NONE),
        (attempt(turn(r"<answer>\boxed{5}</answer>"), turn("hm")), {"strict": True}, NONE),
        (CUT, {"truncated": "graded"}, FIVE),
        (replace(CUT, stop=Stop.MAX_TURNS), {"truncated": "graded"}, FIVE),
        (attempt(turn(r"\boxed{5"), stop=Stop.MAX_TOKENS), {"truncated": "graded"}, NONE),
    ],
)
async def test_the_last_box_of_any_turn_counts_and_more_or_less_on_request(
    trajectory: Trajectory, settings: dict[str, Any], found: tuple[Verdict, str | None, str]
) -> None:
    assert await boxed(trajectory, **settings) == found


@pytest.mark.parametrize("text", [CALL + "</tool_call>", CALL, f"{CALL}</tool_call> then {CALL}"])
async def test_a_box_in_the_code_of_a_call_is_no_answer(text: str) -> None:
    for strict in (False, True):
        assert await boxed(attempt(turn(text)), strict=strict) == NONE
    facts = (await verified(BoxedVerifier(CodePoints(), Grader()), problem("5"), attempt(turn(text)))).format_facts
    assert (facts.answer_tags, facts.boxed) == (0, False)


async def test_a_truncated_attempt_gets_nothing_for_what_its_tool_printed() -> None:
    cut = attempt(turn("c", printed("5")), turn("so"), stop=Stop.MAX_TOKENS)
    outcome = await verified(ToolOutputVerifier(CodePoints()), problem("5"), cut)
    graded = await verified(ToolOutputVerifier(CodePoints(), truncated="graded"), problem("5"), cut)
    assert (outcome.verdict, outcome.method, graded.verdict) == (WRONG, "truncated", RIGHT)


@pytest.mark.parametrize(
    ("turns", "tags", "reason_after", "boxed"),
    [
        ([], 0, False, False),
        ([r"<answer>\boxed{1}</answer>", "<answer>2</answer> <answer>3"], 2, False, True),
        (["<answer>", "5</answer>"], 0, False, False),  # a block does not span turns
        (["<answer>1</answer><reason>but"], 1, True, False),
        (["<answer>1</answer>", "<reason>but"], 1, True, False),
        (["<reason>so</reason><answer>1</answer>"], 1, False, False),
        (["</answer><reason>so</reason><answer>1</answer>"], 1, False, False),
        (["<reason>so</reason>"], 0, False, False),
    ],
)
def test_the_form_is_counted_over_all_turns(turns: list[str], tags: int, reason_after: bool, boxed: bool) -> None:
    assert format_facts(turns) == FormatFacts(answer_tags=tags, reason_after_answer=reason_after, boxed=boxed)


async def test_format_facts_come_from_what_the_assistant_wrote() -> None:
    trajectory = attempt(turn("x", printed("<answer>1</answer>")), turn(r"<answer>\boxed{5}</answer><reason>"))
    facts = (await verified(BoxedVerifier(CodePoints(), Grader()), problem("5"), trajectory)).format_facts
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
    outcome = await verified(ToolOutputVerifier(CodePoints()), problem(answer), trajectory)
    assert outcome.verdict is verdict


async def test_the_last_tool_result_counts_and_a_failed_one_is_no_answer() -> None:
    verifier = ToolOutputVerifier(CodePoints())
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
    outcomes = await BoxedVerifier(CodePoints(), grader).verify_all(
        [(problem("x"), attempt(turn(text))) for text in said]
    )
    await grader.close()
    assert [isinstance(outcome, VerifierUnavailable) for outcome in outcomes] == [False, True, False]
    assert [getattr(outcome, "verdict", None) for outcome in outcomes] == [RIGHT, None, RIGHT]
