import pytest

from rocstar.answers.caps import refusal


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x+" * 501, "too_long"),
        ("(" * 41 + "x", "too_deep"),
        (r"\frac{1}{" * 41 + "x", "too_deep"),
        ("9^{9^{9^{9}}}", "too_big"),
        ("9^{9^{9}}", "too_big"),
        ("9^9^9^9", "too_big"),
        ("10^{999999999}", "too_big"),
        ("2^{-99999}", "too_big"),
        ("100000!", "too_big"),
        ("(1+2)^{12345+1}", "too_big"),
        ("((10!)!)!", "too_big"),
        ("2^{1000000}+1", "too_big"),
    ],
)
def test_what_would_explode_is_refused(text: str, reason: str) -> None:
    assert refusal(text) == reason


@pytest.mark.parametrize(
    "text",
    ["", "5", "2^{10}", "2^{2^{10}}", "10^{100}", "2^{2021}", "2021^{3}", "(3!)!", "2022!", "1999^{1999}",
     r"\frac{10!}{8!}", "x^{y^{z}}", "e^{x^2}", "x^{2}y^{3}", "((((((((((x))))))))))", "}}}}",
     r"\left(\frac{1}{2}\right)^{100}"],
)  # fmt: skip
def test_what_references_hold_is_let_through(text: str) -> None:
    assert refusal(text) is None
