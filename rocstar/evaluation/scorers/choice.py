"""Multiple choice in GPQA's columns: one right and three wrong answers, shown as A to D in an order derived from the
question, so that every subject and every resumed evaluation sees the same one. The letter in the box is compared;
without a box, the one announced by the last phrase ("Answer: C").

Source: GPQA (Rein et al. 2023) for the columns and the letters; the order by identity is ours."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rocstar.answers.extract import counts_as_cut, last_answer, written
from rocstar.answers.text import chosen_letter
from rocstar.answers.wording import clean
from rocstar.evaluation.benchmark import BenchmarkFile, Rows, column, lines
from rocstar.evaluation.scoring import Scorer, judged
from rocstar.types import Outcome, Problem, Trajectory, problem_id, seed_for

WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
LETTERS = "ABCD"
ASK = "The final answer is the letter of the right option."


def columns(file: BenchmarkFile) -> list[str]:
    return [file.question, file.answer, *WRONG]


def problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Raises DataError."""
    found = []
    for part, where, row in lines(rows, file.files):
        names = (file.question, file.answer, *WRONG)
        question, *options = (str(column(row, name, where)).strip() for name in names)
        order = random.Random(seed_for("options", question)).sample(range(len(options)), len(options))
        shown = "\n".join(f"{letter}) {options[place]}" for letter, place in zip(LETTERS, order, strict=True))
        question = f"{question}\n\n{shown}\n\n{ASK}"
        answer = LETTERS[order.index(0)]
        found.append(Problem(id=problem_id(question), question=question, answer=answer, source=part))
    return found


class ChoiceScorer(Scorer):
    def outcome(self, problem: Problem, attempt: Trajectory) -> Outcome:
        texts = written(self.codec, self.calls, attempt)
        if counts_as_cut(attempt, "wrong"):
            return judged(False, method="truncated", extracted=None, text="\n".join(texts))
        letter = chosen(texts)
        return judged(letter == problem.answer, method="letter", extracted=letter, text="\n".join(texts))


def chosen(texts: Sequence[str]) -> str | None:
    """The letter that an attempt (one text per turn) ends with; None if there is none."""
    letter = chosen_letter(clean(last_answer(texts, phrases=True) or ""))
    return letter if letter in tuple(LETTERS) else None
