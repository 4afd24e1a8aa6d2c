from pathlib import Path

import pytest

from rocstar.answers.cases import Case, decide, load_cases, pair_of, short, summary, table
from rocstar.answers.grade import Grader, Pair
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import Verdict
from tests.files import jsonl


def test_columns_are_text_and_gold_or_the_named_ones(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "5", "gold": 6})
    assert [(case.text, case.gold) for case in load_cases(file, read_rows(file))] == [("5", "6")]
    said = [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "7"}]
    other = jsonl(tmp_path / "b.jsonl", {"pred": said, "answer": "6", "ok": False}, {"pred": 1})
    (case,) = load_cases(other, read_rows(other), text="pred", gold="answer", expected="ok", limit=1)
    assert (case.text, case.gold, case.expected, case.line) == ("5", "6", Verdict.WRONG, 1)


def test_a_file_of_problems_lacks_what_a_model_wrote(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'text', what a model wrote, among question, answer; name it with -"):
        load_cases(file := jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": "6"}), read_rows(file))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no rows"),
        ("[1]", "line 1: expected a JSON object"),
        ('{"text": "5", "gold": "6"}\n{', "line 2, column 2: not JSON"),
        ('{"text": "5"}', "line 1: no column 'gold', the reference, among text; name it with --gold, or give reward"),
        ('{"text": null, "gold": "6"}', "line 1, field 'text'"),
        ('{"text": "1", "gold": "6", "ok": "maybe"}', "line 1, field 'ok': expected true or false, got 'maybe'"),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=r"bad\.jsonl") as error:
        load_cases(file, read_rows(file), expected="ok" if '"ok"' in content else None)
    assert told in str(error.value)


def test_what_is_compared_follows_where_the_answer_is_looked_for() -> None:
    case = Case(line=1, text=r"\boxed{4} <answer>\boxed{5}</answer> the answer is 6", gold=r"so \boxed{5}")
    assert pair_of(case) == pair_of(case, strict=True) == Pair(gold="5", predicted="5")
    said = Case(line=1, text="hence the answer is 6", gold="5")
    assert pair_of(said) == Pair(gold="5", predicted="6")
    assert pair_of(said, strict=True) == Pair(gold="5", predicted=None)
    assert pair_of(Case(line=1, text="10, 4, 2", gold="2")) == Pair(gold="2", predicted="10, 4, 2")


async def test_the_summary_counts_what_was_decided() -> None:
    cases = [
        Case(line=1, text="5", gold="5", expected=Verdict.RIGHT),
        Case(line=2, text="5", gold="6", expected=Verdict.RIGHT),
        Case(line=3, text="", gold="6"),
    ]
    found = await decide(Grader(graders=("numbers",)), cases)
    figures = summary(found)
    assert (figures["right"], figures["wrong"], figures["undecided"]) == (1, 2, 0)
    assert figures["methods"] == {"integer": 2, "no_answer": 1}
    assert (figures["expected"], figures["agreed"], figures["agreement"]) == (2, 1, 0.5)
    assert found[0]["milliseconds"] > 0


def test_a_cell_is_one_short_line_that_any_terminal_shows() -> None:
    assert short("a\nb\x1b[31m\u202e") == "a b?[31m?"
    assert (short(-0.5), short(1e300), short(-2.5e9)) == ("-0.500", "1e+300", "-2.5e+09")
    assert short("x" * 100) == "..." + "x" * 41
    assert "KeyError: 'level'" in table([{"error": "KeyError: 'level'" + "x" * 200}], ("error",))
    assert table([{"a": 1, "b": "yes"}], ("a", "b")) == "a  b\n1  yes"
