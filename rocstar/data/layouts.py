"""From a row of somebody's layout to a Problem: which columns hold the question and the reference answer.

Known layouts: plain question and answer, TRL, verl, SkyRL, slime. A layout is recognised by the columns that only it
has. Three shapes of an answer are reduced to the answer: a GSM8K solution ending in `#### 18`, a solution that is more
than its last box, and `$...$`. Reading files is in `rows.py`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocstar.errors import DataError
from rocstar.types import Problem, problem_id

QUESTION_SYNONYMS = ("problem", "Question", "prompt")
ANSWER_SYNONYMS = ("Answer", "final_answer", "target")
STORIES = ("Body", "body")
"""Columns of the story that a question asks about (SVAMP, ASDiv): without it the question is no problem."""

SHOWN_CHARS = 40  # of a value that is complained about
_GSM8K_MARK = "####"
_BOX = "\\boxed{"

Row = Mapping[str, Any]


class EmptyField(DataError):
    """A question or an answer that is there but holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where a Problem is found in a row; a dot steps into a nested column."""

    layout: str
    """Name of the layout, or `given` where a person named the columns."""
    question: tuple[str, ...]
    """Columns joined by a space; those that are empty in a row are left out."""
    answer: str | None
    """None: the rows are asked for their questions only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    name: str
    sign: tuple[str, ...]
    """A row with one of these columns is of this layout."""
    questions: tuple[str, ...]
    """Columns that may hold the question, the best first."""
    answers: tuple[str, ...]
    """Columns that may hold the answer, the best first."""


# verl and SkyRL put instructions into the prompt and, as a rule, the bare question into extra_info.
LAYOUTS = (
    Layout(
        name="verl",
        sign=("reward_model.ground_truth",),
        questions=("extra_info.question", "prompt"),
        answers=("reward_model.ground_truth",),
    ),
    Layout(
        name="skyrl",
        sign=("reward_spec.ground_truth", "env_class"),
        questions=("extra_info.question", "prompt"),
        answers=("reward_spec.ground_truth", "reward_model.ground_truth"),
    ),
    Layout(name="slime", sign=("label",), questions=("prompt", "question", "input"), answers=("label",)),
    Layout(
        name="plain",
        sign=("question",),
        questions=("question",),
        answers=("answer", *ANSWER_SYNONYMS, "ground_truth", "solution"),
    ),
    Layout(
        name="trl", sign=("prompt",), questions=("prompt",), answers=("solution", "ground_truth", "answer", "label")
    ),
    Layout(
        name="plain",
        sign=("problem", "Question"),
        questions=("problem", "Question"),
        answers=("answer", *ANSWER_SYNONYMS, "ground_truth", "solution"),
    ),
)
LAYOUT_NAMES = tuple(dict.fromkeys(layout.name for layout in LAYOUTS))


def detect_columns(row: Row, *, where: str, layout: str = "auto", needs_answer: bool = True) -> Columns:
    """The columns of the named layout, or of the one whose sign the row carries. Raises DataError with the columns
    that are there; `where` names file and line. Source: ours."""
    for known in LAYOUTS:
        if layout == known.name or (layout == "auto" and any(_has(row, sign) for sign in known.sign)):
            question = next((name for name in known.questions if _has(row, name)), None)
            answer = next((name for name in known.answers if _has(row, name)), None)
            if question and (answer or not needs_answer):
                return Columns(layout=known.name, question=with_story(row, question), answer=answer)
    tried = "any known layout" if layout == "auto" else f"layout {layout}"
    raise DataError(
        f"{where}: the fields {', '.join(map(str, row)) or '(none)'} do not fit {tried} "
        f"({', '.join(LAYOUT_NAMES)}); name the fields that hold question and answer."
    )


def with_story(row: Row, question: str) -> tuple[str, ...]:
    """The column of the question, after that of its story where the row has one."""
    story = next((name for name in STORIES if _has(row, name)), None)
    return (story, question) if story else (question,)


def problem_of(row: Row, columns: Columns, *, where: str, source: str, line: int) -> Problem:
    """The Problem of a row; what is in no named column goes into `metadata`, with the line as "line". Raises DataError
    naming file, line and field."""
    parts = [_question_part(row, name, where, required=len(columns.question) == 1) for name in columns.question]
    question = " ".join(part for part in parts if part)
    if not question:
        raise EmptyField(f"{where}, fields {', '.join(columns.question)}: all empty, expected a text.")
    answer = "" if columns.answer is None else answer_text(row, columns.answer, where)
    used = {name.partition(".")[0] for name in (*columns.question, columns.answer or "")}
    others = {name: value for name, value in row.items() if name not in used}
    return Problem(
        id=problem_id(question), question=question, answer=answer, source=source, metadata=others | {"line": line}
    )


def answer_text(row: Row, name: str, where: str) -> str:
    """The reference answer as text; 8.0 is "8". Raises DataError."""
    gold = _text(value_at(row, name, where), f'{where}, field "{name}"', numbers=True)
    if _GSM8K_MARK in gold:
        gold = gold.rpartition(_GSM8K_MARK)[2].strip()
        if not gold:
            raise DataError(f'{where}, field "{name}": nothing follows "{_GSM8K_MARK}".')
    elif _BOX in gold:
        gold = _last_box(gold) or gold
    bare = gold.removeprefix("$").removesuffix("$").strip()
    return bare if gold[:1] == gold[-1:] == "$" and bare and "$" not in bare else gold


def value_at(row: Row, name: str, where: str) -> Any:
    """What a column holds; a name with dots steps into nested ones where no column has the whole name."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    if dot and isinstance(row.get(head), Mapping):
        return value_at(row[head], rest, where)
    near = difflib.get_close_matches(name, [str(key) for key in row], n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise DataError(f'{where}: no field "{name}" among {", ".join(map(str, row)) or "no fields at all"}{hint}')


def _has(row: Row, name: str) -> bool:
    """Present and filled."""
    if name in row:
        return row[name] is not None
    head, dot, rest = name.partition(".")
    return bool(dot) and isinstance(row.get(head), Mapping) and _has(row[head], rest)


def _question_part(row: Row, name: str, where: str, *, required: bool) -> str:
    value = value_at(row, name, where)
    place = f'{where}, field "{name}"'
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _asked(value, place)
    if not required and (value is None or (isinstance(value, str) and not value.strip())):
        return ""
    return _text(value, place, numbers=False)


def _asked(messages: Sequence[Any], place: str) -> str:
    """The one user message of a conversation; a system message before it is passed over."""
    turns = [(m.get("role"), m.get("content")) if isinstance(m, Mapping) else (None, None) for m in messages]
    asked = [content for role, content in turns if role == "user"]
    if len(asked) != 1 or any(role not in ("system", "developer", "user") for role, _ in turns):
        found = ", ".join(str(role) for role, _ in turns) or "no messages"
        raise DataError(f"{place}: expected messages with one user turn and no other but system, got {found}.")
    return _text(asked[0], f"{place}, user message", numbers=False)


def _text(value: Any, place: str, *, numbers: bool) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if numbers and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value) if whole else value)
    expected = "a text or a number" if numbers else "a text"
    found = "an empty text" if isinstance(value, str) else as_written(value)
    kind = EmptyField if value is None or isinstance(value, str) else DataError
    raise kind(f"{place}: expected {expected}, got {found}.")


def as_written(value: Any) -> str:
    """A value that is not what was expected, as JSON writes it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _last_box(text: str) -> str | None:
    """What is inside the last box, where its braces balance."""
    start = text.rfind(_BOX) + len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip() or None
    return None
