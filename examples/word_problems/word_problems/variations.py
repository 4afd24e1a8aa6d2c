"""Word problems drawn again: other numbers, swapped operands, sentences that do not matter.

Each variation is a function from a row to a row (or from rows to rows), so they combine freely; `Variation` says how
much of each the recipe wants. A varied row is consistent when the row was: its equation gives its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rocstar.types import Demonstration, Problem, seed_for
from word_problems.expressions import Exact, Tree, decimal_places, evaluate, operations, renumber, swapped
from word_problems.rows import MASK, Numbers, WordProblem, demonstrate, inline_program, to_problem

MAX_DRAWS = 200  # draws of numbers before a row stays as it is; nine rows in ten need fewer than twenty
MAX_NUMBERS = 8  # a question with more than this is left without distractor; the data has seven at most
MAX_DIGITS = 4  # of a number whose length is drawn anew
MAX_PLACES = 3  # a decimal with more is a rounded fraction (0.3333) and stays as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How training rows are varied; the defaults are the settings that were measured."""

    redraws: int = 24
    """Different drawings of each row's numbers; 0 keeps the numbers of the file."""
    original_share: float = 0.15
    """Share of drawings that keep the numbers of the file."""
    same_length_share: float = 0.6
    """Chance that a whole number keeps its count of digits; else 1 to 4 digits."""
    distractor_share: float = 0.0
    """Chance of one more sentence, from another row, whose numbers are not needed."""
    swap_share: float = 0.0
    """Chance, for each + and *, that its operands change places in the program."""


def training_rows(rows: Sequence[WordProblem], count: int, variation: Variation, seed: int) -> Iterator[WordProblem]:
    """`count` varied rows: shuffled passes over `rows`, each pass with the next drawing, from the first again after
    `variation.redraws` passes. Same seed, same rows; drawing d of row i never depends on `count`."""
    drawings = max(1, variation.redraws)
    for n in range(count):
        epoch, place = divmod(n, len(rows))
        if place == 0:
            order = random.Random(seed_for(seed, "epoch", epoch)).sample(range(len(rows)), len(rows))
        index = order[place]
        rng = random.Random(seed_for(seed, "variation", index, epoch % drawings))
        yield varied(rows[index], rows, variation, rng)


def training_demonstrations(
    rows: Sequence[WordProblem],
    count: int,
    *,
    numbers: Numbers,
    variation: Variation,
    seed: int,
    tool_name: str = "python",
    answer_share: float = 0.25,
    program: Callable[[WordProblem, Numbers], str] = inline_program,
) -> list[Demonstration]:
    """`count` demonstrations of consistent rows; `answer_share` of them go on to the answer turn. That turn must be
    shown from the start: taught later, in a phase of its own, copying into the box was not learned."""
    rng = random.Random(seed_for(seed, "answer turn"))
    return [
        demonstrate(row, program(row, numbers), numbers, tool_name=tool_name, answers=rng.random() < answer_share)
        for row in training_rows(rows, count, variation, seed)
    ]


def training_problems(
    rows: Sequence[WordProblem], count: int, *, numbers: Numbers, variation: Variation, seed: int
) -> list[Problem]:
    """`count` varied problems to roll out on."""
    return [to_problem(row, numbers) for row in training_rows(rows, count, variation, seed)]


def varied(row: WordProblem, donors: Sequence[WordProblem], variation: Variation, rng: random.Random) -> WordProblem:
    """One variation of a row: perhaps a distractor out of `donors`, then numbers, then operands."""
    if rng.random() < variation.distractor_share:
        row = with_distractor(row, rng.choice(donors), rng)
    if variation.redraws and rng.random() >= variation.original_share:
        row = with_redrawn_numbers(row, variation.same_length_share, rng)
    if variation.swap_share:
        row = replace(row, tree=swapped(row.tree, lambda: rng.random() < variation.swap_share))
    return row


def with_redrawn_numbers(row: WordProblem, same_length_share: float, rng: random.Random) -> WordProblem:
    """Other numbers of which the same story can be told: every intermediate value keeps its sign, divisions without
    remainder stay so, different numbers stay different and equal ones equal (the equations use slots of one value
    interchangeably, so drawing those apart would make labels wrong). The row itself when no such draw is found."""
    wanted = list(_facts(row.tree, row.numbers))
    for _ in range(MAX_DRAWS):
        numbers = _drawn(row.numbers, same_length_share, rng)
        if numbers is not None and _keeps(wanted, row.tree, numbers):
            return replace(row, numbers=numbers, answer=evaluate(row.tree, numbers))
    return row


