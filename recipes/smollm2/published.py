"""Questions that people wrote, with programs made from their published solutions: Tasks for these recipes.

`WordProblems` reads the CSV files of arkilpatel/SVAMP (MAWPS, ASDiv-A, SVAMP), whose equations become one-line
programs. `Gsm8k` reads openai/grade-school-math, whose calculator marks (`<<48/2=24>>`) become programs line by line,
with the sentence that each stands in as a comment. A question whose program does not print its published answer is not
demonstrated; it is still asked in RL.

`[data.options]`: `holdout` sets aside so many training questions to choose settings by, in place of test files;
`cold_start = "programs"` (the default) demonstrates the programs; `"form"` only how to call and to answer: its programs
have the question's numbers under signs drawn at random, so one in several is right by chance, and RL has to find out
which.
"""

from __future__ import annotations

import csv
import gzip
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence, Set
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Literal

from number_variants import other_numbers
from pydantic import BaseModel, ConfigDict, Field
from word_variants import Asked, Variants, value_of

from rocstar.config.sections import DataSection, TaskSection
from rocstar.data.demonstrations import work_out
from rocstar.data.problems import load_problems
from rocstar.data.rows import read_rows
from rocstar.dialogue.calls import HERMES, render_call
from rocstar.errors import ConfigError, DataError
from rocstar.protocols import Task
from rocstar.run.tasks import checked_options
from rocstar.types import Demonstration, DemoTurn, Problem, problem_id, seed_for

TOLERANCE = 1e-3  # relative; the CSV files round answers to three or four digits
MASK = re.compile(r"number(\d+)")
MARK = re.compile(r"<<([^<>=]+)=[^<>]*>>")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
WORKED = re.compile(r"(?:[$\d(][\d\s+\-*/x().,$%]*)?=\s*\$?\s*<<[^<>]*>>\s*[\d.,]*\d|<<[^<>]*>>\s*[\d.,]*\d")
OPERATORS = {"+": 1, "-": 1, "*": 2, "/": 2}
BACKWARDS = 0.25  # share of guesses that name the question's numbers from the last one on


class Options(BaseModel):
    """`[data.options]` of both Tasks."""

    model_config = ConfigDict(extra="forbid")

    holdout: int = Field(default=0, ge=0)
    """Questions of the training files that are set aside and evaluated in place of the test files; 0: none."""
    cold_start: Literal["programs", "form"] = "programs"
    """What SFT shows: programs made from the published solutions, or the questions' numbers under random signs."""
    variants: int = Field(default=0, ge=0)
    """Most variants of each question that has a program, of those set aside too: word problems asked in other ways
    (`word_variants.py`), questions of GSM8K with other numbers (`number_variants.py`)."""


