import pytest

from rocstar.answers.extract import answer_blocks, last_box, strict_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{3}, then \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {8}", "8"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"} stray } braces { \boxed{6}", "6"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\\boxed{840}", "840"),
        (r"\boxed{}", ""),
        ("\\boxed{\n 9 \n}", "9"),
        (r"\boxed{5", None),
        ("boxed{5}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_last_balanced_box_is_found(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


def test_strict_looks_only_inside_the_last_well_formed_answer_block() -> None:
    assert strict_answer(r"\boxed{1} <answer>\boxed{2}</answer> \boxed{3}") == "2"
    assert strict_answer(r"<answer>\boxed{1}</answer> <answer>\boxed{2}</answer>") == "2"
    assert strict_answer(r"<answer>\boxed{1}</answer> <answer>\boxed{2}") == "1"
    assert strict_answer(r"<answer>\boxed{1}</answer> <answer>two</answer>") is None
    assert strict_answer(r"\boxed{1}") is None
    assert strict_answer(r"</answer>\boxed{1}<answer>") is None


def test_nested_answer_tags_make_one_block() -> None:
    assert answer_blocks("<answer>a<answer>b</answer>c</answer>") == ["b"]


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "}", "<answer>", "\\boxed", "\\", "\\boxed{}", "<answer></answer>"])
def test_a_megabyte_of_any_token_is_scanned_without_piling_up_work(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    assert last_box(text) in (None, "")
    assert strict_answer(text) is None
