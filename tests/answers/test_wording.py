from collections.abc import Callable

import pytest

from rocstar.answers.wording import clean, loose_style, math_style, plain_text, without_names


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (r"\left( 3, \dfrac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
        ("\u20675\u2069", "5"),
        ("5\x00\x07", "5"),
        ("\u22123", "-3"),
        ("π/2", r"\pi /2"),
        (r"\mathrm{e}^x", "e^x"),
        (r"2\mathrm{e}", "2e"),
        (r"k_{\mathrm{B}}", "k_{B}"),
        (r"R_{\odot}^2", "R_{odot}^2"),
        (r"\omega_\odot", r"\omega_{odot}"),
        (r"\sum_{k=\alpha}^n k", r"\sum_{k=\alpha}^n k"),
        (r"\log_{\sqrt{2}} 8", r"\log_{\sqrt{2}} 8"),
        (r"12,\!000", "12,000"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\frac\pi 2", r"\frac{\pi}{2}"),
        (r"\dfrac{n^2} 4", r"\frac{n^2}{4}"),
        (r"\frac{\sqrt{2}}{3}", r"\frac{\sqrt{2}}{3}"),
        (r"\left. x \right|", "x |"),
        (r"\bigcup A", r"\bigcup A"),
        (r"\varnothing", r"\emptyset"),
        ("x**2+2*pi", r"x^2+2*\pi"),
        ("sqrt(2)", r"\sqrt{2}"),
        ("2√3", r"2\sqrt{3}"),
        ("sin(x)^2 + log 2", r"\sin (x)^2 + \log  2"),
        (r"\text{log} x", r"\text{log} x"),
        ("**42**", "42"),
        (r"\textcolor{red}{12}", "12"),
        (r"\bf 12\hspace{1em}", "12"),
        (r"\color{blue}\textbf{12} \checkmark", "12"),
        ("`42`.", "42"),
        ("€5,", r"\text{EUR}5"),
        ("90^{o}", r"90^{\circ}"),
        ("37 ℃", r"37 ^{\circ}C"),
        (r"\approx 10", "10"),
        (r"\text{about }1.5", "1.5"),
        (r"\{ \}", r"\emptyset"),
        ("∅", r"\emptyset"),
        ("2½", r"2\frac{1}{2}"),
        ("10⁻¹²x₁₀", "10^{-12}x_{10}"),
        ("θ+λ+Δ", r"\theta +\lambda +\Delta"),
        (r"{5 \choose 2}", r"\binom{5}{2}"),
        ("≈ 4\uff12", "42"),
        ("2\U0001d465…", "2x..."),
    ],
)
def test_what_nobody_sees_goes(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("style", "first", "second"),
    [
        (math_style, r"\frac12", r"\frac{1}{2}"),
        (math_style, r"90^\circ", "90"),
        (math_style, r"15\text{ cm}^2", "15"),
        (math_style, "1/2", r"\frac{1}{2}"),
        (math_style, r"\$ 5", "5"),
        (math_style, ".5", "0.5"),
        (math_style, r"x \in [0, 1]", "[0,1]"),
        (loose_style, "1 and 2", "1, 2"),
        (loose_style, "3 square feet", "3"),
        (loose_style, "7,425,000", "7425000"),
        (loose_style, "5.0", "5"),
        (loose_style, r"\text{Even}", "even"),
        (loose_style, r"3\frac{1}{2}", "3+1/2"),
        (loose_style, "7 hours", "7"),
    ],
)
def test_a_normalisation_makes_alike(style: Callable[[str], str], first: str, second: str) -> None:
    assert style(first) == style(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [("x", "X"), ("12", "1 2 3"), ("x^2", "x2"), ("(1,2)", "(2,1)"), ("a+b=c", "c"), ("2x=4", "4"), ("1.5", "15"),
     (r"\frac{1}{23}", r"\frac{12}{3}"), ("[0,1)", "[0,1]"), ("-5", "5"), ("5!", "5"), ("1/23", "12/3"), ("5", "5%0"),
     ("x_1", "x1"), ("(1)(2)", "12"), ("1(2)", "12"), (r"\sin x", "x"), (r"a \cup b", "a b"), ("sand", "s")],
)  # fmt: skip
def test_different_answers_stay_different(first: str, second: str) -> None:
    for style in (math_style, loose_style, plain_text, clean):
        assert style(first) != style(second)


@pytest.mark.parametrize(
    ("gold", "predicted", "left"),
    [
        ("x = 90", "90", ("90", "90")),
        ("f(x) = x+1", "y = x+1", ("x+1", "x+1")),
        ("x = 1", "y = 1", ("x = 1", "y = 1")),
        ("x = 1, 2", "x = 1, x = 2", ("1, 2", "x = 1, x = 2")),
        ("D = (0, 1)", "(0, 1)", ("(0, 1)", "(0, 1)")),
        ("2x = 4", "4", ("2x = 4", "4")),
    ],
)
def test_a_name_says_nothing_unless_both_have_one(gold: str, predicted: str, left: tuple[str, str]) -> None:
    assert without_names(gold, predicted) == left
