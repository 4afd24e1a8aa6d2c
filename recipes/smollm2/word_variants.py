"""Word problems asked in another way: variants of training questions, whose programs are known as we make the change.

The kinds follow what SVAMP's authors say theirs do (arXiv 2103.07191, section 4): other numbers, a sentence that does
not matter, another question, another unknown. Nothing here was made by looking at SVAMP's own questions.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import NamedTuple

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
COUNTED = re.compile(r"(?<![$%] )\b(\d+) ([a-z]+s)(?= (?:[.,]|and|in|on|at|from|for|to|of|with|that|which)(?: |$))")
DEED = re.compile(
    r"^(?!There|They|The|He|She|It|You|We)(?P<who>[A-Z][a-z]+) (?P<verb>[a-z]+) "
    r"(?P<number>\d+) (?P<what>(?:[a-z]+ )?[a-z]+s)\b"
)
SENTENCES = re.compile(r"(?<= [.?]) ")
NAMES = ("Alyssa", "Dan", "Fred", "Jack", "Joan", "Mary", "Mike", "Nancy", "Paul", "Robin", "Sara", "Tim", "Tom")
BASES: Mapping[str, str] = {
    "has": "have", "had": "have", "found": "find", "bought": "buy", "sold": "sell", "grew": "grow", "made": "make",
    "ate": "eat", "got": "get", "saw": "see", "caught": "catch", "took": "take", "won": "win", "drew": "draw",
    "gave": "give", "lost": "lose", "used": "use", "collected": "collect", "picked": "pick", "baked": "bake",
    "planted": "plant",
}  # fmt: skip
LESS = ("gave {n} {what} to {other}", "lost {n} {what}", "sold {n} {what}", "used {n} {what}", "ate {n} {what}")
MORE = ("bought {n} more {what}", "found {n} more {what}", "got {n} more {what} from {other}", "made {n} more {what}")

SIGNED_SHARE = 0.1
"""Of the questions that may get a variant whose answer may be below zero: 1 of 100 questions then is one. It is enough
to make leaving out a minus sign cost answers; where 1 of 9 was, they were all right from the first RL step on, and took
a ninth of the attempts for nothing."""

WORKED_OUT: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}


class Asked(NamedTuple):
    """A question, and the expression that answers it."""

    question: str
    expression: str


class Variants:
    """Draws variants of questions; `questions` are all there are, whose nouns it talks about."""

    def __init__(self, questions: Sequence[str]) -> None:
        counts = Counter(noun for question in questions for noun in {match[2] for match in COUNTED.finditer(question)})
        self._things = sorted(noun for noun, count in counts.items() if count >= 3)

    def of(self, asked: Asked, rng: random.Random) -> Iterator[Asked]:
        """At most one of each kind. Half of them get a sentence that does not matter besides."""
        kinds: Sequence[Callable[[Asked, random.Random], Asked | None]] = (
            other_numbers,
            other_question,
            other_unknown,
            comparison,
            *([signed] if rng.random() < SIGNED_SHARE else []),
        )
        for found in (asked, *(kind(asked, rng) for kind in kinds)):
            distracted = self.distracted(found, rng) if found and (found is asked or rng.random() < 0.5) else None
            if distracted or (found and found is not asked):
                yield distracted or found

    def distracted(self, asked: Asked, rng: random.Random) -> Asked | None:
        """One of its sentences stands there again, about a thing that the question does not ask for."""
        *sentences, last = SENTENCES.split(asked.question)
        needed = NUMBER.findall(asked.expression)
        places = [
            (place, match)
            for place, sentence in enumerate(sentences)
            for match in COUNTED.finditer(sentence)
            if NUMBER.findall(sentence) == [match[1]] and match[1] in needed and f" {match[2]} " in last
        ]
        others = [thing for thing in self._things if thing not in asked.question]
        if not places or not others:
            return None
        place, match = rng.choice(places)
        sentence, number = sentences[place], _unlike(match[1], asked.question, rng)
        again = f"{sentence[: match.start()]}{number} {rng.choice(others)}{sentence[match.end() :]}"
        sentences.insert(place + rng.randrange(2), again)
        return Asked(" ".join([*sentences, last]), asked.expression)


def other_numbers(asked: Asked, rng: random.Random) -> Asked | None:
    """The story with other numbers of as many digits; the answer stays positive, and whole if it was."""
    written = list(dict.fromkeys(NUMBER.findall(asked.question)))
    if any("." in number for number in written) or not {*NUMBER.findall(asked.expression)} <= {*written}:
        return None
    for _ in range(20):
        new = {number: _like(number, rng) for number in written}
        changed = Asked(*(_renamed(text, new) for text in asked))
        before, answer = value_of(asked.expression), value_of(changed.expression)
        if before is None or answer is None or answer <= 0:
            continue
        whole = answer.denominator == 1 or before.denominator > 1
        if len({*new.values()}) == len(new) and whole and changed != asked:
            return changed
    return None


def other_question(asked: Asked, rng: random.Random) -> Asked | None:
    """Of two who did alike: how many more or fewer one did, or how many both."""
    deed = DEED.match(asked.question)
    if not deed or deed["verb"] not in BASES:
        return None
    who, verb, a, what = deed.groups()
    other, b, base = _other_name(who, rng), _unlike(a, asked.question, rng), BASES[verb]
    (low, less), (high, more) = sorted(((a, who), (b, other)), key=lambda pair: int(pair[0]))
    do, does = ("do", "does") if verb == "has" else ("did", "did")
    sentences = [f"{who} {verb} {a} {what} .", f"{other} {verb} {b} {what} ."]
    rng.shuffle(sentences)
    question, expression = rng.choice(
        (
            (f"How many more {what} {does} {more} {base} than {less} ?", f"{high}-{low}"),
            (f"How many fewer {what} {does} {less} {base} than {more} ?", f"{high}-{low}"),
            (f"How many {what} {do} they {base} together ?", f"{a}+{b}"),
        )
    )
    return Asked(" ".join([*sentences, question]), expression)


def other_unknown(asked: Asked, rng: random.Random) -> Asked | None:
    """Somebody has things and gets or loses some: asked for the end, the start or the change."""
    deed = DEED.match(asked.question)
    if not deed or int(deed["number"]) < 2:
        return None
    who, a, what = deed["who"], int(deed["number"]), deed["what"]
    less = rng.random() < 0.5
    b = rng.randrange(1, a) if less else int(_like(deed["number"], rng))
    deeds, end, sign, back = (LESS, a - b, "-", "+") if less else (MORE, a + b, "+", "-")
    form, other = rng.choice(deeds), _other_name(who, rng)
    change, some = (form.format(n=n, what=what, other=other) for n in (b, "some"))
    start, ends = f"{who} had {a} {what} .", f"Now {who} has {end} {what} ."
    how = f"How many {what}"
    lost = f"{max(a, end)}-{min(a, end)}"
    question, expression = rng.choice(
        (
            (f"{start} {who} {change} . {how} does {who} have now ?", f"{a}{sign}{b}"),
            (f"{who} had some {what} . {who} {change} . {ends} {how} did {who} have at first ?", f"{end}{back}{b}"),
            (f"{start} {who} {some} . {ends} {how} did {who} {BASES[form.split()[0]]} ?", lost),
        )
    )
    return Asked(question.replace("some more", "some"), expression)


def comparison(asked: Asked, rng: random.Random) -> Asked | None:
    """One has so many more or fewer than another: asked for either."""
    deed = DEED.match(asked.question)
    if not deed or int(deed["number"]) < 3:
        return None
    who, a, what = deed["who"], deed["number"], deed["what"]
    other, b = _other_name(who, rng), rng.randrange(2, int(a))
    word, sign, back = rng.choice((("more", "+", "-"), ("fewer", "-", "+")))
    sentences = [f"{who} has {a} {what} .", f"{other} has {b} {word} {what} than {who} ."]
    if rng.random() < 0.5:
        return Asked(f"{' '.join(sentences)} How many {what} does {other} have ?", f"{a}{sign}{b}")
    sentences = [f"{other} has {a} {what} .", sentences[1]]
    rng.shuffle(sentences)
    return Asked(f"{' '.join(sentences)} How many {what} does {who} have ?", f"{a}{back}{b}")


def signed(asked: Asked, rng: random.Random) -> Asked | None:
    """A question whose answer may be below zero.

    Without any, a model learns in RL to subtract in the order of the story and to leave out the minus sign of what its
    program printed, which is right wherever answers are positive."""
    whole = [number for number in NUMBER.findall(asked.question) if number.isdecimal() and int(number) > 1]
    if not whole:
        return None
    a = rng.choice(whole)
    b, who = _unlike(a, asked.question, rng), rng.choice(NAMES)
    question, expression = rng.choice(
        (
            (
                f"It was {a} degrees and got {b} degrees colder . How many degrees is it now ?",
                f"{a}-{b}",
            ),
            (f"{who} had {a} points and lost {b} points . How many points does {who} have now ?", f"{a}-{b}"),
            (f"{who} owes {a} dollars and has {b} dollars . How many dollars is {who} worth ?", f"{b}-{a}"),
            (f"There were {a} visitors on Monday and {b} on Tuesday . By how many did the number rise ?", f"{b}-{a}"),
            (f"{who} earned {b} dollars and spent {a} dollars . How many dollars did {who} gain ?", f"{b}-{a}"),
        )
    )
    return Asked(question, expression)


def _renamed(text: str, new: Mapping[str, str]) -> str:
    return NUMBER.sub(lambda match: new[match[0]], text)


def _other_name(who: str, rng: random.Random) -> str:
    return rng.choice([name for name in NAMES if name != who])


def _like(number: str, rng: random.Random) -> str:
    """A whole number of as many digits, 2 at least."""
    return str(rng.randrange(max(2, 10 ** (len(number) - 1)), 10 ** len(number)))


def _unlike(number: str, question: str, rng: random.Random) -> str:
    """The same, and one that the question does not hold."""
    taken = {*NUMBER.findall(question)}
    return next(new for _ in range(1000) if (new := _like(number, rng)) not in taken)


def value_of(expression: str) -> Fraction | None:
    """Of a sum of numbers; None where it is anything else."""
    try:
        return worked(ast.parse(expression, mode="eval").body, {})
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def worked(node: ast.expr, known: Mapping[str | Fraction, Fraction]) -> Fraction:
    """The value of a sum; `known` has those of its names, and others for its literals. Raises ValueError,
    ZeroDivisionError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and len(str(node.value)) < 20:
        value = Fraction(str(node.value))
        return known.get(value, value)
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -worked(node.operand, known)
    if isinstance(node, ast.BinOp) and type(node.op) in WORKED_OUT:
        return WORKED_OUT[type(node.op)](worked(node.left, known), worked(node.right, known))
    raise ValueError("no sum of numbers")
