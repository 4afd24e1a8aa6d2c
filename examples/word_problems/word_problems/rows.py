"""Word problems with their numbers kept apart: read, checked, written out as problems and as demonstrations.

The files are CSV (plain or gzip) as arkilpatel/SVAMP publishes MAWPS, ASDiv-A and SVAMP: columns Question (with
number0, number1 ... in place of numbers), Numbers, Equation (prefix) and Answer; other columns are ignored.

A question is shown in one of two ways, and figures of the two must not be mixed:

    digits   "tom has 18 pens ..."   print(18-4)    what an agent meets; the model also sees how large numbers are
    masked   "tom has n0 pens ..."   print(n0-n1)   what the published solvers see

In masked form the call is the model's own program still, run as it was written, after the line `given(problem)` which
assigns n0, n1 ...: like a worksheet that says "n0 and n1 are given" (`environment.py`).

Not here: drawing the numbers again and other variations (`variations.py`).
"""

from __future__ import annotations

import csv
import gzip
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO, TypeVar

from rocstar.dialogue.calls import render_call
from rocstar.errors import DataError
from rocstar.types import Demonstration, DemoTurn, Problem, Status, ToolResult, problem_id, seed_for
from word_problems.expressions import (
    Exact,
    Tree,
    evaluate,
    exact,
    infix,
    literal,
    operations,
    parse_prefix,
    python_output,
    slots,
)

T = TypeVar("T")
Numbers = Literal["digits", "masked"]

COLUMNS = ("Question", "Numbers", "Equation", "Answer")
ANSWER_TOLERANCE = 1e-3  # relative; the files round answers to three or four digits
MASK = re.compile(r"number(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    template: str
    """The question in lower case, number0, number1 ... standing for its numbers; also its name when looking for
    duplicates."""
    numbers: tuple[Exact, ...]
    """What the masks stand for; one for each mask in the question, used or not."""
    tree: Tree
    """The equation over those numbers."""
    answer: Exact
    """The file's answer."""
    source: str = ""
    """File name without its endings."""

    @property
    def value(self) -> Exact | None:
        """What the equation gives; None when it divides by zero."""
        try:
            return evaluate(self.tree, self.numbers)
        except ZeroDivisionError:
            return None

    @property
    def is_consistent(self) -> bool:
        """The equation gives the answer, up to the rounding of the file."""
        value = self.value
        if value is None:
            return False
        return abs(float(value - self.answer)) <= ANSWER_TOLERANCE * max(1.0, abs(float(value)))

    @property
    def operators(self) -> int:
        """Operators in the equation."""
        return sum(1 for _ in operations(self.tree))

    @property
    def unused_numbers(self) -> int:
        """Numbers of the question that the equation does not need."""
        return len(self.numbers) - len(slots(self.tree))


def read_word_problems(path: Path) -> list[WordProblem]:
    """Every row of one file, inconsistent ones included (see `consistent`). Raises DataError naming file, line and
    field."""
    try:
        with _opened(path) as lines:
            return list(_rows(path, lines))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}; give a plain or gzip CSV file in UTF-8.") from error


def consistent(rows: Iterable[WordProblem]) -> list[WordProblem]:
    """The rows that can teach: their equation gives their answer. The caller reports how many were left out."""
    return [row for row in rows if row.is_consistent]


def held_out(rows: Sequence[WordProblem], count: int, seed: int) -> tuple[list[WordProblem], list[WordProblem]]:
    """(training rows, development rows): `count` questions set aside, one row each; rows that repeat a question set
    aside are in neither part. Raises ValueError when there are not more than `count` different questions."""
    keys = sorted({row.template for row in rows})
    if count >= len(keys):
        raise ValueError(
            f"data.options.holdout {count} leaves nothing to train on; the files hold {len(keys)} questions"
        )
    aside = set(random.Random(seed_for(seed, "holdout")).sample(keys, count))
    first = {row.template: row for row in reversed(rows) if row.template in aside}
    return [row for row in rows if row.template not in aside], [first[key] for key in sorted(aside)]


def to_problem(row: WordProblem, numbers: Numbers = "digits") -> Problem:
    """A row as a problem.

    Answer: the equation's value where that agrees with the file (which rounds), else the file's. Metadata: `template`,
    `operators`, `unused_numbers`; when masked, also `given`."""
    question = shown(row, numbers)
    prelude = _assignments(row.numbers) if numbers == "masked" else ""
    metadata: dict[str, object] = {
        "template": row.template,
        "operators": row.operators,
        "unused_numbers": row.unused_numbers,
    }
    if prelude:
        metadata["given"] = prelude
    return Problem(
        id=problem_id(prelude + question),
        question=question,
        answer=literal(row.value if row.value is not None and row.is_consistent else row.answer),
        source=row.source,
        metadata=metadata,
    )


