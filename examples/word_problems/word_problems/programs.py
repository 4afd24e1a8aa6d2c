"""Word-problem programs that leave the order of two numbers to Python.

    18-4   abs(18-4)            4/20   max(4,20)/min(4,20)          4+18, 18+4   both 4+18 (the order of the question)

Counts are not negative and shares of a whole come out even, so a program can do without knowing which number is the
larger. A masked model cannot see that, and an equation, which is what published solvers write, cannot say it.
"""

from __future__ import annotations

from collections.abc import Callable

from word_problems.expressions import Operation, Slot, Tree, evaluate, infix, literal
from word_problems.rows import Numbers, WordProblem


def unordered_program(row: WordProblem, numbers: Numbers) -> str:
    """The equation in one print; what it prints is what the equation gives, digit for digit."""
    names = [f"n{index}" if numbers == "masked" else literal(value) for index, value in enumerate(row.numbers)]

    def named(text: str) -> Slot:
        names.append(text)
        return Slot(len(names) - 1)

    return f"print({infix(_unordered(row, row.tree, names, named), names.__getitem__)})"


def _unordered(row: WordProblem, tree: Tree, names: list[str], named: Callable[[str], Slot]) -> Tree:
    """The tree with operations on two numbers rewritten; `named` turns text into something to put into a tree."""
    if not isinstance(tree, Operation):
        return tree
    left, right = tree.left, tree.right
    if not (isinstance(left, Slot) and isinstance(right, Slot)):
        return Operation(tree.operator, _unordered(row, left, names, named), _unordered(row, right, names, named))
    first, second = sorted((left.index, right.index))
    value = evaluate(tree, row.numbers)
    if tree.operator in "+*":
        return Operation(tree.operator, Slot(first), Slot(second))
    if tree.operator == "-" and value >= 0:
        return named(f"abs({names[first]}-{names[second]})")
    if tree.operator == "/" and value.denominator == 1 and value > 0 and min(row.numbers) > 0:
        pair = f"{names[first]},{names[second]}"
        return Operation("/", named(f"max({pair})"), named(f"min({pair})"))
    return tree
