import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.pool.check import Wording, check_file
from rocstar.data.pool.rewording import ASK_FRACTION
from rocstar.data.problems import ProblemColumns, columns_of
from rocstar.errors import DataError
from rocstar.types import Problem
from tests.files import jsonl

WORDING = Wording(render=lambda it: f"<s>{it.question}</s>", markers=("<s>", "</s>"), length=len, unit="characters")
ROWS = [
    {"prompt": "How many legs do three cats have in all?", "label": "12", "level": 1},
    {"prompt": "How many legs do three cats have in all?", "label": "12.0"},
    {"prompt": "How many legs do three cats have in all?", "label": "13"},
    {"prompt": "How many legs do three cats and no dogs have in all, would you say?", "label": "bad"},
    {"prompt": "", "label": "1"},
]


def columns(row: Any, where: str) -> ProblemColumns:
    return columns_of(row, where, ("question",), "answer")


def accept(gold: str, said: str) -> tuple[bool, str]:
    return gold != "bad" and said == f"\\boxed{{{gold}}}", "scripted"


def test_questions_asked_for_an_integer_are_compared_without_the_sentence_that_asks(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    asked = ("Halve three.", "3/2"), ("Third of two.", "2/3"), ("Halve three.", "3/2"), ("Halve three.", "1/4")
    rows = [{"question": f"{text} {ASK_FRACTION}", "answer": "5", "asked_from": former} for text, former in asked]
    jsonl(path, *rows)
    report = check_file(str(path), columns, accept, WORDING, [])
    assert [report.findings[name].rows for name in ("near", "duplicates", "conflicts")] == [0, 1, 1]


def test_a_report_says_how_a_file_is_read_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl(path, *ROWS, "{broken")
    asked = "three cats and no dogs have in all, would you say"
    known = [Problem(id="b3", question=asked, answer="", source="b", metadata={"line": 3})]
    report = check_file(str(path), columns, accept, WORDING, known)
    assert report.columns is not None and report.columns.layout == "slime"
    assert (report.rows, report.others) == (6, ["level"])
    assert report.prompt == "«<s>»How many legs do three cats have in all?«</s>»"
    assert report.answer == "12"
    names = ("bad", "refused", "conflicts", "duplicates", "overlaps")
    assert [report.findings[name].rows for name in names] == [2, 1, 1, 1, 1]
    assert "line 6" in report.findings["bad"].examples[1]
    assert report.by_benchmark == {"b": 1}
    assert sum(rows for *_, rows in report.histogram()) == 4
    assert report.quantile(0.5) == len(f"<s>{ROWS[0]['prompt']}</s>")
    assert json.loads(json.dumps(report.as_json()))["columns"]["answer"] == "label"


def test_references_that_cannot_be_read_are_told_since_wrong_answers_to_them_are_undecided(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "A digit?", "answer": "[0-9]"}\n' + '{"question": "1+1?", "answer": "2"}\n')

    def decided(gold: str, said: str) -> tuple[bool, str]:
        return said == f"\\boxed{{{gold}}}", "gold_unparsed" if gold == "[0-9]" else "integer"

    report = check_file(str(path), columns, decided, WORDING, [])
    assert report.findings["unread"].examples == ['line 1: "[0-9]"']


def test_what_is_wrong_with_every_row_is_told_once_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"problem": "q{row}", "result": "1"}}\n' for row in range(7)) + "{broken\n" * 3)
    report = check_file(str(path), columns, accept, WORDING, [])
    missing, broken = report.findings["bad"].examples
    assert (report.rows, report.findings["bad"].rows) == (10, 10)
    assert "line 1: the fields problem, result do not fit" in missing and missing.endswith("(7 rows)")
    assert "line 8, column 2: not JSON" in broken and broken.endswith("(3 rows)")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\n")
    with pytest.raises(DataError, match="has no rows"):
        check_file(str(path), columns, accept, WORDING, [])
