import ast
import contextlib
import io
import random

import pytest

from rocstar.data.arithmetic import FAMILIES, Chain, Family, Operands, arithmetic_problems
from rocstar.errors import ConfigError
from rocstar.types import problem_id

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def run(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<cell>", "exec"), {})
    return out.getvalue().strip()


def run_chain(chain: Chain, family: Family, operands: Operands) -> str:
    output = ""
    for code in chain:
        output = run(code.format(**operands, **family.fragments(operands)).replace("{out}", output))
    return output


def draws(family: Family, count: int) -> list[Operands]:
    rng = random.Random(7)
    return [family.draw(rng) for _ in range(count)]


@every_family
def test_right_programs_print_the_reference_answer(family: Family) -> None:
    for operands in draws(family, 12):
        assert {run_chain(chain, family, operands) for chain in family.right} == {str(family.solve(operands))}


@every_family
def test_wrong_programs_run_and_are_nearly_never_right(family: Family) -> None:
    for chain in family.wrong:
        right = sum(run_chain(chain, family, o) == str(family.solve(o)) for o in draws(family, 100))
        assert right <= 10  # two small numbers do meet now and then


@every_family
def test_broken_programs_raise(family: Family) -> None:
    for operands in draws(family, 5):
        for code in family.broken:
            with pytest.raises((NameError, SyntaxError, TypeError)):
                run(code.format(**operands))


@every_family
def test_silent_programs_run_and_leave_neither_output_nor_value(family: Family) -> None:
    for operands in draws(family, 5):
        for code in family.silent:
            filled = code.format(**operands)
            assert run(filled) == ""
            assert isinstance(ast.parse(filled).body[-1], ast.Assign)


@every_family
def test_every_program_copies_each_operand_it_uses(family: Family) -> None:
    operands = draws(family, 1)[0]
    numbers = {str(value) for value in operands.values()}
    for chain in (*family.right, *family.wrong):
        fields = {**operands, **family.fragments(operands)}
        first = chain[0].format(**fields)
        assert any(number in first for number in numbers)
        assert family.name == "two" or all(number in first for number in numbers)


@every_family
def test_no_single_number_answers_many_problems(family: Family) -> None:
    answers = [problem.answer for problem in arithmetic_problems([family.name], 200, 0)]
    most_common = max(answers.count(answer) for answer in set(answers))
    assert most_common <= 20


def test_problems_are_distinct_take_turns_and_repeat_under_a_seed() -> None:
    problems = arithmetic_problems(["gcd", "fib"], 301, 3)
    assert len({problem.id for problem in problems}) == 301
    assert [problem.metadata["family"] for problem in problems[:4]] == ["gcd", "fib", "gcd", "fib"]
    assert problems == arithmetic_problems(["gcd", "fib"], 301, 3)
    assert problems != arithmetic_problems(["gcd", "fib"], 301, 4)


def test_excluded_problems_never_appear() -> None:
    heldout = {problem.id for problem in arithmetic_problems(list(FAMILIES), 300, 0)}
    training = {problem.id for problem in arithmetic_problems(list(FAMILIES), 300, 0, exclude=heldout)}
    assert len(training) == 300 and not training & heldout


def test_a_family_without_new_questions_says_so() -> None:
    asked = {problem_id(text.format(n=n)) for text in FAMILIES["primes"].phrasings for n in range(100, 10_000)}
    with pytest.raises(ConfigError, match="'primes' gave no new question"):
        arithmetic_problems(["primes"], 1, 0, exclude=asked)


def test_unknown_and_missing_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="'powmdo', which is unknown; the nearest is 'powmod'"):
        arithmetic_problems(["powmdo"], 1, 0)
    with pytest.raises(ConfigError, match="families is empty"):
        arithmetic_problems([], 1, 0)