def with_distractor(row: WordProblem, donor: WordProblem, rng: random.Random) -> WordProblem:
    """A sentence of `donor` that holds a number put in before the question; slots renumbered by order of appearance.
    The row itself when the donor has none, shares a number with the row, or the question would hold too many."""
    candidates = [sentence for sentence in _sentences(donor.template)[:-1] if MASK.search(sentence)]
    if not candidates:
        return row
    extra = rng.choice(candidates)
    extra_numbers = {donor.numbers[int(mask[1])] for mask in MASK.finditer(extra)}
    if extra_numbers & set(row.numbers) or len(row.numbers) + len(extra_numbers) > MAX_NUMBERS:
        return row
    own = len(row.numbers)
    shifted = MASK.sub(lambda mask: f"number{own + int(mask[1])}", extra)
    *story, question = _sentences(row.template)
    return renumbered(
        replace(row, template=" . ".join((*story, shifted, question)), numbers=row.numbers + donor.numbers)
    )


def asked_twice(row: WordProblem) -> WordProblem:
    """The last sentence first and last, so that a causal model reads the story knowing what is asked. For training and
    test rows alike; compare templates for duplicates before this, not after."""
    *story, question = _sentences(row.template)
    return replace(row, template=" . ".join((question, *story, question))) if story else row


def oversampled(rows: Sequence[WordProblem], times: int, min_operators: int = 2) -> list[WordProblem]:
    """Rows of at least `min_operators` operators `times` times each, the others once; order kept."""
    return [row for row in rows for _ in range(times if row.operators >= min_operators else 1)]


def _sentences(template: str) -> list[str]:
    return template.split(" . ")


def renumbered(row: WordProblem) -> WordProblem:
    """Slots numbered by order of appearance; numbers no mask refers to are left out."""
    order = list(dict.fromkeys(int(mask[1]) for mask in MASK.finditer(row.template)))
    new_index = {old: new for new, old in enumerate(order)}
    return replace(
        row,
        template=MASK.sub(lambda mask: f"number{new_index[int(mask[1])]}", row.template),
        numbers=tuple(row.numbers[old] for old in order),
        tree=renumber(row.tree, new_index.__getitem__),
    )


def _drawn(numbers: Sequence[Exact], same_length_share: float, rng: random.Random) -> tuple[Exact, ...] | None:
    """One draw for each different number; None when two of them came out equal."""
    new = {number: _another(number, same_length_share, rng) for number in dict.fromkeys(numbers)}
    return tuple(new[number] for number in numbers) if len(set(new.values())) == len(new) else None


def _another(number: Exact, same_length_share: float, rng: random.Random) -> Exact:
    """A number like this one. Decimals keep the count of digits before and after the point. 0 and 1 stay, because the
    words around them do ("1 pen", "1 dozen"), and so do negative numbers and rounded fractions."""
    places = decimal_places(number)
    if number < 0 or number in (0, 1) or places is None or places > MAX_PLACES:
        return number
    length = len(str(int(number * 10**places)))
    if places:
        return _decimal(length, places, rng)
    if rng.random() >= same_length_share:
        length = rng.randint(1, MAX_DIGITS)
    return rng.randrange(max(2, 10 ** (length - 1)), 10**length)


def _decimal(length: int, places: int, rng: random.Random) -> Exact:
    """A decimal of `length` digits, `places` of them after the point and the last one not 0."""
    while True:
        digits = rng.randrange(10 ** (length - 1), 10**length)
        if digits % 10:
            return Fraction(digits, 10**places)


def _facts(tree: Tree, numbers: Sequence[Exact]) -> Iterator[tuple[int, bool]]:
    """For each operation, parts before the whole: the sign of its value, and whether it divides without remainder.
    Raises ZeroDivisionError."""
    for operation in operations(tree):
        value = evaluate(operation, numbers)
        yield (value > 0) - (value < 0), operation.operator == "/" and value.denominator == 1


def _keeps(wanted: Sequence[tuple[int, bool]], tree: Tree, numbers: Sequence[Exact]) -> bool:
    """Whether other numbers leave the facts as they were; a division with remainder may lose it."""
    try:
        return all(
            sign == wanted_sign and (divides or not must_divide)
            for (sign, divides), (wanted_sign, must_divide) in zip(_facts(tree, numbers), wanted, strict=True)
        )
    except ZeroDivisionError:
        return False
