"""Converts a row of a known layout to a Problem: finds the columns of the question and the reference answer.

Known layouts: plain question and answer, TRL, verl, SkyRL, slime. A layout is recognised by its unique columns. Three
forms are reduced to the answer: a GSM8K solution ending in `#### 18`, a solution with a last box, and `$...$`. Nothing
is downloaded, shuffled or filtered here; reading files is in `rows.py`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import Problem, problem_id

STORIES = ("Body", "body")
"""Columns of the story that a question asks about (SVAMP, ASDiv): without it the question makes no sense."""

PICTURES = ("images", "image", "videos", "audios")
"""Columns that TRL and verl give to a model besides the text."""
CHOICES = ("choices", "options")
"""Columns of what a question offers to choose from (MMLU, ARC, MMLU-Pro, MedQA)."""
EXACT = 2**53  # a float beyond it, such as 1e23, is seldom the whole number that was meant
SHOWN_CHARS = 40  # of a wrong value, in a message
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_GSM8K_MARK = "####"
_BOX = "\\boxed{"

Row = Mapping[str, Any]


class EmptyField(DataError):
    """An empty question or answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemColumns:
    """The columns of a Problem in a row; a dot steps into a nested column."""

    layout: str
    """Name of the layout, or `given` if the columns are named."""
    question: tuple[str, ...]
    """Columns joined by a space; those that are empty in a row are left out."""
    answer: str | None
    """None: only questions are read."""

    @property
    def used(self) -> set[str]:
        """The columns that are read as a whole; of one that another is nested in, a reward may want the rest."""
        return {*self.question, self.answer or ""}


# verl and SkyRL put instructions into the prompt and, as a rule, the bare question into extra_info.
_IN_EXTRA = ("extra_info.question", "prompt")
_VERL, _SKYRL = "reward_model.ground_truth", "reward_spec.ground_truth"
_PLAIN = ("answer", "Answer", "final_answer", "target", "ground_truth", "solution", "expected_answer")
LAYOUTS: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = (
    ("verl", (_VERL,), _IN_EXTRA, (_VERL,)),
    ("skyrl", (_SKYRL, "env_class"), _IN_EXTRA, (_SKYRL, _VERL)),
    ("slime", ("label",), ("prompt", "question", "input"), ("label",)),
    ("plain", ("question",), ("question",), _PLAIN),
    ("trl", ("prompt",), ("prompt",), ("solution", "ground_truth", "answer", "label")),
    ("plain", ("problem", "Problem", "Question"), ("problem", "Problem", "Question"), _PLAIN),
    ("messages", ("messages",), ("messages",), _PLAIN),
)
"""(name, signs: a row with one of these columns has this layout, columns that may hold the question and those that may
hold the answer, the best first)."""


def load_problems(
    path: str | Path,
    *,
    question: str | Sequence[str] = "question",
    answer: str = "answer",
    source: str | None = None,
    limit: int | None = None,
) -> list[Problem]:
    """The problems of a file, in its order.

    question, answer: column names; several for the question are joined by a space. Default ones that are not there are
    found by the layout (`detect_columns`). answer "": rows have no reference. source: recorded with each problem,
    default the file's name. limit: read only the first so many rows. Numbers count as answers and become text (8.0
    becomes "8"); every other column goes into `metadata`, with the line (parquet: the row) counted from 1 as "line".
    Raises DataError naming file, line and field. Source: ours."""
    name = source or Path(path).name
    columns_asked = (question,) if isinstance(question, str) else tuple(question)
    problems: list[Problem] = []
    for line, row in itertools.islice(read_rows(path), limit):
        where = f"{path}, line {line}"
        columns = columns_of(row, where, columns_asked, answer)
        problems.append(problem_of(row, columns, where=where, source=name, line=line))
    if not problems and limit != 0:
        raise DataError(f"{path} has no rows; give a file with at least one problem.")
    return problems


def asked_under_another_system(heldout: Sequence[Problem]) -> Callable[[Problem], bool]:
    """Tells whether a problem asks one of these questions, after the same earlier turns, under another system text,
    with which its id is another."""
    systems = defaultdict[Any, set[str | None]](set)
    for problem in heldout:
        systems[problem.earlier, problem.question].add(problem.system)

    def is_asked(problem: Problem) -> bool:
        found = systems.get((problem.earlier, problem.question), {problem.system})
        return problem.system not in found

    return is_asked