def given(problem: Problem) -> str:
    """The line to run before every program for this problem: `n0=18;n1=4` and a line end; empty for other problems."""
    return str(problem.metadata.get("given", ""))


def shown(row: WordProblem, numbers: Numbers) -> str:
    """The question as the model reads it."""
    names = [_slot_name(index) if numbers == "masked" else literal(value) for index, value in enumerate(row.numbers)]
    return MASK.sub(lambda mask: names[int(mask[1])], row.template)


def inline_program(row: WordProblem, numbers: Numbers) -> str:
    """The equation in one print: `print(8*(4+6))` or, masked, `print(n0*(n1+n2))`."""
    return f"print({infix(row.tree, lambda index: _written(row, index, numbers))})"


def bound_program(row: WordProblem, numbers: Numbers) -> str:
    """The same after listing all numbers: `n0=8;n1=4;n2=6` on a line, then `print(n0*(n1+n2))`. Masked numbers are
    bound already, so then it is the inline program."""
    listing = _assignments(row.numbers) if numbers == "digits" else ""
    return listing + inline_program(row, "masked")


def demonstrate(
    row: WordProblem, program: str, numbers: Numbers, *, tool_name: str = "python", answers: bool = True
) -> Demonstration:
    """One call of `program`, then, if `answers`, a turn that copies its output into a box.

    The output is worked out here rather than run: every program of a row is the same sum, and a bank of seventy
    thousand would cost minutes in the sandbox. Tests compare it with real runs. The row must be consistent."""
    output = python_output(infix(row.tree, lambda index: literal(row.numbers[index])))
    result = ToolResult(call_id="call_0", status=Status.OK, stdout=output + "\n")
    call = DemoTurn(text=render_call(tool_name, {"code": program}), results=(result,) if answers else ())
    final = DemoTurn(text=f"<answer>\\boxed{{{output}}}</answer>")
    return Demonstration(problem=to_problem(row, numbers), turns=(call, final) if answers else (call,))


def _written(row: WordProblem, index: int, numbers: Numbers) -> str:
    return _slot_name(index) if numbers == "masked" else literal(row.numbers[index])


def _slot_name(index: int) -> str:
    return f"n{index}"


def _assignments(numbers: Sequence[Exact]) -> str:
    return ";".join(f"{_slot_name(index)}={literal(value)}" for index, value in enumerate(numbers)) + "\n"


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with (gzip.open if packed else open)(path, "rt", encoding="utf-8", newline="") as lines:
        yield lines


def _rows(path: Path, lines: TextIO) -> Iterator[WordProblem]:
    reader = csv.DictReader(lines)
    for column in COLUMNS:
        if column not in (reader.fieldnames or ()):
            raise _bad(path, 1, column, "is missing among the columns")
    for record in reader:
        yield _row(path, reader.line_num, record)


def _row(path: Path, line: int, record: Mapping[str, str | None]) -> WordProblem:
    cells = {column: (record[column] or "").strip() for column in COLUMNS}
    template = cells["Question"].lower()
    numbers = tuple(_checked(path, line, "Numbers", exact, text) for text in cells["Numbers"].split())
    masks = {int(mask[1]) for mask in MASK.finditer(template)}
    if not template or masks != set(range(len(numbers))):
        raise _bad(path, line, "Question", f"must mask all {len(numbers)} entries of Numbers as number0, number1 ...")
    tree = _checked(path, line, "Equation", parse_prefix, cells["Equation"])
    if not slots(tree) <= masks:
        raise _bad(path, line, "Equation", f"uses number{max(slots(tree))}, but Numbers lists {len(numbers)}")
    answer = _checked(path, line, "Answer", exact, cells["Answer"])
    name = path.name.split(".")[0]
    return WordProblem(template=template, numbers=numbers, tree=tree, answer=answer, source=name)


def _checked(path: Path, line: int, field: str, read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise _bad(path, line, field, f"cannot be read: {error}") from error


def _bad(path: Path, line: int, field: str, complaint: str) -> DataError:
    return DataError(f"{path}, line {line}, field {field} {complaint}.")
