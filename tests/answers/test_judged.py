"""The grader on the pairs that one of us judged by hand; benchmarks/verify_agreement.py reports the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.answers.cases import Case, load_cases, pair_of
from rocstar.answers.grade import Grader
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.types import Verdict

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "answers_judged.jsonl"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader(SymbolicChecker(workers=1))
    yield grader


def cases_of(half: str) -> list[Case]:
    cases = load_cases(FILE, text="pred", expected="expected")
    return [case for case in cases if case.columns["half"] == half]


@pytest.mark.parametrize("half", ["dev", "held"])
def test_verdicts_are_those_of_a_careful_human(grader: Grader, half: str) -> None:
    cases = cases_of(half)
    verdicts = [grade.verdict for grade in grader.grade_now([pair_of(case) for case in cases])]
    agreed = [verdict is case.expected for verdict, case in zip(verdicts, cases, strict=True)]
    falsely_right = [
        verdict is Verdict.RIGHT and case.expected is Verdict.WRONG
        for verdict, case in zip(verdicts, cases, strict=True)
    ]
    assert sum(falsely_right) == 0
    assert sum(agreed) / len(cases) >= 0.95
