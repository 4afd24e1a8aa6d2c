"""Every figure worked out by hand on few problems, and the intervals at their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.evaluation.intervals import Estimate, wilson
from rocstar.evaluation.metrics import avg_at_k, maj_at_k, pass_at_k, summarise, votes_PR
from rocstar.types import FormatFacts, Group, Outcome, Problem, Status, Stop, ToolCall, ToolResult, Trajectory, Verdict
from tests.contracts import test_verifier as examples


def test_wilson_matches_published_figures_and_knows_nothing_without_problems() -> None:
    for right, n, expected in (
        (187, 1000, (0.187, 0.1640, 0.2124)),
        (0, 10, (0.0, 0.0, 0.2775)),
        (10, 10, (1, 0.7225, 1)),
    ):
        found = wilson(right, n)
        assert (found.value, found.low, found.high) == pytest.approx(expected, abs=5e-4)
    assert wilson(0, 0) == avg_at_k([]) == avg_at_k([[], []]) == Estimate(0.0, 0.0, 1.0, 0)
    with pytest.raises(ValueError, match="between 0 and n"):
        wilson(3, 2)


def test_copying_attempts_does_not_narrow_the_interval() -> None:
    once = avg_at_k([[True, False], [False, False], [True, True]])
    assert avg_at_k([[True, False] * 9, [False] * 18, [True] * 18]) == once


@pytest.mark.parametrize(
    ("right", "k", "value"),
    [
        *(([[True, False, False, False]], k, k / 4) for k in (1, 2, 3, 4)),  # 1 - C(3, k) / C(4, k)
        # two right of four: 1 - C(2,2)/C(4,2) = 5/6; none: 0; a single right attempt, fewer than k: 1
        ([[True, True, False, False], [False] * 4, [True]], 2, (5 / 6 + 0 + 1) / 3),
    ],
)
def test_pass_at_k_averages_over_problems(right: list[list[bool]], k: int, value: float) -> None:
    assert pass_at_k(right, k).value == pytest.approx(value)
    for beyond in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{beyond} needs"):
            pass_at_k(right, beyond)


def test_the_majority_decides_and_ties_share_the_credit() -> None:
    assert majority(("4", True), ("4", True), ("5", False)) == 1.0
    assert majority(("4", True), ("5", False), (" 5 ", False)) == 0.0
    assert majority(("4", True), ("5", False), (None, False), (None, False)) == 0.5
    assert majority((None, False)) == 0.0
    assert majority(("1", True), ("1.0", True), ("x = 1", True), ("3", False), ("3", False)) == 1.0
    assert majority(("\\sqrt{8}", True), ("2\\sqrt2", True), ("3", False)) == 1.0
    assert majority(("7", True), ("7", False), ("8", False)) == 1.0, "a text that was right once is that candidate"
    assert maj_at_k([[(None, True), (None, False)], [("1", False)]]) is None, "where no answer was looked at"


def majority(*votes: tuple[str | None, bool]) -> float:
    """Of one problem."""
    estimate = maj_at_k([votes])
    assert estimate is not None
    return estimate.value


@pytest.mark.parametrize(
    "spelled", [("1", "1.0"), ("0.5", "\\frac{1}{2}"), ("1,000", "1000"), ("A", "(A)"), ("x", "$x$")]
)
def test_wrong_answers_that_are_equal_at_once_are_one_candidate(spelled: tuple[str, str]) -> None:
    one, other = spelled
    assert majority(("7", True), (one, False), (other, False)) == 0.0
    assert majority(("7", True), ("7", True), (one, False), (other, False)) == 0.5


@settings(max_examples=20)
@given(st.permutations(["1", "1.0", "2/2", "0.333333", "1/3", "0.3333333", "x", "5"]))
def test_the_order_of_attempts_changes_no_vote(answers: list[str]) -> None:
    assert majority(*((answer, False) for answer in answers), ("7", True), ("7", True), ("7", True)) == 1 / 3


def attempt(verdict: Verdict | None, *statuses: Status, tokens: int = 3, stop: Stop = Stop.ANSWERED) -> Trajectory:
    results = tuple(ToolResult(call_id=str(number), status=status) for number, status in enumerate(statuses))
    made = examples.attempt(replace(examples.turn("x" * tokens), results=results), stop=stop)
    if verdict is None:
        return made
    facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
    reward = float(verdict is Verdict.RIGHT)
    outcome = Outcome(verdict=verdict, reward=reward, extracted=verdict.value, method="test", format_facts=facts)
    return replace(made, outcome=outcome)


def problem(name: str, family: str) -> Problem:
    return Problem(id=name, question=name, answer="1", source="file", metadata={"family": family} if family else {})


OK, BAD, FAULT = Status.OK, Status.CODE_ERROR, Stop.ENVIRONMENT_FAILED


def group(asked: Problem, *attempts: Trajectory) -> Group:
    return Group(problem=asked, trajectories=attempts)


RESULTS = [
    group(problem("a", "gcd"), attempt(Verdict.RIGHT, OK, BAD), attempt(Verdict.RIGHT, OK)),
    group(problem("b", ""), attempt(Verdict.WRONG, stop=Stop.MAX_TOKENS, tokens=8), attempt(Verdict.UNDECIDED, BAD)),
    group(problem("c", "gcd"), attempt(Verdict.WRONG, BAD), attempt(Verdict.RIGHT, BAD, BAD, stop=FAULT)),
]


def test_the_summary_counts_all_attempts_but_those_that_a_fault_of_ours_ended() -> None:
    summary = summarise(RESULTS, k=2)
    assert (summary.problems, summary.attempts, summary.undecided, summary.environment_failed) == (3, 6, 1, 1)
    assert summary.avg_at_k == summary.pass_at_k == maj_at_k(votes_PR(RESULTS)) == wilson(1, 3)
    assert summary.accuracy_by_source == {"file": wilson(0, 1), "gcd": wilson(1, 2)}, "by family where there is one"
    assert (summary.mean_response_tokens, summary.calls_per_attempt) == ((3 + 3 + 8 + 3 + 3) / 5, 5 / 5)
    assert (summary.failed_call_share, summary.tool_error_share_in_correct) == (3 / 5, 1 / 2)
    assert (summary.failed_call_share_in_correct, summary.no_tool_share) == (1 / 3, 1 / 5)
    asked = ToolCall(id="a", tool="search", arguments={}, raw="")
    own = attempt(Verdict.RIGHT)
    unanswered = replace(own, turns=(replace(own.turns[0], calls=(asked,)),))  # an agent's own tool answers it alone
    assert summarise([group(problem("d", ""), unanswered, own)], k=2).no_tool_share == 1 / 2
    assert (summary.truncation_share, summary.out_of_turns_share) == (1 / 5, 0.0)


def test_attempts_whose_agent_failed_are_a_figure_where_there_are_any() -> None:
    failed = [replace(attempt(Verdict.WRONG), stop=stop) for stop in (Stop.AGENT_FAILED, Stop.AGENT_TIMEOUT)]
    ended = [attempt(Verdict.WRONG)] * 2
    assert summarise([group(problem("d", ""), *failed, *ended)], k=4).agent_failed_share == 1 / 2
    assert summarise([group(problem("d", ""), *ended)], k=2).agent_failed_share is None


VERDICTS = st.lists(st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=10)
@given(VERDICTS)
def test_an_undecided_attempt_is_worth_what_a_wrong_one_is(verdicts: list[list[Verdict]]) -> None:
    wrong = [[Verdict.WRONG if one is Verdict.UNDECIDED else one for one in some] for some in verdicts]
    k = min(map(len, verdicts))
    mine, theirs = (
        [group(problem(str(n), ""), *map(attempt, some)) for n, some in enumerate(all_of)]
        for all_of in (verdicts, wrong)
    )
    for figure in ("avg_at_k", "pass_at_k", "accuracy_by_source"):
        assert getattr(summarise(mine, k), figure) == getattr(summarise(theirs, k), figure)
    assert summarise(mine, k).undecided == sum(some.count(Verdict.UNDECIDED) for some in verdicts)


def test_a_summary_of_nothing_claims_nothing() -> None:
    for results in ([], [group(problem("a", ""), attempt(None, stop=Stop.ENVIRONMENT_FAILED))]):
        summary = summarise(results, k=4)
        assert summary.avg_at_k == summary.pass_at_k == Estimate(0.0, 0.0, 1.0, 0)
        assert summary.tool_error_share_in_correct is summary.mean_response_tokens is None
