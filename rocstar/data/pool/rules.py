"""The rules that drop a row, and the decision about one row: by rules over the single row, the verifier, earlier rows
and the benchmarks.

A rule over the row is a small named function that returns its evidence, or None to keep the row. These rules are
heuristics over words; `docs/data.md` reports how often people agree with them. The last section checks a label against
other answers.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rocstar.data.pool.config import LimitsSection, PoolConfig
from rocstar.data.pool.overlap import BenchmarkIndex, QuestionIndex
from rocstar.data.pool.rewording import asked_for_integer, integer_of, same_form
from rocstar.data.problems import as_written
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import Problem, Stop, problem_id

SHOWN_CHARS = 60
COLUMNS = ("id", "question", "answers", "problem_id", "extracted", "stop")
"""All that is read of a file of answers; the attempts of an evaluation hold far more."""
SHOWN_ANSWERS, ANSWER_CHARS = 3, 40

Rule = Callable[[Problem, LimitsSection], str | None]

_DRAWING_CODE = re.compile(r"\[asy\]|\\begin\{(?:tikzpicture|picture)\}|\bdraw\s*\(")
_PICTURE_FILE = re.compile(r"!\[[^\]]*\]\([^)]*\)|\\includegraphics|<img\b", re.IGNORECASE)
_THING = r"(?:figures?|fig\.|diagrams?|pictures?|pictured|drawings?|illustrations?|images?|sketch)"
_PICTURE_WORDS = re.compile(
    rf"\b(?:in|on|from|of|by) (?:the|this|each|these) (?:\w+ )?{_THING}(?! of speech)\b"
    rf"|\bthe (?:\w+ )?{_THING} (?:\w+ )?(?:shows?|below|above|at|to the|on the|is|are|represents?)\b"
    rf"|\b{_THING} (?:\w+ )?(?:shown|below|above)\b"
    rf"|\b(?:shown|drawn|pictured|depicted|illustrated) (?:in|on) (?:the )?{_THING}\b"
    r"|\bas (?:shown|pictured|illustrated|depicted)(?! (?:by|that|in the (?:table|array|equation|example|list)))\b"
    r"|\bfig(?:ure|\.) ?\d|\b(?:pictured|depicted|illustrated) (?:below|above|here)\b"
    r"|\b(?:is|are) shown(?: (?:at|to|on) (?:the )?(?:right|left))?\.(?!\s*[|\\$])",
    re.IGNORECASE,
)
_TABLE = re.compile(r"\\begin\{(?:array|tabular|[bpv]?matrix)\}|\|\s*:?-{2,}|\btable\b", re.IGNORECASE)

_PROOF = re.compile(r"\b(?:prove|show|demonstrate|verify)(?: (?:also|directly|rigorously))? that\b", re.IGNORECASE)
_ASKS = re.compile(
    r"\b(?:find|determine|compute|calculate|evaluate|what|how (?:many|much|long|far|old|tall|often)|which|who|when|"
    r"give|simplify|solve|express|state|count|minimi[sz]e|maximi[sz]e|estimate|prove|is it|where is)\b|\?|_{2,}|\\_",
    re.IGNORECASE,
)
_PART = re.compile(
    r"(?:(?<=\s)|(?<=^)|(?<=\$)|(?<=[.;:]))\(?(?P<mark>[1-4]|[a-d]|i{1,3}|I{1,3})\s*[).]\$?(?=[\s\\$A-Z])"
)
_FOLLOWERS = ("1234", "abcd")

_LETTERS = re.compile(r"\\[A-Za-z]+|[^A-Za-z ]+")
_CHOICE = re.compile(r"\(?\s*[A-H]\s*\)?")
_PROSE = frozenset(
    ("yes", "no", "true", "false", "none", "proof", "impossible", "infinite", "infinitely", "cannot", "undefined")
)
_LISTED = re.compile(r"comma[- ]separated|separated by commas|separate[sd]? .{0,30}with commas", re.IGNORECASE)
_FIND_ALL = re.compile(r"\b(?:find|determine|list|give|what are) (?:\w+ )?all\b", re.IGNORECASE)
_SEVERAL = re.compile(r"\\text\{\s*(?:,\s*)?(?:and|or)\b|\b(?:and|or)\b|\\pm|\\cup|\\quad|\n\s*\S")
_SPACED = re.compile(r"\\left|\\right|\\[,;!: ]|\\begin\{[pb]?matrix\}|[\s$]")
_TOWER = re.compile(r"\d\)?\s*\^\s*(?:\{\s*\d+\s*\^|\{?\s*\d{3,})|\d{3,}\s*!|\d\s*!\s*\)\s*!")


def empty(problem: Problem, bounds: LimitsSection) -> str | None:
    """No real question: fewer than two letters or digits; or no answer."""
    if sum(char.isalnum() for char in problem.question) < 2:
        return f"the question is {problem.question!r}"
    return None if problem.answer.strip() else "the answer is empty"


def long_question(problem: Problem, bounds: LimitsSection) -> str | None:
    """Longer than a prompt may be."""
    length = len(problem.question)
    return f"{length} characters" if length > bounds.max_question_chars else None


def picture(problem: Problem, bounds: LimitsSection) -> str | None:
    """Refers to a missing picture. Drawing code ([asy], TikZ) counts as the picture, in a form a model can read."""
    if found := _PICTURE_FILE.search(problem.question):
        return f"shows {_shown(found.group())}"
    if _DRAWING_CODE.search(problem.question):
        return None
    found = _PICTURE_WORDS.search(problem.question)
    if found is None or (_TABLE.search(problem.question) and "table" not in found.group()):
        return None
    return f'says "{found.group().strip()}" and has no drawing'


def proof(problem: Problem, bounds: LimitsSection) -> str | None:
    """Asks for a proof and for no value."""
    found = _PROOF.search(problem.question)
    if found is None:
        return None
    rest = problem.question[: found.start()] + problem.question[found.end() :]
    return None if _ASKS.search(rest) else f'asks to "{found.group()}" and for no value'


def multi_part(problem: Problem, bounds: LimitsSection) -> str | None:
    """Asks two or more numbered questions, though the answer can belong to only one."""
    marks = [(found["mark"], found.start(), found.end()) for found in _PART.finditer(problem.question)]
    for first, second in itertools.pairwise(marks):
        if _follows(first[0], second[0]):
            end = next((start for mark, start, _ in marks if start > second[1]), len(problem.question))
            parts = problem.question[first[2] : second[1]], problem.question[second[2] : end]
            if all(_ASKS.search(part) for part in parts):
                return f'asks ({first[0]}) "{_shown(parts[0])}" and ({second[0]}) "{_shown(parts[1])}"'
    return None


def unverifiable(problem: Problem, bounds: LimitsSection) -> str | None:
    """The answer is prose, yes or no, or the letter of a choice: chance or wording would decide."""
    answer = problem.answer.strip().strip("$.")
    words = _LETTERS.sub(" ", answer.replace("\\text", " ")).split()
    bare = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*|[{}]", "", answer).strip()
    if _CHOICE.fullmatch(bare):
        return f"the answer is the letter {bare}"
    if {word.lower() for word in words} & _PROSE:
        return f'the answer is "{_shown(answer)}"'
    prose = [word for word in words if len(word) > 2]
    return f'the answer is the text "{_shown(answer)}"' if len(prose) > 3 else None


def composite(problem: Problem, bounds: LimitsSection) -> str | None:
    """Several values in one answer: a list, a tuple, an interval, plus-minus."""
    listed = _LISTED.search(problem.question) or _FIND_ALL.search(problem.question)
    if integer_of(problem.answer) is not None and not (listed and "," in problem.answer):
        return None
    if _SEVERAL.search(problem.answer) or _is_list(_SPACED.sub("", problem.answer.replace("{,}", ""))):
        return f'the answer "{_shown(problem.answer)}" has several parts'
    return None


def huge_answer(problem: Problem, bounds: LimitsSection) -> str | None:
    """An integer of very many digits, or a power or factorial that would: verifiers time out on these (paper §4.2)."""
    value = integer_of(problem.answer)
    digits = sum(char.isdigit() for char in problem.answer)
    if value is not None:
        return f"the answer has {digits} digits" if digits > bounds.max_answer_digits else None
    found = _TOWER.search(problem.answer)
    return f'the answer "{_shown(problem.answer)}" holds a huge number' if found else None


def not_integer(problem: Problem, bounds: LimitsSection) -> str | None:
    """The answer is not a single integer (paper §4.2 keeps only integers, because they are verified reliably)."""
    value = integer_of(problem.answer)
    return f'the answer is "{_shown(problem.answer)}"' if value is None else None


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (empty, long_question, picture, proof, multi_part, unverifiable, composite, huge_answer, not_integer)
}
"""By name, in the order in which they are applied; the first that returns evidence drops the row."""


def _follows(first: str, second: str) -> bool:
    """1 then 2, a then b, i then ii."""
    if set(first.lower()) == {"i"} and first[0] == second[0]:
        return len(second) == len(first) + 1
    return any(first + second in order for order in _FOLLOWERS)


def _is_list(answer: str) -> bool:
    """A comma or semicolon outside all brackets, or right inside those that enclose the whole."""
    depth, commas, closes_early = 0, set(), False
    for place, char in enumerate(answer):
        depth += (char in "([{") - (char in ")]}")
        closes_early |= depth == 0 and place < len(answer) - 1
        if char in ",;":
            commas.add(depth)
    return 0 in commas or (1 in commas and not closes_early and answer[:1] in ("(", "[", "{", "\\"))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


LATER_RULES = (
    "gold_refused",
    "conflicting_labels",
    "duplicate",
    "near_duplicate",
    "benchmark_question",
    "benchmark_overlap",
    "disagreement",
)
RULE_NAMES = ("bad_row", *RULES, *LATER_RULES)
"""All reasons to drop a row, in the order in which they are looked for."""

Check = Callable[[str, str], tuple[bool, str]]
"""(reference, a full response) -> (whether the verifier calls it right, how it decided)."""


Drop = tuple[str, str]
"""(one of RULE_NAMES, evidence: for people, what was found, and where)."""


@dataclass(slots=True, kw_only=True)
class Judges:
    """Decides about each row. Rows must come in order: of two equal ones the first is kept."""

    config: PoolConfig
    check: Check
    """The verifier."""
    seen: QuestionIndex
    benchmarks: BenchmarkIndex
    conflicts: dict[str, str] = field(default_factory=dict)
    """Name of a kept row -> evidence that its question has another label elsewhere; filled while judging."""

    def judge(self, published: Problem) -> tuple[Problem, Drop | None]:
        """The problem for the pool, and the reason if it is dropped."""
        problem = published
        for rule, evidence_of in RULES.items():
            if rule == "not_integer":
                problem = self._with_integer(problem)
            if self._holds(rule) and (evidence := evidence_of(problem, self.config.limits)):
                return problem, (rule, evidence)
        # The sentence that asks for an integer occurs in many questions and must not make them similar.
        repeated = self._repeated(published)
        return problem, self._refused(problem) or repeated or self._overlapping(problem)

    def late(self, problem: Problem) -> Drop | None:
        """Why a row that was kept so far is dropped now; call it when all rows were judged."""
        evidence = self.conflicts.get(problem.place)
        return self._drop("conflicting_labels", evidence) if evidence else None

    def _holds(self, rule: str) -> bool:
        return rule not in self.config.rules.skip

    def _drop(self, rule: str, evidence: str) -> Drop | None:
        return (rule, evidence) if self._holds(rule) else None

    def _with_integer(self, problem: Problem) -> Problem:
        """With plain digits if the answer is an integer, with a question for one if possible, else unchanged."""
        value = integer_of(problem.answer)
        if value is not None:
            return replace(problem, answer=str(value)) if self._holds("not_integer") else problem
        return (asked_for_integer(problem) if self.config.rewrite.fractions_and_roots else None) or problem

    def _refused(self, problem: Problem) -> Drop | None:
        accepted, method = self.check(problem.answer, f"\\boxed{{{problem.answer}}}")
        if accepted:
            return None
        return self._drop("gold_refused", f'the verifier refuses "{problem.answer[:80]}" as its own answer ({method})')

    def _repeated(self, problem: Problem) -> Drop | None:
        name, answer = problem.place, problem.answer
        match = self.seen.add(problem.question, answer, name, form=same_form(answer))
        if match is None:
            return None
        if not match.exact:
            return self._drop("near_duplicate", match.evidence)
        # Where only integers, fractions and roots are left, two answers of different form are never equal.
        same = match.same_answer or (
            not self._holds("not_integer") and self.check(match.answer, f"\\boxed{{{answer}}}")[0]
        )
        if same and match.name not in self.conflicts:
            return self._drop("duplicate", match.evidence)
        if not same:
            self.conflicts.setdefault(
                match.name, f"{name} has the same text and the answer {answer}, not {match.answer}"
            )
            return self._drop(
                "conflicting_labels", f"{match.name} has the same text and the answer {match.answer}, not {answer}"
            )
        return self._drop("conflicting_labels", f"same text as {match.name}; {self.conflicts[match.name]}")

    def _overlapping(self, problem: Problem) -> Drop | None:
        overlap = self.benchmarks.find(problem.question)
        if overlap is None:
            return None
        return self._drop("benchmark_question" if overlap.exact else "benchmark_overlap", overlap.evidence)


# -- the label against other answers -----------------------------------------------------------------------------------


class AnswerBook:
    """Answers by problem, in an SQLite file, so that memory does not grow with them. They come from files: those that
    `rocstar eval` keeps of its attempts, or rows that anybody wrote."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; CREATE TABLE said (id TEXT, answer TEXT);"
        )

    def read(self, answers: Path) -> int:
        """Read a file of {"id" or "question", "answers": [text, ...]}, or the attempts of an evaluation, of which those
        that ended by a fault are no answers; several rows of one problem add up. Returns the number of rows.

        Raises DataError naming file, line and field."""
        rows = 0
        self._database.execute("BEGIN")
        for line, row in read_rows(answers, COLUMNS):
            where = f"{answers}, line {line}"
            asked = row.get("question")
            name = row.get("id") or row.get("problem_id") or (problem_id(asked.strip()) if asked else None)
            if name is None:
                raise DataError(f'{where}: no field "id" or "question"; each row says which problem it answers.')
            given = _of_attempt(row) if "extracted" in row else row.get("answers")
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise DataError(f'{where}, field "answers": expected a list of texts, got {as_written(given)}.')
            self._database.executemany("INSERT INTO said VALUES (?, ?)", [(name, text) for text in given])
            rows += 1
        self._database.execute("COMMIT")
        self._database.execute("CREATE INDEX IF NOT EXISTS said_id ON said (id)")
        return rows

    def answers(self, name: str) -> list[str]:
        """The answers to the problem of that id, in the order of the files."""
        return [
            text for (text,) in self._database.execute("SELECT answer FROM said WHERE id = ? ORDER BY rowid", (name,))
        ]

    def close(self) -> None:
        self._database.close()


def _of_attempt(row: Mapping[str, Any]) -> list[str]:
    """The answer of an attempt, in the box in which a response would hold it; an attempt may end without one."""
    if row.get("stop") == Stop.ENVIRONMENT_FAILED:
        return []
    return ["" if row["extracted"] is None else f"\\boxed{{{row['extracted']}}}"]


def disagreement(
    gold: str, said: Sequence[str], least: int, agrees: Callable[[str, str], tuple[bool, str]]
) -> str | None:
    """Evidence that fewer than `least` of the answers equal the label, which is then likely wrong; None if enough do.
    Source: paper §4.2 (2 of 16 must agree)."""
    wrong: Counter[str] = Counter()
    right = 0
    for text in said:
        accepted, _ = agrees(gold, text)
        right += accepted
        if right >= least:
            return None
        if not accepted:
            wrong[" ".join(text[-ANSWER_CHARS:].split())] += 1
    others = "; ".join(f"{count} x {text!r}" for text, count in wrong.most_common(SHOWN_ANSWERS))
    return (
        f"{right} of {len(said)} answers equal the label {gold}, at least {least} must; others end with {others or '-'}"
    )
