import csv
import gzip
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.problems import load_problems
from rocstar.errors import DataError
from rocstar.types import problem_id
from tests.files import jsonl
from tests.published import DATA

ROWS = [{"question": "1+1?", "answer": "2", "level": 1}, {"question": "2+2?", "answer": "4", "level": 1}]


def write(path: Path, content: str | bytes) -> Path:
    """Write text or bytes, compressed when the name says so."""
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def message_of(path: Path, **columns: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_problems(path, **columns)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.parquet", "a.parquet.gz"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if ".jsonl" in name:
        jsonl(path, *ROWS)
    elif ".csv" in name:
        write(path, "question,answer,level\r\n1+1?,2,1\r\n2+2?,4,1\r\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
        write(path, sink.getvalue().to_pybytes())
    problems = load_problems(path)
    assert [(p.question, p.answer, p.source) for p in problems] == [("1+1?", "2", name), ("2+2?", "4", name)]
    assert problems[0].id == problem_id("1+1?")
    assert str(problems[0].metadata["level"]) == "1"


STORY = {"Body": "Two and one.", "Question": "How many?", "Answer": 3.0}


@pytest.mark.parametrize(
    ("row", "named", "question", "answer"),
    [
        ({"data": {"frage": "2+2?", "meta": {"lösung": 4}}}, ("data.frage", "data.meta.lösung"), "2+2?", "4"),
        ({"problem": "Why?", "Answer": "8"}, (), "Why?", "8"),
        ({"question": "Why?", "target": "8"}, (), "Why?", "8"),
        ({"question": "Why?", "is": 8}, ("question", "is"), "Why?", "8"),
        ({"question": "Why?", "answer": "8", "label": "easy", "prompt": "Say."}, (), "Why?", "8"),
        ({"question": "Why?", "answer": 10**400}, (), "Why?", "1" + "0" * 400),
        ({"question": "Why?", "answer": 1e23}, (), "Why?", "1e+23"),  # not 99999999999999991611392
        ({"question": "q", "answer": "16 - 3 = <<16-3=13>>13\n#### 1,013"}, (), "q", "1,013"),
        (STORY, ("Question", "Answer"), "How many?", "3"),  # a column that is named as the question is the whole of it
        ({"context": "It rains.", "ask": "Why?", "answer": "7"}, (["context", "ask"],), "It rains. Why?", "7"),
    ],
)
def test_question_and_answer_are_found(tmp_path: Path, row: Any, named: Any, question: str, answer: str) -> None:
    columns = dict(zip(("question", "answer"), named, strict=False))
    (problem,) = load_problems(jsonl(tmp_path / "a.jsonl", row), **columns)
    assert (problem.question, problem.answer) == (question, answer)


@pytest.mark.parametrize("row", [STORY, {"Body": "Two and one.", "question": "How many?", "answer": "3"}])
def test_a_story_beside_its_question_is_part_of_the_problem(tmp_path: Path, row: dict[str, Any]) -> None:
    problems = load_problems(jsonl(tmp_path / "a.jsonl", row, {**row, "Body": None}))
    assert [(p.question, p.answer) for p in problems] == [("Two and one. How many?", "3"), ("How many?", "3")]


def test_columns_are_mapped_and_the_rest_is_kept(tmp_path: Path) -> None:
    text = json.dumps({"q": "Why?", "gold": "7", "family": "gcd"})
    path = write(tmp_path / "a.jsonl", f"\ufeff\n{text}\n\nnot json\n")  # blank lines and the mark are passed over
    (problem,) = load_problems(path, question="q", answer="gold", source="mine", limit=1)  # reads no further
    assert (problem.question, problem.answer, problem.source) == ("Why?", "7", "mine")
    assert problem.metadata == {"family": "gcd", "line": 2}


@pytest.mark.parametrize(
    ("row", "named", "wanted"),
    [
        ({"ask": "a", "answer": "1"}, {}, ["ask, answer do not fit", "data.columns", "--question"]),
        ({"problem": "a", "answer": "1"}, {"question": "probem"}, ['"probem"', "did you mean problem?"]),
        ({"problem": "a", "answer": "1"}, {"answer": "anwser"}, ['"anwser"', "did you mean answer?"]),
        ({"ask": "a", "solution": "1"}, {"question": ["question", "body"]}, ['"question" among ask, solution.']),
        ({"problem": "a", "reward_model": {"ground_truth": "1"}}, {"answer": "ground_truth"}, ["mean reward_model.gr"]),
        ({"ask": "Why?", "answer": "7"}, {"question": ["contxt", "ask"]}, ['no field "contxt"']),
    ],
)
def test_a_column_that_is_not_there_is_named(
    tmp_path: Path, row: dict[str, str], named: Any, wanted: list[str]
) -> None:
    message = message_of(jsonl(tmp_path / "a.jsonl", row), **named)
    assert all(part in message for part in wanted), message


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        ("{broken", ["line 2", "column 2", "not JSON"]),
        ('"text"', ["line 2", "one JSON object", 'got "text"']),
        ("[" * 100_000, ["line 2", "not readable as JSON"]),
        ("{}", ["line 2", "(none) do not fit any known layout"]),
        ('{"question": "q", "anwser": "1"}', ["line 2", "question, anwser do not fit any known layout"]),
        ('{"question": "", "answer": "1"}', ["line 2", '"question"', "empty text"]),
        ('{"question": ["a", "b"], "answer": "1"}', ["line 2", '"question"', 'got "a"; write each message as']),
        ('{"question": 5, "answer": "1"}', ["line 2", '"question"', "got 5"]),
        ('{"question": "q", "answer": null}', ["line 2", '"answer"', "got null"]),
        ('{"question": "q", "answer": true}', ["line 2", '"answer"', "got true"]),
        ('{"question": "q", "answer": NaN}', ["line 2", '"answer"', "got NaN"]),
        ('{"question": "q", "answer": ["1"]}', ["line 2", '"answer"', 'got ["1"]']),
        ('{"question": "q", "answer": "13 ####"}', ["line 2", '"answer"', "####"]),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, bad: str, wanted: list[str]) -> None:
    message = message_of(jsonl(tmp_path / "a.jsonl", ROWS[0], bad))
    assert all(part in message for part in wanted), message


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.jsonl", b'{"question": "a", "answer": "1"}\n"\xff\xfe"', "line 2: not UTF-8"),
        ("a.jsonl", b"", "has no rows"),
        ("a.csv", b"question,answer\n", "has no rows"),
        ("a.csv", b"question,answer\na,b,c\n", "line 2: 3 cells where the header has 2"),
        ("a.csv", b'question,answer\na,"b\n', "not CSV"),
        ("a.csv", b"question;answer\n2,5 + 1?;3,5\n", "line 1: cells are separated by ';'"),
        ("a.jsonl", rb'{"question": "\ud83d?", "answer": "1"}', 'field "question": "\\ud83d" is half a character'),
        ("a.csv", b"question,answer,answer\na,1,2\n", "line 1: several columns are called 'answer'"),
        (
            "a.jsonl",
            b'{"question": "a", "answer": "1", "answer": "2"}\n',
            "line 1: not readable as JSON (an object has",
        ),
        ("a.json", b'[{"question": "a", "m": {"k": 1, "k": 1}}]', "an object has the key 'k' twice"),
        ("a.txt", b"question", "not a kind of file we read"),
        ("a.parquet", b"PAR1", "not a parquet file"),
        ("b.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:-4], "not a whole gzip file"),
        ("c.jsonl.gz", b"{}", "not a whole gzip file"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, wanted: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert wanted in message_of(tmp_path / name)


def test_a_file_that_is_missing_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"tran.jsonl does not exist in {tmp_path}; check the path" in message_of(Path("tran.jsonl"))
    assert f"{tmp_path}/tran.jsonl does not exist; check the path" in message_of(tmp_path / "tran.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert "cannot be read" in message_of(tmp_path / "folder.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")  # is read several times, by several processes
    assert "is a pipe or a device" in message_of(tmp_path / "pipe.jsonl")


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\n ", b"\xef\xbb\xbf \r\n"])
def test_a_json_list_may_begin_with_a_byte_order_mark_and_blanks(tmp_path: Path, before: bytes) -> None:
    path = write(tmp_path / "a.json", before + json.dumps(ROWS, indent=1).encode())
    assert [problem.answer for problem in load_problems(path)] == ["2", "4"]


def test_what_a_parquet_file_holds_twice_or_python_cannot_hold_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    one, days = pyarrow.array(["1"]), pyarrow.array([10**9], pyarrow.date32())
    for name, column, told in (
        ("answer", one, "a.parquet: several columns are called 'answer'; rename all but one"),
        ("day", days, "a.parquet holds what Python cannot"),
    ):
        parquet.write_table(pyarrow.table([one, one, column], ["question", "answer", name]), tmp_path / "a.parquet")
        assert told in message_of(tmp_path / "a.parquet")


def test_a_line_longer_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.data.rows.MAX_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.jsonl.gz", b"x" * (1 << 24))
    assert "line 1: longer than 1 MiB; write one row a line" in message_of(path)


def test_a_decimal_of_a_parquet_file_is_a_number(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "a", "answer": Decimal("12.50")}, {"question": "b", "answer": Decimal("8.00")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [problem.answer for problem in load_problems(tmp_path / "a.parquet")] == ["12.50", "8"]


def test_csv_cells_may_hold_commas_quotes_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], ['say "a, b"\nnow', "1"], ["next", "2"]])
    problems = load_problems(path)
    assert problems[0].question == 'say "a, b"\nnow'
    assert problems[1].metadata["line"] == 4


@pytest.mark.parametrize(
    ("name", "columns", "count", "answer"),
    [
        ("gsm8k/test.jsonl.gz", {}, 1319, "18"),
        ("eval_math/aime24.jsonl", {"question": "problem"}, 30, "204"),
        ("math/math500.jsonl.gz", {}, 500, r"\left( 3, \frac{\pi}{2} \right)"),
        ("eval_math/gsm_hard.jsonl.gz", {"question": "input", "answer": "target"}, None, None),
        ("word_problems/svamp_test.csv.gz", {}, 1000, "8.0"),
    ],
)
def test_published_files_are_read_as_they_are(
    name: str, columns: dict[str, str], count: int | None, answer: str | None
) -> None:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is absent; set ROCSTAR_DATA to the data folder")
    problems = load_problems(path, **columns)  # type: ignore[arg-type]
    assert count in (None, len(problems))
    assert answer in (None, problems[0].answer)
