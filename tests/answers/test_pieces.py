import pytest

from rocstar.answers.pieces import Pieces, take_apart


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (r"(1, \frac{1}{2})", Pieces("(", ")", ("1", r"\frac{1}{2}"))),
        ("[0,1)", Pieces("[", ")", ("0", "1"))),
        (r"\{3, 1\}", Pieces("{", "}", ("3", "1"))),
        ("{3, 1}", Pieces("{", "}", ("3", "1"))),
        ("1, 3", Pieces("", "", ("1", "3"))),
        ("(1,2), (3,4)", Pieces("", "", ("(1,2)", "(3,4)"))),
        (r"1 \text{ and } 3", Pieces("", "", ("1", "3"))),
        ("(0;1);(2;3)", Pieces("", "", ("(0;1)", "(2;3)"))),
        (r"[0,1) \cup (2,3]", Pieces("u", "u", ("[0,1)", "(2,3]"))),
        (r"\pm 3", Pieces("", "", ("3", "-3"))),
        (r"x = \pm 3", Pieces("", "", ("3", "-3"))),
        (r"1 \pm \sqrt{2}", Pieces("", "", (r"1+\sqrt{2}", r"1-\sqrt{2}"))),
        (r"\begin{pmatrix}1&0\\0&2\end{pmatrix}", Pieces("m", "m", ("1&0", "0&2"))),
        (r"[\begin{array}{cc}1 & 0\\0 & 2\end{array}]", Pieces("m", "m", ("1&0", "0&2"))),
        (r"2\mp x", Pieces("", "", ("2+x", "2-x"))),
        (r"(\pm 1, \mp 2)", Pieces("", "", ("(1,-2)", "(-1,2)"))),
        (r"(\pm 1, \pm 2)", Pieces("(", ")", ("1", "-1", "2", "-2"))),
        ("]-2;5]", Pieces("(", "]", ("-2", "5"))),
        (r"]0,1[ \cup ]2,3[", Pieces("u", "u", ("(0,1)", "(2,3)"))),
        (r"\sqrt[3]{5}, -\sqrt[3]{5}", Pieces("", "", (r"\sqrt[3]{5}", r"-\sqrt[3]{5}"))),
        (r"\begin{pmatrix}1&2\end{pmatrix}^T", Pieces("m", "m", ("1", "2"))),
        (r"\begin{vmatrix}1&2\end{vmatrix}", Pieces("v", "m", ("1&2",))),
        ("5", None),
        ("(5)", None),
        ("(x+1)(x+2)", None),
        (r"\frac{1}{2}", None),
        ("f(1,2)", None),
        ("", None),
        ("(1,", None),
        ("1)", None),
    ],
)
def test_answers_are_taken_apart_at_their_brackets(text: str, pieces: Pieces | None) -> None:
    assert take_apart(text) == pieces