def columns_of(row: Any, where: str, question: tuple[str, ...], answer: str) -> ProblemColumns:
    """The columns of a row to read for these names. A default one that is not there is found by the layout. Raises
    DataError."""
    refuse_no_columns(row, where)
    if question != ("question",):
        return ProblemColumns(layout="given", question=question, answer=answer or None)
    wanted = answer or "answer"
    if "question" in row and (wanted in row or _has(row, wanted)):  # whatever else the row has
        return ProblemColumns(layout="given", question=_with_story(row, "question"), answer=answer or None)
    found = detect_columns(row, where=where, needs_answer=answer == "answer")
    return found if answer == "answer" else replace(found, layout="given", answer=answer or None)


def refuse_no_columns(row: Any, where: str) -> None:
    """Raises DataError for a row that is not a JSON object."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected one JSON object with columns, got {as_written(row)}.")


def detect_columns(row: Row, *, where: str, needs_answer: bool = True) -> ProblemColumns:
    """The columns of the layout that the row's columns identify. Raises DataError with the existing columns; `where`
    names file and line. Source: ours."""
    names = ", ".join(dict.fromkeys(layout for layout, *_ in LAYOUTS))
    for layout, signs, questions, answers in LAYOUTS:
        if any(_has(row, sign) for sign in signs):
            question = next((name for name in questions if _has(row, name)), None)
            answer = next((name for name in answers if _has(row, name)), None)
            if question and (answer or not needs_answer):
                return ProblemColumns(layout=layout, question=_with_story(row, question), answer=answer)
            if question:
                names = f"beside {question} there is none of {', '.join(answers)}"
    fields = [str(name) if value is not None else f"{name} (null)" for name, value in row.items()]
    raise DataError(
        f"{where}: the fields {', '.join(fields) or '(none)'} do not fit any known layout "
        f"({names}); name those that hold question and answer: question and answer of a pool's source, data.columns to "
        "train, --question and --answer of eval and data check, --question and --gold of reward test."
    )


def problem_of(row: Row, columns: ProblemColumns, *, where: str, source: str, line: int) -> Problem:
    """The Problem of a row; all other columns go into `metadata`, with the line as "line". Raises DataError naming
    file, line and field."""
    _refuse_pictures(row, where)
    found = [_messages(row, name, where, required=len(columns.question) == 1) for name in columns.question]
    question = " ".join(messages[-1]["content"] for messages in found if messages)
    if not question:
        raise EmptyField(f"{where}, fields {', '.join(columns.question)}: all empty, expected a text.")
    if columns.answer is not None:
        _refuse_hidden_choices(row, question, where)
    answer = "" if columns.answer is None else _answer_text(row, columns.answer, where)
    metadata = {name: value for name, value in row.items() if name not in columns.used} | {"line": line}
    before = [message for messages in found for message in messages[:-1]]
    if len([messages for messages in found if len(messages) > 1]) > 1:
        reason = "several hold a system text or earlier turns, of which only one conversation can be made; name one"
        raise DataError(f"{where}, fields {', '.join(columns.question)}: {reason}.")
    is_talk = any(_is_conversation(value_at(row, name, where)) for name in columns.question)
    return Problem(
        id=problem_id("\x1f".join([*(message["content"] for message in before), question])),
        question=question,
        answer=answer,
        source=source,
        metadata=metadata,
        messages=(*before, {"role": "user", "content": question}) if is_talk else (),
    )


def value_at(row: Row, name: str, where: str) -> Any:
    """The value of a column; a name with dots steps into nested ones if no column has the whole name."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    if dot and isinstance(row.get(head), Mapping):
        return value_at(row[head], rest, where)
    inner = {
        str(below): f"{key}.{below}" for key, value in row.items() if isinstance(value, Mapping) for below in value
    }
    names = inner | {full: full for full in (*inner.values(), *map(str, row))}
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)  # a typo; question and solution are 0.63 alike
    hint = f"; did you mean {names[near[0]]}?" if near else "."
    raise DataError(f'{where}: no field "{name}" among {", ".join(map(str, row)) or "no fields at all"}{hint}')


