import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.problems import load_problems
from rocstar.errors import DataError
from rocstar.types import problem_id

SHARED = Path(os.environ.get("ROCSTAR_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
ROWS = [{"question": "1+1?", "answer": "2", "level": 1}, {"question": "2+2?", "answer": "4", "level": 1}]


def write(path: Path, content: str | bytes) -> Path:
    """Write text or bytes, compressed when the name says so."""
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def jsonl(path: Path, *rows: Any) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def message_of(path: Path, **columns: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_problems(path, **columns)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_named_columns_may_be_nested(tmp_path: Path) -> None:
    row = {"data": {"frage": "2+2?", "meta": {"lösung": 4}}}
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    (problem,) = load_problems(path, question="data.frage", answer="data.meta.lösung")
    assert (problem.question, problem.answer) == ("2+2?", "4")


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


def test_columns_are_mapped_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"q": "Why?", "gold": "7", "family": "gcd"})
    (problem,) = load_problems(path, question="q", answer="gold", source="mine")
    assert (problem.question, problem.answer, problem.source) == ("Why?", "7", "mine")
    assert problem.metadata == {"family": "gcd", "line": 1}


@pytest.mark.parametrize("header", ["Problem,Answer", "QUESTION,Final_Answer", " question ,target"])
def test_capitals_and_spaces_in_a_column_s_name_do_not_hide_it(tmp_path: Path, header: str) -> None:
    (problem,) = load_problems(write(tmp_path / "a.csv", f"{header}\nWhy?,8\n"))
    assert (problem.question, problem.answer) == ("Why?", "8")


def test_two_synonyms_are_no_answer_and_both_are_named(tmp_path: Path) -> None:
    message = message_of(jsonl(tmp_path / "a.jsonl", {"problem": "a", "prompt": "b", "answer": "1"}))
    assert "problem or prompt" in message
    assert "data.columns.question" in message


def test_a_synonym_never_replaces_a_column_that_was_asked_for(tmp_path: Path) -> None:
    message = message_of(jsonl(tmp_path / "a.jsonl", {"problem": "a", "answer": "1"}), question="probem")
    assert '"probem"' in message
    assert "did you mean problem?" in message


def test_a_gsm8k_answer_is_what_follows_the_marks(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": "16 - 3 = <<16-3=13>>13\n#### 1,013"})
    assert load_problems(path)[0].answer == "1,013"


def test_limit_stops_reading_before_a_later_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(ROWS[0]) + "\nnot json\n")
    assert len(load_problems(path, limit=1)) == 1


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\ufeff\n" + json.dumps(ROWS[0]) + "\n\n")
    assert load_problems(path)[0].metadata["line"] == 2


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        ("{broken", ["line 2", "column 2", "not JSON"]),
        ('"text"', ["line 2", "one JSON object", 'got "text"']),
        ("[" * 100_000, ["line 2", "not readable as JSON"]),
        ("{}", ["line 2", '"question"', "no fields"]),
        ('{"question": "q", "anwser": "1"}', ["line 2", '"answer"', "did you mean anwser?"]),
        ('{"question": "", "answer": "1"}', ["line 2", '"question"', "empty text"]),
        ('{"question": ["a", "b"], "answer": "1"}', ["line 2", '"question"', "no messages"]),
        ('{"question": 5, "answer": "1"}', ["line 2", '"question"', "got 5"]),
        ('{"question": "q", "answer": null}', ["line 2", '"answer"', "got null"]),
        ('{"question": "q", "answer": true}', ["line 2", '"answer"', "got true"]),
        ('{"question": "q", "answer": NaN}', ["line 2", '"answer"', "got NaN"]),
        ('{"question": "q", "answer": ["1"]}', ["line 2", '"answer"', 'got ["1"]']),
        ('{"question": "q", "answer": "13 ####"}', ["line 2", '"answer"', "####"]),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, bad: str, wanted: list[str]) -> None:
    message = message_of(write(tmp_path / "a.jsonl", json.dumps(ROWS[0]) + "\n" + bad + "\n"))
    assert all(part in message for part in wanted), message


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.jsonl", b'{"question": "a", "answer": "1"}\n"\xff\xfe"', "line 2: not UTF-8"),
        ("a.jsonl", b"", "has no rows"),
        ("a.csv", b"question,answer\n", "has no rows"),
        ("a.csv", b"question,answer\na,b,c\n", "line 2: 3 cells where the header has 2"),
        ("a.csv", b'question,answer\na,"b\n', "not CSV"),
        ("a.csv", b"question;answer\n2,5 + 1?;3,5\n", "line 1: cells are parted by ';'"),
        ("a.jsonl", rb'{"question": "\ud83d?", "answer": "1"}', 'field "question": "\\ud83d" is half a character'),
        ("a.txt", b"question", "not a kind of file we read"),
        ("a.parquet", b"PAR1", "not a parquet file"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, wanted: str) -> None:
    assert wanted in message_of(write(tmp_path / name, content))


def test_a_file_that_is_missing_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"tran.jsonl does not exist in {tmp_path}; check the path" in message_of(Path("tran.jsonl"))
    assert f"{tmp_path}/tran.jsonl does not exist; check the path" in message_of(tmp_path / "tran.jsonl")


def test_a_missing_file_a_folder_and_a_broken_gzip_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:-4])
    plain = tmp_path / "c.jsonl.gz"
    plain.write_bytes(b"{}")
    assert "does not exist" in message_of(tmp_path / "none.jsonl")
    assert "cannot be read" in message_of(tmp_path / "folder.jsonl")
    assert "not a whole gzip file" in message_of(broken)
    assert "not a whole gzip file" in message_of(plain)


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
        ("eval_math/gsm_hard.jsonl.gz", {"question": "input"}, None, None),
        ("word_problems/svamp_test.csv.gz", {}, 1000, "8.0"),
    ],
)
def test_published_files_are_read_as_they_are(
    name: str, columns: dict[str, str], count: int | None, answer: str | None
) -> None:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is absent; set ROCSTAR_DATA to the data folder")
    problems = load_problems(path, **columns)  # type: ignore[arg-type]
    assert count in (None, len(problems))
    assert answer in (None, problems[0].answer)


@pytest.mark.parametrize("row", [{"Question": "How many?", "Answer": 3.0}, {"question": "How many?", "answer": "3"}])
def test_a_story_beside_its_question_is_part_of_the_problem(tmp_path: Path, row: dict[str, Any]) -> None:
    told, bare = {"ID": "1", "Body": "Two and one.", **row}, {"ID": "2", "Body": None, **row}
    problems = load_problems(jsonl(tmp_path / "a.jsonl", told, bare))
    assert [(p.question, p.answer) for p in problems] == [("Two and one. How many?", "3"), ("How many?", "3")]


def test_several_columns_can_be_named_as_the_question(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"context": "It rains.", "ask": "Why?", "answer": "7"})
    (problem,) = load_problems(path, question=["context", "ask"])
    assert problem.question == "It rains. Why?" and set(problem.metadata) == {"line"}
    assert 'no field "contxt"' in message_of(path, question=["contxt", "ask"])


def test_a_column_named_as_the_question_is_the_whole_of_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"Body": "Two and one.", "Question": "How many?", "Answer": 3.0})
    (problem,) = load_problems(path, question="Question")
    assert problem.question == "How many?"
