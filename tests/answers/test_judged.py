# ruff: noqa: RUF001
"""The grader on the pairs of answers_judged.jsonl, which three of us judged by hand, on those that further judges found
and on answers in other languages than English. Of the judged pairs `dev` was looked at when rules were made, `held` was
not, and `fresh` was run once before its disagreements were looked at; `dev2`, `held2` to `dev4`, `held4` are halves of
later sets."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rocstar.answers.cases import Case, load_cases, pair_of
from rocstar.answers.grade import Grader, Pair
from rocstar.data.rows import read_rows
from rocstar.types import Verdict

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED
Judged = Sequence[tuple[str, str, Verdict]]
FILE = Path(__file__).with_name("answers_judged.jsonl")


def cases_of(half: str) -> list[Case]:
    cases = load_cases(FILE, read_rows(FILE), text="pred", expected="expected")
    return [case for case in cases if case.columns["half"] == half]


@pytest.mark.parametrize("half", ["dev", "held", "fresh", "dev2", "held2", "dev3", "held3", "dev4", "held4"])
def test_verdicts_are_those_of_a_careful_human(grader: Grader, half: str) -> None:
    cases = cases_of(half)
    verdicts = [grade.verdict for grade in grader.grade_now([pair_of(case) for case in cases])]
    agreed = [verdict is case.expected for verdict, case in zip(verdicts, cases, strict=True)]
    falsely_right = [
        verdict is Verdict.RIGHT and case.expected is Verdict.WRONG
        for verdict, case in zip(verdicts, cases, strict=True)
    ]
    assert sum(falsely_right) == 0
    assert sum(agreed) / len(cases) >= 0.95


SECOND_AND_FOURTH: Judged = [
    *((gold, predicted, WRONG) for gold, predicted in (
        ("8", "2n=8"), ("8", "n+1=8"), ("25", "12\\times2=25"), ("9", "8=9"), ("8", "x\\le8"), ("8", "8\\ne9"),
        ("2011!", "2011!+C"), ("10^{30}", "10^{30}+x"), ("e^{100}", "e^{100}+1"),
        ("p\\lor q", "p\\land q"), ("x<2\\text{ or }x>5", "x<2\\text{ and }x>5"), ("(2,5)", "x>2\\text{ or }x<5"),
        ("(1)(2)(4)", "(2)(4)"), ("(1)(4)", "(2)(3)"), ("(1)(4)", "4"),  # statements that hold
        ("12", "2(10)"), ("11/4", "2(3/4)"), ("\\lvert x\\rvert<1", "-1\\le x\\le1"), ("|x|<1", "\\lvert y\\rvert<1"),
        ("|x|>1", "x<-1\\text{ or }x\\ge1"), ("|x|>1", "y<-1\\text{ or }y>1"), ("|x+2|<1", "1<x<3"), ("|x-2|<1", "x<3"),
        ("|z|>1", "z<-1\\text{ or }z>1"), ("(0,0)", "|x|<0"), ("|x|<2+1", "-2+1<x<2+1"),
        ("|\\alpha|<1", "-1<\\beta<1"), ("|x_1|<2", "-2<x_2<2"), ("|x_1|<2", "-2<x<2"),
        ("21", "x\\equiv3(7)"), ("x\\equiv3(7)", "x=21"), ("x\\equiv3(7)", "x\\equiv3(8)"),
        ("18\\text{ square units}", "18\\text{ cubic units}"), ("12\\text{ units}", "12\\text{ units}^2"),
        ("20\\%", "20\\text{‰}"), ("\\{1,2\\}", "\\{1,2,\\ldots\\}"), ("8", "8\\ldots"), ("23322_4", "23322_2"),
        ("7", "7\\text{ or so}"), ("7", "7\\text{ at most}"), ("7", "7\\text{ and more}"), ("7", "7\\text{-ish}"),
        ("E", "(E)\\text{ or }7"), ("\\text{no solution}", "0"), ("\\text{€}12", "\\$12"),
    )),
    *((gold, predicted, RIGHT) for gold, predicted in (
        ("\\frac13", "x=\\frac13\\approx0.333"), ("0.333", "\\frac13\\approx0.333"), ("6", "3!=6"), ("5", "a+b=5"),
        ("12", "\\text{Area}=12\\text{ cm}^2"), ("45^\\circ", "\\angle ABC=45^\\circ"), ("0.5", "P(X>2)=\\frac12"),
        ("(2,5)", "x>2\\text{ and }x<5"), ("-1<a<1", "|a|<1"), ("\\{x\\in\\mathbb{R}:x\\ge3\\}", "[3,\\infty)"),
        ("(2,5)", "P(2,5)"), ("\\begin{pmatrix}5&-2\\\\0&1\\end{pmatrix}", "[[5,-2],[0,1]]"),
        ("\\begin{pmatrix}1\\\\-1\\end{pmatrix}", "(1,-1)^T"), ("3:2", "3\\text{ to }2"), ("7", "7^{\\text{th}}"),
        ("7", "7;"), ("7", "\\text{seven}"), ("35\\%", "\\text{thirty-five percent}"), ("7", "\\text{Total: }7"),
        ("\\infty", "\\text{infinity}"), ("\\text{no solution}", "\\emptyset"), ("cube", "\\text{It is a cube.}"),
        ("\\text{diverges}", "\\text{The series diverges}"), ("\\text{8:00 AM}", "8:00\\text{ a.m.}"),
        ("\\text{does not exist}", "\\text{DNE}"), ("\\text{(B) }12", "12"), ("A, C", "AC"), ("I", "\\text{I}"),
        ("C", "\\text{C only}"), ("D", "\\text{I choose D}"),
        *((gold, f"{bars}<1") for gold in ("-1<x<1", "|x|<1") for bars in (
            "\\lvert x\\rvert", "\\left|x\\right|", "\\vert x\\vert", "\\left\\lvert x\\right\\rvert",
        )),
        ("|x|>1", "x<-1\\text{ or }x>1"), ("x\\le1\\text{ or }x\\ge4", "\\lvert2x-5\\rvert\\ge3"), ("1<x<3", "|2-x|<1"),
        ("|\\alpha|>1", "\\alpha<-1\\text{ or }\\alpha>1"), ("|x_1|<2", "-2<x_{1}<2"),
        ("x\\equiv3\\pmod7", "x≡10 (7)"), ("x\\equiv 3 (7)", "3 \\bmod 7"), ("n\\equiv1,4\\pmod5", "n\\equiv 4, 1 (5)"),
        ("-1<x<1", "|x|\\lt1"), ("\\lvert x\\rvert\\le1", "-1\\le x\\le1"),
        ("(1)(2)(4)", "(1) (2) (4)"), ("(1)(2)(4)", "(1), (2), (4)"),
        ("20", "2(10)"), ("20", "(2)(10)"), ("20", "2\\left(10\\right)"), ("\\frac32", "2(3/4)"), ("24", "2(3)(4)"),
        ("8\\text{ ohms}", "8\\ \\Omega"), ("\\pounds 30", "30"), ("\\text{€}12", "12\\text{ EUR}"),
        ("\\$10\\text{ per hour}", "10\\text{ dollars/hour}"),
    )),
    # A fourth judge's.
    *((gold, predicted, WRONG) for gold, predicted in (
        ("2,5", "(2,5)"), ("1,2,3", "(1,2,3)"), ("[1,\\infty)", "[1,\\infty]"), ("(-\\infty,2]", "[-\\infty,2]"),
        ("f(x)=x^2", "f(a)=x^2"), ("f(x)=x^2", "g(x)=x^2"), ("\\{1,0\\}", "1,000"), ("1,0", "1,000"),
        ("1234567", "1234\\,567"), ("1234", "12\\,34"), ("12", "1\\,2"), ("204_5", "1204_3"),
        ("2\\frac34", "2\\left(\\frac34\\right)"), ("\\sin30^\\circ", "\\sin30"),
        ("20\\%", "20\\text{ percentage points}"), ("5", "5,0"), ("1,024", "2^{11}"),
        ("\\{x\\mid x>2\\}", "\\{y\\mid y<2\\}"),
    )),
    *((gold, predicted, RIGHT) for gold, predicted in (
        ("x=2,\\ y=5", "(2,5)"), ("A, C", "(A, C)"), ("[1,\\infty]", "[1,\\infty)"), ("f(x)=x^2", "y=x^2"),
        ("12000", "12{,}\\!000"), ("3.14159265", "3.141\\,592\\,65"), ("\\frac32", "(2)(\\frac34)"),
        ("D", "\\text{D: }\\frac{3}{4}"), ("48", "{\\bf 48}"), ("12", "12\\enspace"), ("12", "12\\\\[4pt]"),
        ("10", "\\cong 10"), ("1.2\\text{ kWh}", "1200\\text{ Wh}"),
        ("5\\mu\\text{m}", "5\\times10^{-6}\\text{ m}"),
        ("ABD", "A,B,D"), ("5", "5,00"), ("1,024", "2^{10}"), ("7", "7\\tag{1}"), ("7", "\\text{exactly }7"),
        ("\\{x\\mid x>2\\}", "\\{y\\mid y>2\\}"),
    )),
]  # fmt: skip
"""Of these a second and a fourth judge."""
THIRD_WRONG = [
    # Formulas that differ in one place only, far from 0.
    ("\\lfloor n/10\\rfloor", "\\lfloor n/20\\rfloor"), ("100-x", "|x-100|"), ("|x-5|", "5-x"),
    ("n", "\\max(n,-9)"),
    ("100", "\\max(x,100)"), ("\\min(n,100)", "n"), ("\\lceil n/2\\rceil", "\\lfloor n/2\\rfloor+1"),
    ("x-50", "\\sqrt{(x-50)^2}"), ("\\lfloor x\\rfloor", "\\lfloor x+0.01\\rfloor"), ("a", "\\max(a,b-99)"),
    # A mixed number has one sign.
    ("-1\\frac12", "-1+\\frac12"), ("3x-1\\frac12", "3x-1+\\frac12"), ("2\\cdot1\\frac12", "2\\cdot1+\\frac12"),
    # Capitals are other letters.
    ("\\Delta", "\\delta"), ("2\\Phi(1)-1", "2\\phi(1)-1"), ("3\\Sigma", "3\\sigma"),
    ("nk", "NK"), ("AB", "aB"), ("PV", "pv"),
    # A transposed matrix is another.
    ("A^T", "A"), ("A^{T}", "A"), ("A^\\top", "A"), ("AB^T", "AB"), ("A_1^T", "A_1"), ("(A+B)^T", "A+B"),
    ("x^Tx", "x^2"),
    # "or" leaves open which.
    ("A, C", "A\\text{ or }C"), ("2\\text{ and }3", "2\\text{ or }3"), ("2,3", "2\\text{ or }3"),
    # Words behind a number that change it.
    *(("25\\%", f"25\\text{{ {words}}}") for words in ("bps", "ppm", "per mille", "basis points", "fold", "ppb")),
    *(("12", f"12\\text{{ {words}}}") for words in (
        "squared", "cubed", "factorial", "halves", "thirds", "hundredths", "dozens", "lakh", "crore", "bn", "gross",
        "score", "and a half", "plus one", "below zero", "(base 3)", "is wrong", "is incorrect", "is impossible",
        "is too small", "excluded", "is false",
    )),
    ("2024", "2024\\text{ BC}"), ("2\\text{ hours}", "2\\text{ hours ago}"),
    # A hundredth.
    ("\\pi", "\\pi\\%"), ("x", "x\\%"), ("12", "12\\%\\%"), ("\\sqrt2", "\\sqrt2\\text{ percent}"),
    ("0.000001", "0.0000001"), ("0.0000012", "0.0000014"),
]  # fmt: skip
THIRD_RIGHT = [
    ("|x-5|", "|5-x|"), ("\\sqrt{x^2}", "|x|"), ("\\max(a,b)", "\\frac{a+b+|a-b|}{2}"),
    ("|x+1|", "\\frac{|x^2-1|}{|x-1|}"),
    ("\\lceil n/2\\rceil", "-\\lfloor -n/2\\rfloor"), ("\\lfloor 2^n\\rfloor", "\\lfloor 2\\cdot2^{n-1}\\rfloor"),
    ("-1\\frac12", "-\\frac32"), ("3x-1\\frac12", "3x-\\frac32"), ("x+1\\frac12", "x+\\frac32"),
    ("\\text{Red}", "red"), ("Even", "even"), ("TRUE", "\\text{true}"), ("Tuesday", "tuesday"),
    ("A^T", "A^{\\top}"), ("x^Tx", "x^\\top x"), ("(AB)^T", "B^TA^T"), ("P(1+r)^T", "P(r+1)^T"),
    ("2,3", "x=2\\text{ or }x=3"), ("2\\text{ or }3", "2,3"), ("\\pm2", "2\\text{ or }-2"),
    ("2,3", "2\\text{ and }3"),
    *(
        ("12", f"12\\text{{ {words}}}")
        for words in ("cm squared", "months", "quarters", "offspring", "is the answer")
    ),
    ("1200000", "12\\text{ lakh}"), ("36", "3\\text{ dozens}"), ("\\frac{\\pi}{100}", "\\pi\\%"),
    ("\\pi\\%", "\\pi"),
    ("20", "20\\%"), ("30\\%\\text{ more}", "30\\%"), ("0.333333", "\\frac13"), ("3.141593", "\\pi"),
    ("0.0000001", "10^{-7}"),
    ("2^{10}", "1,024"), ("20!", "2,432,902,008,176,640,000"), ("\\mathbb{R}", "\\mathbb R"),
    ("5", "\\color{red}{5}"),
]  # fmt: skip
SECOND_ANSWER = [
    *(("42", f"42\\text{{{words}}}") for words in (
        " (or 41)", ", otherwise 41", " alternatively 41", " vs. 41", " instead of 41", " if even", " (41)"
    )),
    ("42", "42\\text{ (or }41\\text{)}"), ("42", "42\\mathrm{ or so}"), ("42", "!=42"), ("42", "? = 42"),
    ("5\\text{ cm}", "5\\text{ cm}, 6\\text{ cm}"), ("5", "5\\text{ cm}, 6"),
    ("25\\pi", "25\\pi\\text{ cm or }24\\pi"), ("5\\text{ cm}", "5\\text{ cm}_{\\text{or }6}"),
    ("\\frac34", "\\frac34\\text{ to }\\frac14"), ("\\frac34", "\\frac34\\text{-}\\frac14"),
    ("\\frac13", "1/3_{0.4}"), ("x^2+1", "x^2+1_{x^2-1}"), ("x+1", "x+1\\text{ (or }x-1\\text{)}"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}'"),
    ("A", "A\\text{/B}"), ("A", "A\\text{ (or B)}"), ("A", "A\\text{, alternatively C}"),
    ("\\text{yes}", "\\text{yes; unknown}"), ("\\text{yes}", "\\text{yes, a guess; perhaps neither}"),
]  # fmt: skip
"""A second answer beside the first is not dropped."""
LANGUAGES: dict[str, Judged] = {
    "digits and signs": [
        ("42", "٤٢", RIGHT),
        ("3.5", "٣٫٥", RIGHT),
        ("٣٫٥", "3.6", WRONG),
        ("1234", "١٬٢٣٤", RIGHT),
        ("1, 2, 3", "1、2、3", RIGHT),
        ("ℝ", r"\mathbb{R}", RIGHT),
        ("ℝ", r"\mathbb{Z}", WRONG),
        ("ℝ∖{0}", r"\mathbb{R}\setminus\{0\}", RIGHT),
        ("10 \u00b5m", r"0.01\text{ mm}", RIGHT),
        ("10 \u00b5m", "10 mm", WRONG),
        ("25℃", "25 °C", RIGHT),
        ("5", "5∫x", WRONG),
        ("2", "2→x", WRONG),
        ("3", "3⊕A", WRONG),
    ],
    "words": [
        ("是", "否", WRONG),
        ("北京", "北京", RIGHT),
        ("北京", "42", WRONG),
        ("да", "Да", RIGHT),
        ("да", "нет", WRONG),
        ("हाँ", "नहीं", WRONG),
        ("ja", "Ja", RIGHT),
        ("M\u00fcller", "Mu\u0308ller", RIGHT),
        ("🍎", "🍐", WRONG),
        ("四十二", "42", UNDECIDED),  # nobody can read it; "words" would make the right number wrong
    ],
    "units": [
        ("5", "5元", RIGHT),
        ("5", r"5\text{ Äpfel}", RIGHT),
        ("5 Stück", "5", RIGHT),
        ("5个", "6", WRONG),
        ("5元", "5美元", WRONG),
        ("3米", "3厘米", WRONG),
        ("3 🍎", "3 🍐", WRONG),
        ("4500元", "4,500元", RIGHT),
        ("7.5 км", "7,5 км", RIGHT),
        ("2.5", r"2,5\text{ Äpfel}", RIGHT),
        ("25", r"2,5\text{ Äpfel}", WRONG),
        ("7.5 км", "7,5 м", WRONG),
        ("2.5", "2,5万", WRONG),
        (r"3\text{千米}", "3", RIGHT),
        (r"3\text{千米}", r"3\text{ km}", RIGHT),
    ],
    "other numbers": [
        ("5", r"5\text{万}", WRONG),
        ("5", "5万", WRONG),
        ("5", r"5\text{ Millionen}", WRONG),
        ("5", r"5\text{ mil}", WRONG),
        ("5", "5 тысяч", WRONG),
        ("5", r"5\text{ Drittel}", WRONG),
        ("5", "5以上", WRONG),
        ("5", "5割", WRONG),
        ("5", "5 triệu", WRONG),
        ("5", "5倍", RIGHT),
        ("5", r"5\text{ oder 6}", WRONG),
        ("5万", "5", UNDECIDED),
        (r"5\text{万}", r"5\text{ 万}", RIGHT),
    ],
    "names with an index": [
        ("x_1=1, y_1=2", "x_1=2, y_1=1", WRONG),
        ("x_1=1, y_1=2", "y_1=2, x_1=1", RIGHT),
        ("x_1 = 5", "x = 5", RIGHT),
    ],
}
SPELLINGS: Judged = [
    *((gold, predicted, WRONG) for gold, predicted in (
        ("5 m", "5 s"), ("$5m$", "$5s$"), ("5\\,m", "5\\,g"), ("2 h", "2 s"), ("2\\pi m", "2\\pi s"),
        ("\\frac12 m", "\\frac12 s"), ("x m", "x s"),
        ("5 m\\Omega", "5 M\\Omega"), ("3 \\mu m", "3 m"), ("\\operatorname{arctan} 1", "\\arcsin 1"),
        ("\\log_e 2", "\\log_2 2"), ("m = 1", "1 = n"), ("m = 1", "2 = m"),
        ("51_{(10)} = 201_{(5)}", "51_{10} = 202_5"), ("10_2 + 11_2", "10_2 + 11_3"),
    )),
    *((gold, predicted, RIGHT) for gold, predicted in (
        ("a + s", "s + a"), ("m^2 - s^2", "(m-s)(m+s)"), ("4.7 k\\Omega", "4700\\ \\Omega"), ("4700 \\Omega", "4.7 kΩ"),
        ("4700\\text{ ohms}", "4.7\\,\\text{k}\\Omega"), ("5\\Omega", "5\\text{ ohm}"),
        ("3 \\mu m", "0.003\\text{ mm}"), ("3\\mu\\mathrm{s}", "3000\\text{ ns}"), ("\\mu m g", "m g\\mu"),
        ("\\log_e 2", "\\ln 2"), ("2\\log_e x", "2\\ln x"), ("\\operatorname{arctan} 1", "\\pi/4"),
        ("\\mathrm{sin} x", "\\sin x"), ("m = 1", "1 = m"), ("d = \\frac{1 + n}{2}", "\\frac{n + 1}{2} = d"),
        ("51_{(10)} = 201_{(5)}", "51_{10} = 201_5"), ("(\\frac15, 2)", "\\\\left( \\\\frac{1}{5}, 2 \\\\right)"),
        ("\\begin{bmatrix}1\\\\[2mm]2\\end{bmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    )),
]  # fmt: skip
OTHER_SPELLINGS: Judged = [
    *((gold, predicted, WRONG) for gold, predicted in (
        ("\\frac18", "-\\[\n\\frac18\n\\]"), ("x + 1", "y -\n(x + 1)"), ("111, \\! 111, \\! 111", "111, \\! 111"),
        ("x^2 - 12x + 100 = 0", "x^2 - 13x + 100 = 0"), ("x^2+y^2=4", "x^2+y^2=5"), ("x^2+1=0", "x^2+2=0"),
        ("x^2+1=0", "y^2+1=0"), ("x^4+x^2+1=0", "x^4+1=0"), ("\\sqrt{10}", "√11"), ("\\sqrt{1}", "√10"),
        ("6:03", "\\[6:30\\]"), ("\\text{even}", "\\(\\text{odd}\\)"), ("1.2.3", "\\(1.2.4\\)"),
        ("\\text{two lines}", "three lines"), ("\\text{five students}", "students"),
        ("\\text{two lines}", "one line"), ("\\text{two lines}", "not two lines"),
    )),
    *((gold, predicted, RIGHT) for gold, predicted in (
        ("x^2-12x+100=0", "2x^2-24x+200=0"), ("x^2-12x=-100", "x^2 - 12x + 100 = 0"), ("x^2 = 4", "x^2 - 4 = 0"),
        ("2x - 3y = 6", "y = \\frac{2x-6}{3}"), ("y = 2x+1", "2x - y + 1 = 0"), ("xy = 1", "y = 1/x"),
        ("5+\\sqrt{356}", "5 + √356"), ("\\sqrt{10}", "√10"), ("3\\sqrt{15}", "3√15"), ("\\sqrt{x+1}", "√(x+1)"),
        ("\\sqrt{10}/2", "√10/2"), ("\\sqrt{2}", "√2"), ("\\sqrt{2}+1", "√2 + 1"), ("\\sqrt{12}", "√ 12"),
        ("\\frac{\\sqrt{13}}{2}", "√13/2"), ("09:38", "\\[ 09:38 \\]"), ("6:03", "\\( 6:03 \\)"),
        ("2026-04-03", "\\(2026-04-03\\)"), ("09:38", "$09:38$"), ("\\text{even}", "\\[ \\text{even} \\]"),
        ("\\text{two lines}", "two lines"), ("two lines", "Two lines"), ("\\text{five students}", "five students"),
        ("\\text{two}", "two"), ("2", "two"), ("\\text{two lines}", "two"),
    )),
]  # fmt: skip
HOSTILE: Judged = [
    *((gold, predicted, WRONG) for gold, predicted in (
        ("\\frac{x}{2}", "X/2"), ("\\frac43\\pi r^3", "4\\pi R^3/3"), ("\\frac{\\pi}{3}", "Π/3"),
        ("2^{20}", "1048575.0"), ("\\binom{20}{10}", "184755.5"), ("1-\\frac{1}{2^{2024}}", "1.0"),
        ("12345678901", "12345678901.9999999"), ("10^{12}", "1000000000500.000000"),
        *(("\\frac38", f"\\frac38{link}\\frac58") for link in (
            "\\textbf{or}", "\\mathit{or}", "\\text{ then }", "\\text{ i.e. }", "\\text{ but also }"
        )),
        *(("42", f"42\\text{{ {words}}}") for words in (
            "to 45", "out of 50", "times 10", "(41 also works)", "and up", "twice", "times x", "in octal", "quadrillion"
        )),
        *(("42", f"42 {words}") for words in ("xyz", "sin", "zeta", "roots", "quintillion", "negative")), ("Rr", "rr"),
        ("42", "42 apples or 43"), ("42", "42 times x"), ("42", "42 over two"), ("42", "43 lattice points"),
        ("18\\text{ apples}", "18 eggs"), ("30^\\circ", "30″"), ("1101_2", "1101_{\\text{three}}"), ("B", "B, then C"),
        ("x>2", "\\{x\\mid x\\ge2\\}"), ("2\\le x<5", "x>2\\text{ and }x<5"), ("x\\ne0", "x\\not=1"),
        ("-\\frac{dV}{dr}", "0"), ("\\frac{\\partial f}{\\partial x}", "\\frac{\\partial f}{\\partial y}"),
        ("\\frac12x", "1\\frac12x"), ("\\frac32\\pi", "3\\frac12\\pi"), ("x", "2\\frac12x"),
        ("\\sqrt{\\frac km}", "\\frac{\\sqrt m}{\\sqrt k}"), ("x\\sqrt y", "\\sqrt{x^2y}"), ("\\sqrt x", "\\sqrt{|x|}"),
        ("\\vec a\\times\\vec b", "\\vec a\\cdot\\vec b"), ("\\vec a\\times\\vec b", "\\vec b\\times\\vec a"),
        ("\\angle ABC", "\\angle ACB"), ("\\gamma(x)", "\\Gamma(x)"),
        ("\\sqrt{12}", "\\sqrt{1 2}"), ("F_{n-1}", "F_n-1"), ("\\binom{24}{12}^2", "\\binom{24}{12^2}"),
        ("\\frac{x-1}{n}-1", "\\frac{x-1}{n-1}"), ("-f(-y)", "yf"), ("f^{-1}(y)", "\\frac{1}{f(y)}"),
        ("E(X^2)", "EX^2"),
        ("A^T", "(A^T)^T"), ("(1+r)^T", "1+r"), ("2(a^Tx)a", "2(a^Ta)x"), ("0.25\\cdot3986^2", "3972049.25"),
        ("2\\cdot21=42", "2\\cdot21=43"), ("a=b=c=0", "a=b=0"), ("(m,n)=(4,2)", "n=4,m=2"),
        ("(2,-1)", "2\\vec i+\\vec j"),
        ("\\pm2x+1", "\\pm(2x+1)"), ("n=1\\text{ or }n\\equiv2\\pmod4", "n=1\\text{ and }n\\equiv2\\pmod4"),
        ("1201_{-3}", "1201_3"), ("12^\\circ", "12_5"), ("42", "42\\text{ kilo}"),
    )),
    *((gold, predicted, RIGHT) for gold, predicted in (
        ("2^{20}", "1048576.0"), ("\\left(\\frac23\\right)^{10}", "0.0173415"), ("\\frac{\\pi^2}6", "1.6449"),
        ("42", "42 lattice points"), ("42", "42 people in total"), ("42", "42\\text{ times as many}"),
        ("0.667", "0.667\\text{ (3 s.f.)}"), ("42", "42 hexagons"), ("1.5\\times10^8", "1.5 x 10^8"),
        ("1101_2", "1101_{\\text{two}}"), ("x>2", "\\{x\\mid x>2\\}"), ("2\\le x<5", "x\\ge2\\text{ and }x<5"),
        ("2\\le x<5", "5>x\\ge2"), ("x\\ne0", "x\\not=0"), ("\\mathbb{R}\\setminus\\{1\\}", "\\mathbb R-\\{1\\}"),
        ("2\\pi\\sqrt{\\frac lg}", "2\\pi\\frac{\\sqrt l}{\\sqrt g}"), ("\\sqrt{\\frac km}", "k^{1/2}m^{-1/2}"),
        ("\\frac72\\pi", "3\\frac12\\pi"), ("L\\frac{dI}{dt}+RI", "RI+L\\frac{dI}{dt}"), ("2x", "\\frac{dy}{dx}=2x"),
        ("\\rho AC_d", "C_d\\rho A"), ("\\frac{q}{\\varepsilon_0}", "\\frac{1}{\\epsilon_0}q"),
        ("\\lceil x\\rceil+\\lfloor y\\rfloor", "⌈x⌉+⌊y⌋"), ("(3,-1)", "⟨3,−1⟩"),
        ("(2,-1)", "2\\mathbf i-\\mathbf j"), ("2\\hat{i}-x\\hat{k}", "(2,0,-x)"), ("2\\cdot21=42", "42"),
        ("A^T", "A^\\top"), ("m\\cdot g\\cdot h", "m\\times g\\times h"), ("\\frac12h(a+b)", "\\frac{(a+b)h}2"),
        ("a=b=c=0", "a=0,b=0,c=0"), ("(m,n)=(4,2)", "m=4,n=2"), ("a<0\\text{ or }a=1", "(-\\infty,0)\\cup\\{1\\}"),
        ("\\frac17\\triangle ABC", "\\frac{\\triangle ABC}7"), ("\\binom{2n}k", "\\binom{2n}{k}"),
        ("\\mbox{four}", "4"),
        ("\\frac{\\sqrt3}{2}\\times100\\%", "50\\sqrt3\\%"), ("x+22", "x+22\\text{ for all }x"),
        ("05\\!:\\!00", "05:00"),
        ("\\frac{-3\\pm\\sqrt{17}}4", "x=\\frac{-3+\\sqrt{17}}4,\\ x=\\frac{-3-\\sqrt{17}}4"),
    )),
]  # fmt: skip
LISTS: dict[str, Judged] = {
    "found by an attack on the rules": HOSTILE,
    "references of published sets in spellings made by rules": OTHER_SPELLINGS,
    "letters that math-verify takes for units, and names in other spellings": SPELLINGS,
    "a second and a fourth judge": SECOND_AND_FOURTH,
    "wrong, of a third judge": [(*pair, WRONG) for pair in THIRD_WRONG],
    "right, of a third judge": [(*pair, RIGHT) for pair in THIRD_RIGHT],
    "a second answer beside the first": [(*pair, WRONG) for pair in SECOND_ANSWER],
    **LANGUAGES,
}


@pytest.mark.parametrize("name", LISTS)
def test_an_answer_gets_the_verdict_of_its_meaning(grader: Grader, name: str) -> None:
    pairs = LISTS[name]
    grades = grader.grade_now([Pair(gold=gold, predicted=predicted) for gold, predicted, _ in pairs])
    assert [(gold, said, grade.verdict) for (gold, said, _), grade in zip(pairs, grades, strict=True)] == pairs
