"""Word problems in other words: the things that are counted renamed, sentences about other things put in.

    tom has number0 pens . he gave number1 pens away . how many pens has he ?
    renamed    tom has number0 kites . he gave number1 kites away . how many kites has he ?
    decoy      tom has number0 pens . tom has number2 kites . he gave number1 pens away . how many pens has he ?

Three thousand questions leave a small model free to go by the words that it knows; here only the question can say
which number matters. The equation stays what it was. Drawing the numbers again is `variations.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from word_problems.rows import MASK, WordProblem
from word_problems.variations import MAX_NUMBERS, renumbered

COUNTED = re.compile(r"number\d+ (?:[a-z]+ )?([a-z]+s)\b")
# Words the pattern catches that are not names of things, or whose meaning the arithmetic rests on.
NOT_THINGS = frozenset(
    (
        *("is", "was", "has", "his", "this", "less", "times", "plus", "minus"),
        *(
            "does",
            "goes",
            "gives",
            "takes",
            "gets",
            "buys",
            "sells",
            "eats",
            "makes",
            "uses",
            "needs",
            "costs",
            "finds",
        ),
        *("dollars", "cents", "pennies", "nickels", "dimes", "quarters", "percents", "dozens", "points"),
        *("seconds", "minutes", "hours", "days", "weeks", "months", "years"),
        *("inches", "yards", "miles", "meters", "pounds", "ounces", "kilograms", "grams", "liters", "degrees"),
        *("people", "students"),
    )
)
MAX_DECOY = 2  # digits of a decoy's number: most numbers of the data have one or two


def things(rows: Sequence[WordProblem]) -> tuple[str, ...]:
    """Plural nouns that rows count, in alphabetical order."""
    found = {word for row in rows for word in COUNTED.findall(row.template)}
    return tuple(sorted(word for word in found - NOT_THINGS if not word.endswith("ss") and len(word) > 3))


def reworded(
    rows: Sequence[WordProblem], times: int, *, rename_share: float, decoy_share: float, shuffle_share: float, seed: int
) -> Iterator[WordProblem]:
    """`times` wordings of each row: `rename_share` of the things renamed, a decoy in `decoy_share` of the questions
    that can take one, the sentences of `shuffle_share` of the stories in another order."""
    rng, words = random.Random(seed), things(rows)
    for _ in range(times):
        for row in rows:
            new = with_decoy(row, words, rng) if rng.random() < decoy_share else row
            new = with_story_shuffled(new, rng) if rng.random() < shuffle_share else new
            yield with_things_renamed(new, words, rename_share, rng)


def with_things_renamed(row: WordProblem, words: Sequence[str], share: float, rng: random.Random) -> WordProblem:
    """Each thing of the row, with chance `share`, called by another of `words` that the row does not hold."""
    present = _present(row.template, words)
    chosen = [word for word in present if rng.random() < share]
    free = [word for word in rng.sample(words, min(len(words), 2 * len(present) + len(chosen))) if word not in present]
    names: dict[str, str] = {}
    for old, new in zip(chosen, free, strict=False):
        names |= {old: new, _singular(old): _singular(new)}
    if not names:
        return row
    return replace(row, template=" ".join(names.get(word, word) for word in row.template.split(" ")))


def with_decoy(row: WordProblem, words: Sequence[str], rng: random.Random) -> WordProblem:
    """A sentence of the row said of something else, with a number of its own that is not needed; before or after the
    sentence itself. The row itself when no sentence has just one number and a thing that the question asks about: there
    the added number might be meant."""
    *story, question = row.template.split(" . ")
    asked = set(question.split(" "))
    places = [(i, word) for i, text in enumerate(story) if (word := _counted_once(text)) in asked and word in words]
    if not places or len(row.numbers) >= MAX_NUMBERS:
        return row
    place, old = rng.choice(places)
    new = rng.choice([word for word in words if word not in row.template.split(" ")])
    number = _unlike(row, rng)
    decoy = MASK.sub(f"number{len(row.numbers)}", re.sub(rf"\b{old}\b", new, story[place]))
    story.insert(place + rng.randint(0, 1), decoy)
    return renumbered(replace(row, template=" . ".join((*story, question)), numbers=(*row.numbers, number)))


def with_story_shuffled(row: WordProblem, rng: random.Random) -> WordProblem:
    """The sentences before the question in another order, so that the first number is not always the one to start
    from. Reads oddly ("she ate number0 plums . she had number1 plums ."), and still says the same."""
    *story, question = row.template.split(" . ")
    return renumbered(replace(row, template=" . ".join((*rng.sample(story, len(story)), question))))


def _present(template: str, words: Sequence[str]) -> list[str]:
    known = set(words)
    return list(dict.fromkeys(word for word in template.split(" ") if word in known))


def _counted_once(sentence: str) -> str | None:
    """The thing a sentence counts, if it holds one number and one such thing."""
    found = COUNTED.findall(sentence)
    return found[0] if len(found) == 1 and len(MASK.findall(sentence)) == 1 else None


def _unlike(row: WordProblem, rng: random.Random) -> int:
    """A whole number that the row does not hold."""
    return rng.choice([n for n in range(2, 10**MAX_DECOY) if n not in row.numbers])


def _singular(word: str) -> str:
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("xes", "ches", "shes", "sses")) else word[:-1]