class Published(Task):
    """Questions of files, and demonstrations made from their solutions (`Problem.metadata["program"]`)."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._data = data
        self._options = checked_options(Options, data)
        self._tool_name = tool_name
        self._seed = seed
        self._count = heldout

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        return [problem for problem in self._parts[0] if problem.id not in exclude]

    def heldout(self) -> list[Problem]:
        """The first `evaluate.problems` of the test questions, or of those set aside, in a seeded order."""
        files = self._data.test_files if isinstance(self._data, DataSection) else []
        if files and self._options.holdout:
            raise ConfigError("data.options.holdout replaces data.test_files; give one of them")
        found = self._read_all(files) if files else self._parts[1]
        order = list(found)
        random.Random(seed_for("heldout")).shuffle(order)
        return order[: self._count]

    def demonstrations(self, count: int) -> list[Demonstration]:
        rng, guesses = random.Random(seed_for(self._seed, "form")), self._options.cold_start == "form"
        pairs = [(one, _guess(one, rng) if guesses else str(one.metadata["program"])) for one in self._parts[0]]
        shown = [self._shown(problem, program) for problem, program in pairs if program]
        random.Random(seed_for(self._seed, "demonstrations")).shuffle(shown)
        return shown

    @abstractmethod
    def read(self, path: Path) -> Iterator[Problem]:
        """The problems of a file, each with its program in `metadata["program"]`, "" where there is none. Raises
        DataError."""

    @cached_property
    def _parts(self) -> tuple[list[Problem], list[Problem]]:
        """(to train on, set aside)."""
        if not self._data.train_files:
            raise ConfigError("data.train_files is empty; give the published training file")
        found = self._read_all(self._data.train_files)
        order = sorted(found, key=lambda problem: problem.id)
        aside = {p.id for p in random.Random(seed_for("aside")).sample(order, min(self._options.holdout, len(order)))}
        kept = self.with_variants([p for p in found if p.id not in aside], self._options.variants)
        trained = {problem.id for problem in kept}
        others = self.with_variants([p for p in found if p.id in aside], self._options.variants)
        return kept, [problem for problem in others if problem.id not in trained]

    def with_variants(self, found: list[Problem], most: int) -> list[Problem]:
        """The problems and at most so many variants of each. Raises ConfigError where a Task makes none."""
        if most:
            raise ConfigError(
                f"data.options.variants = {most}, but {type(self).__name__} makes no variants; leave it out"
            )
        return found

    def _read_all(self, paths: Sequence[str]) -> list[Problem]:
        return list({problem.id: problem for path in paths for problem in self.read(Path(path))}.values())

    def _shown(self, problem: Problem, program: str) -> Demonstration:
        text = render_call(self._tool_name, {"code": program})
        result = work_out(HERMES.parse(text, first_id=0)[0])
        answer = DemoTurn(text=f"<answer>\\boxed{{{result.stdout.strip()}}}</answer>")
        return Demonstration(problem=problem, turns=(DemoTurn(text=text, results=(result,)), answer))


class WordProblems(Published):
    """MAWPS, ASDiv-A and SVAMP as CSV."""

    def with_variants(self, found: list[Problem], most: int) -> list[Problem]:
        rng = random.Random(seed_for("variants", len(found)))
        draw = Variants([problem.question for problem in found])
        new = {problem.id: problem for problem in found}
        for problem in found if most else ():
            if program := str(problem.metadata["program"]):
                drawn = list(draw.of(Asked(problem.question, program[len("print(") : -1]), rng))
                for one in rng.sample(drawn, min(most, len(drawn))):
                    shown = f"print({one.expression})"
                    variant = _variant(one.question, shown, _run(shown))
                    new.setdefault(variant.id, variant)
        return list(new.values())

    def read(self, path: Path) -> Iterator[Problem]:
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rt", encoding="utf-8", newline="") as lines:
                for line, row in enumerate(csv.DictReader(lines), start=2):
                    yield _word_problem(row, f"{path}, line {line}")
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read as CSV: {error}; give a file of arkilpatel/SVAMP.") from error


class Gsm8k(Published):
    """GSM8K as JSONL, with its calculator marks."""

    def with_variants(self, found: list[Problem], most: int) -> list[Problem]:
        new = {problem.id: problem for problem in found}
        for problem in found if most else ():
            rng = random.Random(seed_for("variants", problem.id))
            for _ in range(most if problem.metadata["program"] else 0):
                if variant := _renumbered(problem, rng):
                    new.setdefault(variant.id, variant)
        return list(new.values())

    def read(self, path: Path) -> Iterator[Problem]:
        solutions = (str(row["answer"]) for _, row in read_rows(path))
        for problem, solution in zip(load_problems(path), solutions, strict=True):
            answer = problem.answer.replace(",", "")
            program = marked_program(problem.question, solution.partition("####")[0])
            yield Problem(
                id=problem.id,
                question=problem.question,
                answer=answer,
                source=problem.source,
                metadata={"program": program if _prints(program, answer) else ""},
            )


def _word_problem(row: dict[str, str], where: str) -> Problem:
    try:
        numbers = [_shortest(number) for number in row["Numbers"].split()]
        question = MASK.sub(lambda mask: numbers[int(mask[1])], row["Question"])
        program = f"print({infix(row['Equation'].split(), numbers)})"
        answer = _shortest(row["Answer"])
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{where}: no word problem of arkilpatel/SVAMP ({type(error).__name__}: {error})") from None
    return Problem(
        id=problem_id(question),
        question=question,
        answer=answer,
        source=where.rpartition("/")[2].partition(",")[0],
        metadata={"program": program if _prints(program, answer) else ""},
    )


def _variant(question: str, program: str, printed: str) -> Problem:
    return Problem(
        id=problem_id(question),
        question=question,
        answer=_shortest(printed),
        source="variant",
        metadata={"program": program},
    )


def _renumbered(problem: Problem, rng: random.Random) -> Problem | None:
    """A question with other numbers, whose program prints the answer exactly; None where none is found."""
    drawn = other_numbers(problem.question, str(problem.metadata["program"]), rng)
    printed = _run(drawn.program) if drawn else ""
    if drawn is None or printed in ("", problem.answer) or Fraction(printed) != drawn.answer:
        return None
    return _variant(drawn.question, drawn.program, printed)


def infix(prefix: Sequence[str], numbers: Sequence[str]) -> str:
    """`- number0 * number1 number2` -> `25000-1500*8`, with the fewest brackets that keep its meaning. Raises
    ValueError, IndexError."""
    text, _, rest = _infix(list(prefix), numbers)
    if rest:
        raise ValueError(f"the equation goes on after its end: {' '.join(rest)}")
    return text


def _infix(tokens: list[str], numbers: Sequence[str]) -> tuple[str, int, list[str]]:
    """Text, rank of its outermost operator (3 for a number), and the tokens that are left."""
    first, *rest = tokens
    if first not in OPERATORS:
        mask = MASK.fullmatch(first)
        return (numbers[int(mask[1])] if mask else _shortest(first)), 3, rest
    rank = OPERATORS[first]
    left, left_rank, rest = _infix(rest, numbers)
    right, right_rank, rest = _infix(rest, numbers)
    left = f"({left})" if left_rank < rank else left
    right = f"({right})" if right_rank < rank or (right_rank == rank and first in "-/") else right
    return f"{left}{first}{right}", rank, rest


def marked_program(question: str, solution: str) -> str:
    """The calculator marks of a solution as lines of Python: what each sentence says as a comment, each result under a
    name, which later lines use where its value stands and the question does not give that number. "" where a mark is
    no sum.

        Natalia sold 48/2 = <<48/2=24>>24 clips in May.          # Natalia sold clips in May.
                                                                  a = 48/2
    """
    given = {Fraction(number) for number in NUMBER.findall(question.replace(",", ""))}
    names: dict[Fraction, str] = {}
    lines: list[str] = []
    free = iter("abcdefghijklmnopqrstuvwxyz")
    name = ""
    for sentence in solution.strip().splitlines():
        marks = MARK.findall(sentence)
        lines += [f"# {_comment(sentence)}"] if marks else []
        for written in marks:
            expression = _tidy(written)
            value, name = value_of(expression), next(free, "")
            if value is None or not name:
                return ""
            named = NUMBER.sub(lambda number: _named(number[0], names, given), expression)
            lines.append(f"{name} = {named}")
            names[value] = name
    return "\n".join([*lines, f"print({name})"]) if name else ""


def _comment(sentence: str) -> str:
    """What a sentence says without its sums: the calculation before a mark and the number behind it are left out."""
    return re.sub(r"\s+", " ", WORKED.sub(" ", sentence)).strip()


def _tidy(expression: str) -> str:
    """Python for what stands in a mark: `1,000*.5` -> `1000*.5`, `20%*50` -> `20/100*50`."""
    plain = expression.replace(",", "").replace("$", "").replace("%", "/100").strip()
    return re.sub(r"(?<![\w.])0+(?=\d)", "", plain)


def _named(number: str, names: dict[Fraction, str], given: Set[Fraction]) -> str:
    value = Fraction(number)
    return number if value in given else names.get(value, number)


def _prints(program: str, answer: str) -> bool:
    """Whether the program, which is one of ours and holds sums only, prints the answer."""
    try:
        printed = Fraction(_run(program))
        expected = Fraction(answer)
    except ValueError:
        return False
    return abs(printed - expected) <= Fraction(TOLERANCE) * max(1, abs(expected))


def _run(program: str) -> str:
    return work_out(HERMES.parse(render_call("python", {"code": program}), first_id=0)[0]).stdout.strip()


def _shortest(number: str) -> str:
    """`25000.0` -> `25000`."""
    return number.rstrip("0").rstrip(".") if "." in number else str(int(number))


def _guess(problem: Problem, rng: random.Random) -> str:
    """A program of two or three of the question's numbers, mostly in their order, under signs drawn at random: how a
    question becomes a program, and nothing of which one is right. "" where the question gives fewer than two, or the
    program divides by 0."""
    given = NUMBER.findall(problem.question.replace(",", ""))
    count = min(len(given), rng.choice((2, 2, 2, 3)))
    if count < 2:
        return ""
    places = sorted(rng.sample(range(len(given)), count), reverse=rng.random() < BACKWARDS)
    first, *others = (_shortest(given[place]) for place in places)
    program = f"print({first}{''.join(rng.choice('+-*/') + number for number in others)})"
    return program if _run(program) else ""
