from pathlib import Path
from typing import Any

import pytest

from rocstar.data.problems import detect_columns, load_problems, problem_of
from rocstar.errors import DataError

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
# One row of each layout, as its project writes it, and the layout it must be taken for.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"question": "1+1?", "answer": "2"}),
    ("plain", {"problem": "1+1?", "answer": "2", "solution": "It is 3."}),
    ("plain", {"problem": "1+1?", "solution": r"So $1+1=\boxed{2}$, and not {3}."}),
    ("trl", {"prompt": ASKED, "solution": "$2$"}),
    ("trl", {"prompt": "1+1?", "ground_truth": "2"}),
    (
        "verl",
        {
            "data_source": "x",
            "prompt": ASKED,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 0},
        },
    ),
    (
        "verl",
        {
            "prompt": [{"role": "user", "content": "1+1? Put the answer after ####."}],
            "reward_model": {"ground_truth": 2},
            "extra_info": {"question": "1+1?"},
        },
    ),
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
        ({"prompt": [*ASKED, {"role": "assistant", "content": "2"}], "label": "2"}, "got system, user, assistant"),
        ({"prompt": [], "label": "2"}, "got no messages"),
        ({"prompt": ["1+1?"], "label": "2"}, "got no messages"),
        ({"prompt": ASKED, "reward_model": {"ground_truth": ["2"]}}, 'field "reward_model.ground_truth"'),
        ({"prompt": ASKED, "label": " "}, 'field "label": expected a text or a number, got an empty text'),
    ],
)
def test_a_bad_row_is_told_with_its_place(row: dict[str, Any], wanted: str) -> None:
    with pytest.raises(DataError) as caught:
        problem_of(row, detect_columns(row, where="f, line 7"), where="f, line 7", source="s", line=7)
    assert wanted in str(caught.value)
    assert "f, line 7" in str(caught.value)
