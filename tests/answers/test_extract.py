import pytest

from rocstar.answers.extract import answer_blocks, boxed_answer, lenient_answer, phrase_answer, strict_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{3}, so we get \boxed{4}.", "4"),
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
    assert boxed_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1},\boxed{2},\boxed{3}", "1, 2, 3"),
        (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "(2, 2), (6, 2)"),
        (r"\(y_1 = \boxed{x} \) and \( y_2 = \boxed{3}\)", "x, 3"),
        (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
        (r"\boxed{3} or \boxed{3}", "3"),
        (r"\boxed{3} or even better \boxed{4}", "4"),
        (r"\boxed{1} no no no \boxed{2}", "2"),
        (r"\boxed{7}. Check: \boxed{7}", "7"),
        (r"\boxed{3} \boxed{4}", "4"),
    ],
)
def test_boxes_joined_by_and_or_a_comma_are_one_list(text: str, expected: str) -> None:
    assert boxed_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So the answer is 5.", "5"),
        ("Final Answer: The final answer is $(0, 0)$. I hope it is correct.", "(0, 0)"),
        ("**Answer:** 12\n", "12"),
        ("work\n#### 72", "72"),
        ("work\nA: 5,600", "5,600"),
        ("The answers are $x=5$ or $x=6$.", "$x=5$ or $x=6$"),
        ("Answer: the greatest value is 16386.17", "16386.17"),
        ("the answer is 3. No, the answer is 4.", "4"),
        ("It is 5.", None),
        ("the answer is", None),
        ("A: B", "B"),
        ("an answer to life", None),
    ],
)
def test_an_announced_answer_is_found(text: str, expected: str | None) -> None:
    assert phrase_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{4} was wrong: the final answer is $5$.", "5"),
        (r"\boxed{4}. The final answer is \boxed{5}.", "5"),
        (r"The final answer is 4, that is \boxed{5}", "5"),
        (r"\boxed{4} is my final answer", "4"),
    ],
)
def test_lenient_takes_a_final_statement_after_the_last_box(text: str, expected: str) -> None:
    assert lenient_answer(text) == expected


def test_strict_looks_only_inside_the_last_well_formed_answer_block() -> None:
    assert strict_answer(r"\boxed{1} <answer>\boxed{2}</answer> \boxed{3}") == "2"
    assert strict_answer(r"<answer>\boxed{1}</answer> <answer>\boxed{2}</answer>") == "2"
    assert strict_answer(r"<answer>\boxed{1}</answer> <answer>\boxed{2}") == "1"
    assert strict_answer(r"<answer>\boxed{1}</answer> <answer>two</answer>") is None
    assert strict_answer(r"\boxed{1}") is None
    assert strict_answer("<answer>the answer is 5</answer>") is None
    assert strict_answer(r"</answer>\boxed{1}<answer>") is None
    assert answer_blocks("<answer>a<answer>b</answer>c</answer>") == ["b"], "nested tags make one block"


@pytest.mark.parametrize(
    "unit",
    ["\\boxed{", "{", "}", "<answer>", "\\boxed", "\\", "\\boxed{}", "<answer></answer>", "\\boxed{1},", "answer ",
     "answer\n", "answer is ", "final answer is ",
     "$", " ", "\n", "####", "A:"],
)  # fmt: skip
def test_a_long_text_of_any_token_is_scanned_without_piling_up_work(unit: str) -> None:
    text = "answer" + unit * (200_000 // len(unit))  # by the square this would take hours
    assert strict_answer(text) is None
    found = lenient_answer(text)
    assert found is None or len(found) < 400
