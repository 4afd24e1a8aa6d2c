"""Arithmetic expressions of word problems: prefix text to tree, exact value, Python text with few brackets.

Four operators, constants and numbered slots; nothing here knows about questions. Values are exact (int or Fraction),
so that "the equation gives the answer" and "this division has no remainder" are facts and not roundings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

Exact = int | Fraction
"""An exact number; an int whenever it is whole."""

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_SLOT = re.compile(r"number(\d+)")
_LITERAL = re.compile(r"-?\d+(\.\d+)?")
_ARITHMETIC = re.compile(r"[\d.+\-*/() ]+")


@dataclass(frozen=True, slots=True)
class Slot:
    index: int
    """Which number of the problem stands here, from 0."""


@dataclass(frozen=True, slots=True)
class Constant:
    value: Exact
    """A number the question implies, such as the 12 of a dozen."""


@dataclass(frozen=True, slots=True)
class Operation:
    operator: str
    """One of + - * /."""
    left: Tree
    right: Tree


Tree = Slot | Constant | Operation


def exact(text: str) -> Exact:
    """The exact value of a decimal literal; `18.0` is the int 18. Raises ValueError for anything else."""
    if not _LITERAL.fullmatch(text):
        raise ValueError(f"{text!r} is not a decimal number")
    return whole(Fraction(text))


def whole(value: Exact) -> Exact:
    """The same number, as int when it is whole."""
    return value.numerator if value.denominator == 1 else value


def literal(value: Exact) -> str:
    """A number as a person writes it: `18`, `28.3`, a leading minus below zero; seventeen digits where its decimals
    never end."""
    if value.denominator == 1:
        return str(value.numerator)
    places = decimal_places(value)
    if places is None:
        return repr(float(value))
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def decimal_places(value: Exact) -> int | None:
    """Digits after the point that the number needs; None when they never end."""
    denominator, counts = value.denominator, []
    for prime in (2, 5):
        count = 0
        while denominator % prime == 0:
            denominator //= prime
            count += 1
        counts.append(count)
    return max(counts) if denominator == 1 else None


def parse_prefix(text: str) -> Tree:
    """The tree of prefix text such as `- * number0 number1 3.0`. Raises ValueError that says what is wrong."""
    tokens = iter(text.split())
    tree = _parse(tokens)
    rest = list(tokens)
    if rest:
        raise ValueError(f"{' '.join(rest)!r} is left over")
    return tree


def evaluate(tree: Tree, numbers: Sequence[Exact]) -> Exact:
    """The exact value with `numbers` in the slots. Raises ZeroDivisionError."""
    if isinstance(tree, Slot):
        return numbers[tree.index]
    if isinstance(tree, Constant):
        return tree.value
    return apply(tree.operator, evaluate(tree.left, numbers), evaluate(tree.right, numbers))


def apply(operator: str, left: Exact, right: Exact) -> Exact:
    """One exact operation. Raises ZeroDivisionError."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return whole(Fraction(left) / right)


def infix(tree: Tree, name: Callable[[int], str]) -> str:
    """Python text with only the brackets that mathematics needs: `8*(4+6)`, `9-(4-1)`, but `2+3+4` for `2+(3+4)`.
    `name` gives the text of a slot."""
    if isinstance(tree, Slot):
        return name(tree.index)
    if isinstance(tree, Constant):
        return literal(tree.value)
    left, right = infix(tree.left, name), infix(tree.right, name)
    if _rank(tree.left) < PRECEDENCE[tree.operator]:
        left = f"({left})"
    if _rank(tree.right) < PRECEDENCE[tree.operator] + (tree.operator in "-/"):
        right = f"({right})"
    return f"{left}{tree.operator}{right}"


def python_output(expression: str) -> str:
    """What `print(expression)` prints, for text from `infix` with literals in the slots: `22`, `2.0`, `0.1`.

    Python itself does the sum, because its floats depend on the order in which the text is read. Raises ValueError
    for text that holds anything but digits, points, brackets and the four operators."""
    if not _ARITHMETIC.fullmatch(expression) or "**" in expression:
        raise ValueError(f"{expression!r} is not plain arithmetic")
    return str(eval(expression, {"__builtins__": {}}))


def slots(tree: Tree) -> frozenset[int]:
    """The slots that occur."""
    if isinstance(tree, Slot):
        return frozenset({tree.index})
    if isinstance(tree, Constant):
        return frozenset()
    return slots(tree.left) | slots(tree.right)


def operations(tree: Tree) -> Iterator[Operation]:
    """Every operation, parts before the whole."""
    if isinstance(tree, Operation):
        yield from operations(tree.left)
        yield from operations(tree.right)
        yield tree


def renumber(tree: Tree, new_index: Callable[[int], int]) -> Tree:
    """The same tree over other slot numbers."""
    if isinstance(tree, Slot):
        return Slot(new_index(tree.index))
    if isinstance(tree, Constant):
        return tree
    return Operation(tree.operator, renumber(tree.left, new_index), renumber(tree.right, new_index))


def swapped(tree: Tree, swap: Callable[[], bool]) -> Tree:
    """The same value written differently: the operands of each + and * change places where `swap()` says so."""
    if not isinstance(tree, Operation):
        return tree
    left, right = swapped(tree.left, swap), swapped(tree.right, swap)
    if tree.operator in "+*" and swap():
        left, right = right, left
    return Operation(tree.operator, left, right)


def _parse(tokens: Iterator[str]) -> Tree:
    token = next(tokens, None)
    if token is None:
        raise ValueError("an operand is missing at the end")
    if token in PRECEDENCE:
        return Operation(token, _parse(tokens), _parse(tokens))
    slot = _SLOT.fullmatch(token)
    return Slot(int(slot[1])) if slot else Constant(exact(token))


def _rank(tree: Tree) -> int:
    return PRECEDENCE[tree.operator] if isinstance(tree, Operation) else 3
