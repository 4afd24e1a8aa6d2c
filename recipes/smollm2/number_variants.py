"""Questions of GSM8K with other numbers: question, program and the program's comments follow one mapping.

A number may change where the question gives it once, in digits, and where each of its places in the program is known to
mean it. All others stay: numbers in words, dates, times of day, ordinals, fractions, values that a word says too
("week" says 7), values that a line computes and all that this line depends on. The numbers change one after another,
each to a value under which what held before still holds: whole values are whole, signs and the order of numbers and of
results are the same, shares are below 100%. The rules were made from questions of the training file.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise
from math import ceil, floor, prod
from typing import NamedTuple

from word_variants import worked

NUMBER = re.compile(r"(?<![\w.])(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
LINE = re.compile(r"([a-z]) = (.+)")
SHARE = re.compile(r"\s?(?:%|percent)")
MONTH = r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December)"
LABEL_BEFORE = re.compile(
    rf"(?:\d[:/\u2013-]|/|{MONTH} "
    r"|\b(?i:grade|class|chapter|level|room|season|page|number|size|day|week|year|highway|route) "
    r"|#|\ban |[+-])$"
)
LABEL_AFTER = re.compile(
    r"\s?(?:st|nd|rd|th)\b|[:/\u2013-]\d|\s?/|\s\d+/\d|\s?(?i:[ap]\.?m\b)|\s?o.?clock|\s+and (?:a|one)\b|½"
    r"|(?!(?:kg|km|cm|mm|ml|mg|g|m|l|L|ft|lbs?|oz|mph|in)\b)[a-zA-Z]|'s|\s?°"
    rf"|\s{MONTH}|[- ](?:dollar |cent )?(?:bills?|coins?|sided|way|degrees?)\b|,? (?:in|out of) (?:every )?\d"
)
CAPS = (
    ("days?", (7, 30, 365)), ("hours?", (24,)), ("(?:minutes?|seconds?)", (60,)), ("weeks?", (4, 52)),
    ("months?", (12,)), ("years?", (100,)), ("inch(?:es)?", (12,)), ("ounces?", (16,)), ("cents?", (100,)),
)  # fmt: skip
"""Units, and how many of them make a larger one: a number that is less stays less, and one of these itself stays."""
SAID: Mapping[str, Sequence[int]] = {
    r"two|twice|doubl\w+|half|halves|couples?|pairs?|both|twins?|another|other|either|round.?trip|second|back": (2,),
    r"weekends?|bicycles?|bikes?|shoes?|socks?|hands?|eyes?|ears?|parents?|birds?|chickens?": (2,),
    r"three|thrice|tripl\w+|thirds?|yards?|feet|foot|triang\w+": (3,),
    r"four|fourths?|quarters?|quadrupl\w+|squares?|legs?|wheels?|tires?|rectang\w+|seasons?|gallons?|quarts?": (4,),
    r"five|fifths?|nickels?|weekdays?|fingers?|toes?": (5,),
    r"six|sixths?|half.a.dozen|insects?|cubes?|hexagon\w*": (6,),
    r"seven|sevenths?|weeks?|weekly|daily|days?": (7,), r"eight|eighths?|spiders?|octop\w+": (8,),
    r"nine|ninths?": (9,), r"ten|tenths?|dimes?|decades?": (10,), r"eleven": (11,),
    r"twelve|dozens?|months?|monthly|years?|yearly|annual\w*|inch\w*|feet|foot": (12,),
    r"months?|monthly|years?|yearly": (4, 28, 30, 31, 52, 365), r"hours?|hourly|minutes?|seconds?": (60,),
    r"days?|daily|hours?": (24,), r"pounds?|ounces?": (16,), r"quarters?": (25,), r"fortnight": (14,),
    r"fifteen": (15,), r"twenty": (20,), r"thirty": (30,), r"forty": (40,), r"fifty": (50,), r"sixty": (60,),
}  # fmt: skip
"""Values that words of a question say, so that such a number in its program may not mean one given in digits."""
WORLD = frozenset(map(Fraction, ("1", "100", "1000", ".5", ".25", ".75", "1.5", ".01")))
YEARS = range(1500, 2100)
TRIES = 25  # values that a number is given in vain before it stays


class Given(NamedTuple):
    """A number that the question gives in digits."""

    match: re.Match[str]
    value: Fraction
    share: bool
    """Whether per cent follow it."""

    def forms(self, value: Fraction) -> tuple[Fraction, ...]:
        """What a program may write for this number if it is `value`: of 20% 20, 0.2, 1.2 and 0.8."""
        return (value, value / 100, 1 + value / 100, 1 - value / 100) if self.share else (value,)


class Numbered(NamedTuple):
    """A question, its program and what that prints."""

    question: str
    program: str
    answer: Fraction


def other_numbers(question: str, program: str, rng: random.Random) -> Numbered | None:
    """The question with other numbers; None where none can change."""
    story = Story(question, program)
    new = story.drawn(rng)
    return story.told(new) if new else None


class Story:
    """A question, its program (lines like `a = 48/2` below comments, then a print) and which of its numbers may change.

    A mapping "of given numbers" is from the value that the question gives to another one."""

    def __init__(self, question: str, program: str) -> None:
        self.question, self.program = question, program
        self.given = [
            Given(found, _value(found[0]), bool(SHARE.match(question, found.end())))
            for found in NUMBER.finditer(question)
        ]
        self.lines = {found[1]: found[2] for line in program.splitlines() if (found := LINE.fullmatch(line))}
        self.trees = {name: ast.parse(line, mode="eval").body for name, line in self.lines.items()}
        self.literals = {value for line in self.lines.values() for value in _values(line)}
        self.comments = "\n".join(line for line in program.splitlines() if line.startswith("#"))
        self.results = self._results({})
        told = f"{question}\n{self.comments}"
        self.said = {Fraction(n) for words, ns in SAID.items() if re.search(rf"(?i)\b(?:{words})\b", told) for n in ns}
        self.unused = {given.value for given in self.given if not self.literals.intersection(given.forms(given.value))}

    def drawn(self, rng: random.Random) -> dict[Fraction, Fraction]:
        """New values of given numbers; none where the answer would stay what it was."""
        new: dict[Fraction, Fraction] = {}
        for given in rng.sample(self.movable, len(self.movable)):
            step = _step(given)
            steps = (step, step / 5 if step % 5 == 0 else step)
            counts = [(one, self._candidates(given, one)) for one in steps]
            drawn = [(one, n) for one, ns in counts for n in rng.sample(ns, len(ns))]
            for value in (one * n for one, n in drawn[:TRIES]):
                if self._holds(changed := {**new, given.value: value}):
                    new = changed
                    break
        answers = [[*self._results(numbers).values()][-1] for numbers in ({}, new)]
        return new if answers[0] != answers[1] else {}

    def told(self, new: Mapping[Fraction, Fraction]) -> Numbered:
        """Question, program and answer under new values of given numbers."""
        results, literals = self._results(new), self._literals(new)
        said = {self.results[name]: value for name, value in results.items()}
        said |= {given.value: given.value for given in self.given} | literals | new
        lines = [_renamed(line, said if line.startswith("#") else literals) for line in self.program.splitlines()]
        return Numbered(_renamed(self.question, new), "\n".join(lines), [*results.values()][-1])

    @cached_property
    def movable(self) -> list[Given]:
        rules = (self._labels(), self._ambiguous(), self._related(), self._hidden())
        fixed = self.unused.union(self.said, *rules)
        return [given for given in self.given if given.value not in fixed]

    def _results(self, new: Mapping[Fraction, Fraction]) -> dict[str, Fraction]:
        """What each line computes. Raises ZeroDivisionError."""
        known: dict[str | Fraction, Fraction] = {**self._literals(new)}
        for name, tree in self.trees.items():
            known[name] = worked(tree, known)
        return {name: known[name] for name in self.trees}

    def _literals(self, new: Mapping[Fraction, Fraction]) -> dict[Fraction, Fraction]:
        """Of the program, in all forms that it may write given numbers in."""
        pairs = [(given, new[given.value]) for given in self.given if given.value in new]
        return {
            o: n for given, value in pairs for o, n in zip(given.forms(given.value), given.forms(value), strict=True)
        }

    def _below(self, name: str) -> set[Fraction]:
        """Given numbers that a line depends on, directly or not."""
        line = self.lines[name]
        own = {given.value for given in self.given if {*_values(line)}.intersection(given.forms(given.value))}
        return own.union(*(self._below(other) for other in re.findall(r"\b[a-z]\b", line)))

    def _labels(self) -> Iterator[Fraction]:
        """Given numbers that stand twice or are 0 or 1, that name, date or define something, and all of a whole."""
        counts = Counter(given.value for given in self.given)
        for match, value, share in self.given:
            before, after = self.question[: match.start()], self.question[match.end() :]
            year = value in YEARS and "," not in match[0] and not before.endswith("$")
            label = LABEL_BEFORE.search(before) or LABEL_AFTER.match(after)
            defines = any(value in values and re.match(rf"[- ]{unit}\b", after) for unit, values in CAPS)
            if counts[value] > 1 or value in (0, 1) or year or label or defines or (share and value >= 100):
                yield value

    def _ambiguous(self) -> Iterator[Fraction]:
        """Given numbers whose value in the program may mean something else, and those below results of which this is
        so."""
        meant = defaultdict(set)
        for given in self.given:
            for form in given.forms(given.value):
                meant[form].add(given.value)
        yield from (given.value for given in self.given if given.share and given.value == 50)  # 0.5 is its rest too
        yield from (value for form in self.literals for value in meant.get(form, ()) if len(meant[form]) > 1)
        last = [*self.lines][-1]
        uses = Counter(re.findall(r"\b[a-z]\b", " ".join(self.lines.values())))
        for name, value in self.results.items():
            alike = {self.lines[other] for other, result in self.results.items() if result == value}
            mistaken = (len(alike) > 1 or value in self.said) and uses[name] != 1
            if (mistaken and name != last) or (value in meant and (name != last or value in _values(self.comments))):
                yield from (*meant.get(value, ()), *self._below(name))

    def _related(self) -> Iterator[Fraction]:
        """Given numbers between which something holds that the question does not say: 30 = 18 + 12, or 40% + 60%."""
        values = sorted({given.value for given in self.given})
        shares = {given.value for given in self.given if given.share}
        for few in (*combinations(values, 2), *combinations(values, 3)):
            for whole in {sum(few), prod(few)}.intersection(values):
                if whole >= 10 and (self.unused.intersection((*few, whole)) or (whole > 30 and whole == sum(few))):
                    yield from (*few, whole)
            if sum(few) == 100 and shares.issuperset(few):
                yield from few

    def _hidden(self) -> Iterator[Fraction]:
        """Given numbers that a literal of the program may be worked out from: 4 in `4*5` from 7 and 3. All of them
        where nothing tells where a large literal is from."""
        forms = {form for given in self.given for form in given.forms(given.value)}
        below = {given.value: {given.value} for given in self.given}
        below |= {value: self._below(name) for name, value in self.results.items()} | {Fraction(1): set()}
        for literal in self.literals - forms - self.said - WORLD:
            pairs = [(a, b) for a, b in combinations(below, 2) if literal in _outcomes(a, b)]
            yield from (value for pair in pairs for one in pair for value in below[one])
            if not pairs and (literal > 12 or literal.denominator > 1):
                yield from (given.value for given in self.given)

    def _candidates(self, given: Given, step: Fraction) -> list[int]:
        """How many steps make a number about half to twice another one, with as many decimals. They may be thousands,
        so nothing is multiplied that need not be."""
        match, old, share = given
        after = self.question[match.end() :]
        decimals = len(match[0].partition(".")[2])
        caps = [cap for unit, values in CAPS if re.match(rf"[- ]{unit}\b", after) for cap in values if old < cap]
        aged = re.match(r"[- ]years?[- ]old", after)
        most = min([Fraction(12) if old <= 5 and not decimals else old * Fraction(15 if aged else 22, 10), *caps[:1]])
        least = old * Fraction(2, 3) if aged else old / 2
        others = {0, 1 / step, old / step}
        counts = [n for n in range(ceil(least / step), floor(most / step) + 1) if n not in others]
        if share:
            counts = [n for n in counts if step * n < 100]
        if decimals:
            counts = [n for n in counts if (step * n).denominator > 1]
        if self.question[: match.start()].endswith(" a "):
            counts = [n for n in counts if not re.match(r"8|1[18](?!\d)", str(step * n))]
        return counts

    def _holds(self, new: Mapping[Fraction, Fraction]) -> bool:
        """Whether what held of the story still does under new values of given numbers."""
        try:
            after = self._results(new)
        except ZeroDivisionError:
            return False
        given = {one.value: new.get(one.value, one.value) for one in self.given}
        literals = {one: self._literals(new).get(one, one) for one in self.literals}
        results = [(old, after[name]) for name, old in self.results.items()]
        shares = [(one.value, given[one.value]) for one in self.given if one.share]
        return (
            all(_alike(old, value) for old, value in results)
            and _same_order([*given.items()])
            and _same_order([*results[:-1], *((value, value) for value in self.unused)])
            and _as_distinct([*given.items(), *literals.items(), *results])
            and (sum(old for old, _ in shares) > 100 or sum(value for _, value in shares) <= 100)
        )


def _alike(old: Fraction, new: Fraction) -> bool:
    """Whether a result is like what it was: whole, or with at most two decimals; negative, 0, below 1, 1 or above."""
    if any((old * scale).denominator == 1 != (new * scale).denominator for scale in (1, 100)):
        return False
    return all((old > bound) == (new > bound) and (old == bound) == (new == bound) for bound in (0, 1))


def _same_order(pairs: Sequence[tuple[Fraction, Fraction]]) -> bool:
    """Whether new values stand in the order of the old ones, and are equal where those are."""
    return all((a[0] == b[0]) == (a[1] == b[1]) and a[1] <= b[1] for a, b in pairwise(sorted(pairs)))


def _as_distinct(pairs: Sequence[tuple[Fraction, Fraction]]) -> bool:
    """Whether no two values become one, nor one value two."""
    return len({*pairs}) == len({old for old, _ in pairs}) == len({new for _, new in pairs})


def _outcomes(a: Fraction, b: Fraction) -> set[Fraction]:
    """Of one sum of two numbers."""
    return {a + b, abs(a - b), a * b, *(x / y for x, y in ((a, b), (b, a)) if y)}


def _step(given: Given) -> Fraction:
    """How round a number is: 1 for 12, 5 for 35 and 40, 50 for 600; of decimals 0.5, 0.25, 0.05 or the last digit."""
    old, decimals = given.value, len(given.match[0].partition(".")[2])
    if decimals:
        steps = [Fraction(text) for text in ("0.5", "0.25", "0.05") if len(text) - 2 <= decimals]
        return next((step for step in steps if (old / step).denominator == 1), Fraction(1, 10**decimals))
    zeros = len(str(old)) - len(str(old).rstrip("0"))
    if zeros:
        return Fraction(5 * 10 ** (zeros - 1))
    return Fraction(5 if old % 5 == 0 and (old >= 15 or given.share) else 1)


def _renamed(text: str, new: Mapping[Fraction, Fraction]) -> str:
    """The text with other values for its numbers, written as it wrote them."""
    return NUMBER.sub(lambda found: _like(found[0], new.get(_value(found[0]), _value(found[0]))), text)


def _like(text: str, value: Fraction) -> str:
    """A value with the decimals and commas of a text; the text itself where it says the value."""
    if value == _value(text):
        return text
    decimals = len(text.partition(".")[2])
    commas = "," if "," in text else ""
    while decimals < 12 and (value * 10**decimals).denominator > 1:
        decimals += 1
    return f"{float(value):{commas}.{decimals}f}"


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _values(text: str) -> list[Fraction]:
    return [_value(found[0]) for found in NUMBER.finditer(text)]
