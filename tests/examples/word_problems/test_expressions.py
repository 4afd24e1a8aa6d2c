"""Arithmetic expressions: prefix text in, exact values and short Python out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from word_problems.expressions import (
    Constant,
    Exact,
    Operation,
    Slot,
    Tree,
    evaluate,
    exact,
    infix,
    literal,
    parse_prefix,
    python_output,
    slots,
    swapped,
)

TREES = st.recursive(
    st.builds(Slot, st.integers(0, 3)) | st.builds(Constant, st.integers(0, 9)),
    lambda parts: st.builds(Operation, st.sampled_from("+-*/"), parts, parts),
    max_leaves=5,
)


NUMBERS = st.tuples(*[st.integers(1, 20)] * 4)


def in_python(tree: Tree, numbers: Sequence[int]) -> str:
    return infix(tree, lambda slot: literal(numbers[slot]))


@pytest.mark.parametrize(
    ("prefix", "text", "value"),
    [
        ("- number0 number1", "8-4", 4),
        ("* number0 + number1 number2", "8*(4+6)", 80),
        ("+ number0 + number1 number2", "8+4+6", 18),
        ("/ number0 * number1 number2", "8/(4*6)", Fraction(1, 3)),
        ("* number0 / number2 number1", "8*6/4", 12),
        ("- number0 - number1 1.0", "8-(4-1)", 5),
        ("- + number0 number1 number2", "8+4-6", 6),
        ("/ + number0 number1 2.0", "(8+4)/2", 6),
        ("* number0 0.25", "8*0.25", 2),
        ("number2", "6", 6),
    ],
)
def test_prefix_becomes_python_with_few_brackets(prefix: str, text: str, value: Exact) -> None:
    tree = parse_prefix(prefix)
    assert in_python(tree, (8, 4, 6)) == text
    assert evaluate(tree, (8, 4, 6)) == value


@given(TREES, NUMBERS, st.randoms())
def test_text_and_swapped_operands_have_the_value_of_the_tree(
    tree: Tree, numbers: tuple[int, ...], rng: random.Random
) -> None:
    other = swapped(tree, lambda: rng.random() < 0.5)
    assert slots(other) == slots(tree)
    try:
        value = evaluate(tree, numbers)
    except ZeroDivisionError:
        return
    assert evaluate(other, numbers) == value
    assert float(python_output(in_python(tree, numbers))) == pytest.approx(float(value), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("prefix", "complaint"),
    [
        ("", "operand is missing"),
        ("+ number0", "operand is missing"),
        ("+ number0 number1 number2", "'number2' is left over"),
        ("^ number0 2", "'\\^' is not a decimal number"),
        ("+ number0 x", "'x' is not"),
    ],
)
def test_a_broken_equation_says_what_is_wrong(prefix: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_prefix(prefix)


def test_literals_are_written_as_read_but_whole_numbers_lose_their_point_and_endless_ones_end() -> None:
    for text in ("18", "28.3", "0.05", "-2", "-0.5", "0"):
        assert literal(exact(text)) == text
    assert literal(exact("18.0")) == "18" and literal(Fraction(56, 3)) == repr(56 / 3)


@pytest.mark.parametrize("text", ["__import__('os')", "2**9", "", "print(1)"])
def test_only_plain_arithmetic_is_worked_out(text: str) -> None:
    with pytest.raises(ValueError, match="not plain arithmetic"):
        python_output(text)
