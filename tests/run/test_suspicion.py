"""Signs that a reward was won without solving the problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from rocstar.evaluation.endpoint import CodePoints
from rocstar.run.report import gives_several_answers, is_unfounded, prints_constants, suspicion
from rocstar.types import FormatFacts, Group, Outcome, Problem, Resampled, Trajectory, Turn, Verdict
from tests.contracts import test_verifier as examples

decode = CodePoints().decode


def turn(text: str, code: str | None = None, shown: str = "") -> Turn:
    made = examples.turn(text, None if code is None else examples.printed(shown))
    return replace(made, calls=tuple(replace(call, arguments={"code": code}) for call in made.calls))


def attempt(*turns: Turn, answer: str | None = "42", verdict: Verdict = Verdict.RIGHT) -> Trajectory:
    facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
    outcome = Outcome(verdict=verdict, reward=1.0, extracted=answer, method="integer", format_facts=facts)
    return replace(examples.attempt(*turns), outcome=outcome)


@pytest.mark.parametrize("code", ["print(42)", "42", "print('the answer')\nprint(42)", "print( -4.2e1 );", "'42'"])
def test_a_program_that_only_prints_constants_is_told(code: str) -> None:
    assert prints_constants(attempt(turn("", code)))


@pytest.mark.parametrize("code", ["print(6*7)", "x=42\nprint(x)", "import math\nprint(3)", "print(f'{6*7}')", ""])
def test_a_program_that_computes_is_not(code: str) -> None:
    assert not prints_constants(attempt(turn("", code)))


def test_an_answer_from_a_tool_or_from_reasoning_is_founded() -> None:
    box = r"<answer>\boxed{42}</answer>"
    assert is_unfounded(attempt(turn(box)), decode)
    assert is_unfounded(attempt(turn("", "f()", "41\n"), turn(box)), decode)
    assert not is_unfounded(attempt(turn("", "f()", "42\n"), turn(box)), decode)
    assert not is_unfounded(attempt(turn(f"6 times 7 is 42. {box}")), decode)
    assert not is_unfounded(attempt(turn(r"so 1, 200 it is \boxed{1,200}"), answer="1,200"), decode)
    assert not is_unfounded(attempt(turn("?"), answer=None), decode)


def test_an_answer_of_the_other_sign_is_unfounded() -> None:
    def answered(printed: str, answer: str) -> bool:
        return is_unfounded(attempt(turn("", "f()", printed), turn(rf"\boxed{{{answer}}}"), answer=answer), decode)

    assert answered("-42\n", "42") and answered("4\n-42.0\n", "42.0") and answered("-1.5", "1.5")
    assert not answered("-42\n", "-42") and not answered("-42\n42\n", "42") and not answered("50-42", "42")
    assert not answered("-142\n", "42"), "only a part of a number"


def test_several_answers_are_told_from_one_that_is_a_list() -> None:
    assert gives_several_answers(attempt(turn(r"\boxed{41} or rather: no, it must surely be \boxed{42}")), decode)
    assert not gives_several_answers(attempt(turn(r"\boxed{42}, as said before and shown above: \boxed{42}")), decode)
    assert not gives_several_answers(attempt(turn(r"\boxed{3} and \boxed{4}")), decode)
    assert not gives_several_answers(attempt(turn("nothing")), decode)


def test_shares_are_of_right_attempts_alone() -> None:
    wrong = attempt(turn("", "print(42)"), turn(r"\boxed{42}"), verdict=Verdict.WRONG)
    guessed, honest = attempt(turn(r"\boxed{42}")), attempt(turn("", "f()", "42"), turn(r"\boxed{42}"))
    group = Group(problem=Problem(id="p", question="?", answer="42"), trajectories=(wrong, guessed, honest))
    found = suspicion([Resampled(group=group, choices=())], decode)
    assert found == {"suspect/constant_print": 0.0, "suspect/unfounded_answer": 0.5, "suspect/several_boxes": 0.0}
    nobody = Group(problem=group.problem, trajectories=(wrong,))
    assert suspicion([Resampled(group=nobody, choices=())], decode) == {}
