"""The PRIME-style grader, in this process: every question here is one that sympy answers at once."""

import pytest

from rocstar.answers.pieces import take_apart
from rocstar.answers.prime import grade_prime
from rocstar.types import Verdict

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("gold", "predicted", "verdict"),
    [
        ("x^2+2x+1", "(x+1)^2", RIGHT),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", RIGHT),
        (r"\tan^2(y)+1", r"\sec^2(y)", RIGHT),
        ("x=1", "1", RIGHT),
        ("x=1", "y=1", WRONG),
        ("x=3, y=4", "y=4, x=3", RIGHT),
        ("f(x)=x^2", "y=x^2", RIGHT),
        ("[2,5)", r"2 \le x < 5", RIGHT),
        (r"x > 5 \text{ or } x \le 2", r"(-\infty, 2] \cup (5, \infty)", RIGHT),
        (r"[3, \infty)", "x > 3", WRONG),
        ("(1,2)", "2 > x > 1", RIGHT),
        (r"(\frac{1}{3}, \frac{8}{3}]", "(0.3333, 2.6667]", RIGHT),
        (r"(\frac{1}{3}, \frac{8}{3}]", "(0.3333, 2.6668]", WRONG),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", RIGHT),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)", WRONG),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2,3,4)", WRONG),
        ("-1", r"e^{i\pi}", RIGHT),
        (r"\sin 60^\circ", r"\frac{\sqrt{3}}{2}", RIGHT),
        ("x^2+y^2=1", "1-x^2-y^2=0", RIGHT),
        ("x^2+y^2=1", "x^2-y^2=1", WRONG),
        ("(2,1)", "(2,1)", RIGHT),
        ("(2,1)", "(1,2)", WRONG),
        (r"\{1, 2, 3\}", "3, 1, 2", RIGHT),
        (r"\{1, 2, 3\}", r"\{1, 2, 2\}", WRONG),
        ("1, 2", "1", WRONG),
        (r"5\%, 3\%", r"\$5, \$3", WRONG),
        (r"(30^\circ, 60^\circ)", r"(30\%, 60\%)", WRONG),
        (r"5\%, 3\%", "0.05, 0.03", RIGHT),
        (r"30^\circ, \$5", r"\$5, 30", RIGHT),
        (r"\frac{1}{2}, \sqrt{8}", r"2\sqrt{2}, 0.5", RIGHT),
        ("(1,2)", r"\{1,2\}", WRONG),
        (r"(-\infty,1]\cup[10,\infty)", r"[10,\infty) \cup (-\infty, 1]", RIGHT),
        (r"\begin{pmatrix}1&\frac{1}{2}\\0&2\end{pmatrix}", r"\begin{bmatrix}1&0.5\\0&2\end{bmatrix}", RIGHT),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", WRONG),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", WRONG),
        (r"5\text{ m}", r"500\text{ cm}", RIGHT),
        (r"\sqrt{2}", "1.4142", RIGHT),
        (r"\sqrt{2}", "1.42", WRONG),
        (r"25\pi", "78.5", RIGHT),
        (r"25\pi", "78.9", WRONG),
        ("10000", "10001", WRONG),
        (r"10000\sqrt{2}", r"10001\sqrt{2}", WRONG),
        (r"\text{Evelyn}", "evelyn", RIGHT),
        (r"\pm 3", "-3, 3", RIGHT),
        (r"1 \pm \sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}", RIGHT),
        (r"(\pm 1, \mp 2)", "(1,-2), (-1,2)", RIGHT),
        (r"(\pm 1, \mp 2)", "(1,2), (-1,-2)", WRONG),
        (r"(\pm 1, \pm 2)", "(1,-1,2,-2)", RIGHT),
        (r"2\mp x", "2-x, 2+x", RIGHT),
        (r"\{3, 1\}", "{1, 3}", RIGHT),
        ("]-2;5]", "(-2,5]", RIGHT),
        ("x", "[x]", RIGHT),
        ("(0;1);(2;3)", "(2,3),(0,1)", RIGHT),
        (r"]0,1[ \cup ]2,3[", r"(0,1)\cup(2,3)", RIGHT),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", WRONG),
        (r"\begin{pmatrix}1&2\end{pmatrix}^T", r"\begin{pmatrix}1\\2\end{pmatrix}", RIGHT),
        (r"[\begin{array}{cc}1 & 0\\0 & 2\end{array}]", r"\begin{pmatrix}1&0\\0&2\end{pmatrix}", RIGHT),
        ("$1$ and $2$ and $3$", "1, 2, 3", RIGHT),
        ("S/S'", "1", WRONG),
        ("f'(x)+1", "1+f'(x)", RIGHT),
        ("f''(x)+1", "1+f'(x)", UNDECIDED),
        ("2019!", r"2019\cdot 2018!", RIGHT),
        ("1/2004!", "1/2005!", WRONG),
        ("0", r"\frac{1}{2004!}", WRONG),
        ("0", r"(\sqrt{2}-1)(\sqrt{2}+1)-1", RIGHT),
        (r"\sin(\pi)+\sqrt{2}", r"\sqrt{2}", RIGHT),
        (r"\frac{", "5", UNDECIDED),
        ("5", r"1 + \foo{ 5", WRONG),
        ("f(x)=x^2", "x^2", RIGHT),
        (r"n_{\gamma}(\nu)=2A", "2A", RIGHT),
        ("7", "__import__('os').abort()", WRONG),
    ],
)
def test_prime_decides(gold: str, predicted: str, verdict: Verdict) -> None:
    assert grade_prime(gold, predicted)[0] is verdict


@pytest.mark.parametrize(
    ("gold", "predicted", "method"),
    [
        (r"\sqrt{2}", r"\sqrt{3}", "value"),
        (r"\frac{1}{2004!}", r"\frac{1}{2005!}", "value"),
        ("x+1", "x+2", "prime"),
        (r"\sqrt{2}", "x", "prime"),
        ("x=1", r"\sqrt{2}", "value"),
        ("x^2=1", r"\sqrt{2}", "prime"),
        (r"\sqrt{2}, 1", r"\sqrt{2}, 2", "prime"),
    ],
)
def test_only_two_numbers_that_differ_leave_no_room_for_another_opinion(gold: str, predicted: str, method: str) -> None:
    assert grade_prime(gold, predicted) == (WRONG, method)


def test_names_in_brackets_are_looked_for_in_linear_time() -> None:
    assert take_apart("(" + "\\abcde" * 40) is None  # ten took seven seconds, each further one five times as long
