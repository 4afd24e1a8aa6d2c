from pathlib import Path
from typing import Any

import pytest

from rocstar.data.problems import detect_columns, load_problems, problem_of
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import PAPER, prompt_of
from rocstar.errors import DataError
from rocstar.types import Problem, problem_id
from tests.files import jsonl

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
MORE = [{"role": "user", "content": "1+1? Put the answer after ####."}]
VERL = {"style": "rule", "ground_truth": "2"}
# One row of each layout, as its project writes it, and the layout it must be taken for.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"question": "1+1?", "answer": "2"}),
    ("plain", {"problem": "1+1?", "answer": "2", "solution": "It is 3."}),
    ("plain", {"problem": "1+1?", "solution": r"So $1+1=\boxed{2}$, and not {3}."}),
    ("plain", {"problem": "1+1?", "generated_solution": "It is 3.", "expected_answer": "2"}),
    ("plain", {"ID": "2024-I-1", "Problem": "1+1?", "Solution": "It is 3.", "Answer": 2}),
    ("messages", {"messages": ASKED, "solution": "$2$"}),
    ("trl", {"prompt": ASKED, "solution": "$2$"}),
    ("trl", {"prompt": "1+1?", "ground_truth": "2"}),
    (
        "verl",
        {"prompt": ASKED, "reward_model": VERL, "data_source": "x", "ability": "math", "extra_info": {"index": 0}},
    ),
    ("verl", {"prompt": MORE, "reward_model": {"ground_truth": 2}, "extra_info": {"question": "1+1?"}}),
    ("skyrl", {"prompt": ASKED, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "2"}}),
    ("slime", {"prompt": ASKED, "label": "2"}),
]


@pytest.mark.parametrize(("layout", "row"), ROWS)
def test_a_row_of_a_known_layout_is_recognised_and_read(layout: str, row: dict[str, Any]) -> None:
    columns = detect_columns(row, where="f, line 1")
    problem = problem_of(row, columns, where="f, line 1", source="s", line=1)
    assert (columns.layout, problem.question, problem.answer) == (layout, "1+1?", "2")


def test_parquet_with_nested_columns_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row for name, row in ROWS if name == "skyrl"]), path)
    assert [(p.question, p.answer) for p in load_problems(path)] == [("1+1?", "2")]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"text": "1+1?"}, "the fields text do not fit any known layout"),
        ({"prompt": ASKED, "solution": None}, "the fields prompt, solution (null) do not fit"),
        ({"prompt": [*ASKED, {"role": "assistant", "content": "2"}], "label": "2"}, "got system, user, assistant"),
        ({"prompt": [*ASKED, ASKED[1]], "label": "2"}, "got system, user, user; leave such rows out"),
        ({"prompt": [{**ASKED[1], "tool_calls": [{}]}], "label": "2"}, "a message calls a tool"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "label": "2"}, "message 1: expected a text"),
        ({"prompt": ASKED, "label": "2", "images": [b"png"]}, 'field "images": holds pictures'),
        ({"question": "1+1?", "choices": ["1", "2"], "answer": 1}, 'field "choices": holds choices that the question'),
        ({"question": "A?", "options": {"A": "yes", "B": "no"}, "answer": "A"}, 'field "options": holds choices'),
        ({"question": "Q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answer": "A"}, "leave it out"),
        ({"prompt": [], "label": "2"}, "got no messages"),
        ({"prompt": ["1+1?"], "label": "2"}, 'got "1+1?"; write each message as {"role"'),
        ({"messages": ASKED}, "beside messages there is none of answer, "),
        ({"prompt": ASKED, "reward_model": {"ground_truth": ["2"]}}, 'got ["2"]; write it as a text, or let a reward'),
        ({"prompt": ASKED, "label": " "}, 'field "label": expected a text or a number, got an empty text'),
    ],
)
def test_a_bad_row_is_told_with_its_place(row: dict[str, Any], wanted: str) -> None:
    with pytest.raises(DataError) as caught:
        problem_of(row, detect_columns(row, where="f, line 7"), where="f, line 7", source="s", line=7)
    assert wanted in str(caught.value)
    assert "f, line 7" in str(caught.value)


def read(path: Path, *rows: dict[str, Any], **asked: Any) -> list[Problem]:
    return load_problems(jsonl(path, *rows), **asked)


def test_a_prompt_of_messages_keeps_its_system_text_and_its_earlier_turns(tmp_path: Path) -> None:
    talk = [*ASKED, {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 2+2?"}]
    asked, followed, bare = read(
        tmp_path / "a.jsonl",
        {"prompt": ASKED, "answer": "2"},
        {"prompt": talk, "answer": "4", "images": None, "choices": None, "options": ["2+2", "And"]},
        {"prompt": "1+1?", "answer": "2"},
    )
    assert (asked.question, asked.system, asked.earlier) == ("1+1?", "Be brief.", ())
    assert (followed.question, followed.system, followed.earlier) == ("And 2+2?", "Be brief.", (("1+1?", "2"),))
    assert list(followed.messages) == talk
    assert (bare.messages, bare.id) == ((), problem_id("1+1?"))
    assert len({asked.id, followed.id, bare.id, problem_id("And 2+2?")}) == 4


def test_a_developer_is_a_system_and_a_question_of_messages_without_one_has_the_id_of_its_text(tmp_path: Path) -> None:
    told, bare = read(
        tmp_path / "a.jsonl",
        {"prompt": [{**ASKED[0], "role": "developer"}, ASKED[1]], "answer": "2"},
        {"prompt": ASKED[1:], "answer": "2"},
    )
    assert told.system == "Be brief." and bare.system is None and bare.id == problem_id("1+1?")


def test_a_conversation_in_a_nested_column_keeps_its_system_text_and_an_empty_one_is_none_of_ours(
    tmp_path: Path,
) -> None:
    silent = [{"role": "system", "content": ""}, ASKED[1]]
    rows = [{"row": {"talk": talk}, "answer": "2"} for talk in (ASKED, silent)]
    nested, empty = read(tmp_path / "a.jsonl", *rows, question="row.talk")
    assert (nested.system, empty.system, empty.question) == ("Be brief.", "", "1+1?")
    assert text_of(prompt_of(PAPER, empty, ())).startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")


def test_two_conversations_of_one_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="several hold a system text or earlier turns"):
        read(tmp_path / "a.jsonl", {"a": ASKED, "b": ASKED, "answer": "2"}, question=("a", "b"))
    (told,) = read(tmp_path / "b.jsonl", {"a": "A story.", "b": ASKED, "answer": "2"}, question=("a", "b"))
    assert (told.system, told.question) == ("Be brief.", "A story. 1+1?")


def test_rows_of_an_own_reward_need_no_reference_and_keep_their_columns_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"prompt": ASKED, "solution": None, "task": "style"},
        {"question": "1+1?", "answer": "$2$"},
        {"prompt": "2+2?", "solution": "$4$"},
    ]
    found = read(tmp_path / "a.jsonl", *rows, answer="")
    assert [problem.answer for problem in found] == ["", "", ""]
    assert [p.metadata.get("solution", p.metadata.get("answer")) for p in found] == [None, "$2$", "$4$"]


def test_of_a_nested_column_a_reward_sees_what_is_not_read(tmp_path: Path) -> None:
    extra = {"question": "1+1?", "index": 7}
    row = {"data_source": "x", "prompt": ASKED, "reward_model": VERL, "extra_info": extra}
    (problem,) = read(tmp_path / "a.jsonl", row)
    assert (problem.metadata["extra_info"], problem.metadata["reward_model"]) == (extra, VERL)