def as_written(value: Any) -> str:
    """An unexpected value, as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _with_story(row: Row, question: str) -> tuple[str, ...]:
    """The column of the question, after that of its story, if any."""
    return (*[name for name in STORIES if _has(row, name)][:1], question)


def _has(row: Row, name: str) -> bool:
    """Present and filled."""
    if name in row:
        return row[name] is not None
    head, dot, rest = name.partition(".")
    return bool(dot) and isinstance(row.get(head), Mapping) and _has(row[head], rest)


def _messages(row: Row, name: str, where: str, *, required: bool) -> list[dict[str, str]]:
    """The messages of one column: a conversation, or the text of a user; none if it is empty."""
    value = value_at(row, name, where)
    place = f'{where}, field "{name}"'
    if _is_conversation(value):
        return _conversation(value, place)
    if not required and (value is None or (isinstance(value, str) and not value.strip())):
        return []
    return [{"role": "user", "content": _text(value, place, numbers=False)}]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _conversation(value: Sequence[Any], place: str) -> list[dict[str, str]]:
    """Messages that end with a question. Raises DataError."""
    messages = [dict(message) if isinstance(message, Mapping) else {} for message in value]
    roles = ["system" if message.get("role") == "developer" else message.get("role") for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) % 2 == 0 or turns != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        found, remedy = ", ".join(str(role) for role in roles if role) or "no messages", "leave such rows out"
        if value and not any(roles):
            found, remedy = as_written(value[0]), 'write each message as {"role": "user", "content": "..."}'
        raise DataError(
            f"{place}: expected messages that are perhaps a system text, then user and assistant in turn, and at last "
            f"a user's, got {found}; {remedy}."
        )
    if any(message.get("tool_calls") for message in messages):
        raise DataError(f"{place}: a message calls a tool, which no prompt here can hold; leave such rows out.")
    read = list[dict[str, str]]()
    for number, (role, message) in enumerate(zip(roles, messages, strict=True), start=1):
        content = message.get("content")
        is_blank = role == "system" and isinstance(content, str) and not content.strip()  # in place of the template's
        text = "" if is_blank else _text(content, f"{place}, message {number}", numbers=False)
        read.append({"role": str(role), "content": text})
    return read


def _refuse_pictures(row: Row, where: str) -> None:
    """Raises DataError for a row that TRL or verl would show with pictures."""
    for name in PICTURES:
        if row.get(name):
            reason = "holds pictures, sound or film, which no model here is shown; leave such rows out, or the column."
            raise DataError(f'{where}, field "{name}": {reason}')


def _refuse_hidden_choices(row: Row, question: str, where: str) -> None:
    """Raises DataError for a row whose choices its question does not show: the model would not see them."""
    for name in CHOICES:
        found = row.get(name)
        parts = found.values() if isinstance(found, Mapping) else found if isinstance(found, list) else ()
        texts = [str(text) for part in parts for text in (part if isinstance(part, list) else [part])]
        if not all(text in question for text in texts):
            reason = "holds choices that the question does not show; write them into the question, or leave it out."
            raise DataError(f'{where}, field "{name}": {reason}')


def _answer_text(row: Row, name: str, where: str) -> str:
    """The reference answer as text; 8.0 is "8". Raises DataError."""
    gold = reference_of(_text(value_at(row, name, where), f'{where}, field "{name}"', numbers=True))
    if not gold:
        raise DataError(f'{where}, field "{name}": nothing follows "{_GSM8K_MARK}".')
    return gold


def reference_of(solution: str) -> str:
    """The answer that a reference ends with: what follows GSM8K's last `####`, else the last box, else the whole;
    without `$` around it. Empty if nothing follows the mark."""
    gold = solution.strip()
    if _GSM8K_MARK in gold:
        gold = gold.rpartition(_GSM8K_MARK)[2].strip()
    elif _BOX in gold:
        gold = _last_box(gold) or gold
    bare = gold.removeprefix("$").removesuffix("$").strip()
    return bare if gold[:1] == gold[-1:] == "$" and bare and "$" not in bare else gold


def _text(value: Any, place: str, *, numbers: bool) -> str:
    if isinstance(value, str) and value.strip():
        if lone := _LONE_SURROGATE.search(value):
            raise DataError(
                f"{place}: {as_written(lone[0])} is half a character, which no file can hold; correct the text."
            )
        return value.strip()
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if numbers and isinstance(value, float | Decimal) and math.isfinite(value):
        whole = -EXACT < value < EXACT and value == int(value)
        return str(int(value) if whole else value)
    expected = "a text or a number" if numbers else "a text"
    found = "an empty text" if isinstance(value, str) else as_written(value)
    kind = EmptyField if value is None or isinstance(value, str) else DataError
    parts = numbers and isinstance(value, list | dict)
    remedy = '; write it as a text, or let a reward function of your own read it, with data.columns.answer = ""'
    raise kind(f"{place}: expected {expected}, got {found}{remedy * parts}.")


def _last_box(text: str) -> str | None:
    """What is inside the last box, where its braces balance."""
    start = text.rfind(_BOX) + len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip() or None
    return None
