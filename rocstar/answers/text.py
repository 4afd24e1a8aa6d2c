"""Answers that are words or the letter of a choice, compared without mathematics."""

from __future__ import annotations

import math
import re
import unicodedata

from rocstar.answers.wording import HEDGE, loose_style, plain_text
from rocstar.types import Verdict

_QUOTES = "*_`\"' \n\t"
_PRIMED = re.compile(r"[^'`]*'+")  # C' is another point than C
_LEAD = re.compile(
    r"(?:(?:the|my|so|correct|right|final|best|answers?|option|choice|letter|is|I (?:choose|pick))\b[\s:=]*)*",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"(?:\\?[(\[{]\s*(?P<closed>[A-Ja-j])\s*\\?[)\]}](?=[\s.:,;]|$)|(?P<open>[A-Ja-j])(?:[).:,](?=\s|$)|$))(?P<rest>.*)",
    re.DOTALL,
)
# After a first letter: a second one in brackets, behind a link, or next.
_ANOTHER = re.compile(
    r"^\W*or\b|[(\[][A-Ja-j][)\]]|^[\s.:,;]*[A-J](?:[\s).:,]*$|[).:,])"
    rf"|(?:\b(?:or|and|nor|but|then|to|{HEDGE})\s+(?:option\s+|choice\s+)?|[,/&;|+-]\s*)[A-J](?![A-Za-z])"
)
_SEVERAL = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z']).*(?<![A-Za-z\\])[A-J](?![A-Za-z])", re.DOTALL)
_GOLD_CHOICE = re.compile(r"\(?([A-J])\)?")
_GOLD_OPTION = re.compile(r"\(([A-J])\)\s*(\S.*)", re.DOTALL)
_LETTERS = re.compile(r"[A-J](?:(?:\s*[,;&]\s*|,?\s+and\s+|\s*)[A-J])+")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[\s',-]+[A-Za-z]+)*|[Aa]\s+[A-Za-z]{2,}(?:[\s',-]+[A-Za-z]+)*")
_AND, _OR = " and ", " or "
_ANDS = re.compile(r",? and |, ")
_SUBJECT = re.compile(
    r"^(?:(?:it|this|that|they|these|there)(?:'s| is| are) "
    r"|the \w+ (?:is |are |(?=does|converges|diverges))|on (?=\w+day$))",
    re.IGNORECASE,
)
_NOTHING = re.compile(r"no solutions?(?: exists?)?|none|(?:the )?empty set|\\emptyset", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:a|an|the)\s+")
# What a formula would read as a difference, a ratio or a product: dates, versions and addresses, times of day.
_PLACES = re.compile(r"\d{4}-\d\d-\d\d|\d\d?/\d\d?/\d{4}|\d+(?:\.\d+){2,}|(?=0|.*:0)\d{1,2}:\d\d(?::\d\d)?")
_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_AFTERNOON = re.compile(r"\dp\.?m\b", re.IGNORECASE)
# Numbers of Chinese and Japanese, which are no words: another form of one may be right.
_NUMERALS = re.compile("[〇零一二三四五六七八九十百千万亿萬億两兩半点分之负]+")
_NUMBERS = re.compile(r"\d+")
_YES_NO = re.compile(r"(?P<word>yes|no|true|false)[,.;:](?P<rest>.*)$", re.IGNORECASE | re.DOTALL)
_HEDGE = re.compile(
    r"\b(?:yes|no|true|false|if|when|unless|only|but|or|except|however|though|maybe|sometimes|depends|wrong|unknown"
    r"|neither|opposite|guess|perhaps|possibl[ey]|could|might|alternatively|otherwise)\b",
    re.IGNORECASE,
)


def compare_text(gold: str, predicted: str) -> tuple[Verdict, str] | None:
    """(verdict, method) when both say the same, or when the reference is the letter of a choice and the prediction
    surely names one; None for "don't know".

    The reference is `B` or `(B)`; `chosen_letter` says which letter a prediction names. Source: ours."""
    wanted, given = plain_text(gold), plain_text(predicted)
    option = _GOLD_OPTION.fullmatch(wanted)
    if wanted == given != "" or (option and option[2] == given):
        return Verdict.RIGHT, "text"
    if found := _by_places(wanted, given.replace(" ", "")):
        return found, "text"
    letters = [text.strip("()[]{}\\") for text in (wanted, given)]
    listed = all(map(_LETTERS.fullmatch, letters)) and not all(map(str.isalpha, letters))
    if listed and sorted(filter(str.isupper, wanted)) == sorted(filter(str.isupper, given)):
        return Verdict.RIGHT, "choice"
    said = _said(wanted), _said(given)
    if (
        all(said)
        and not _are_products(gold, predicted)
        and (said[0] == said[1] or (_OR in said[0]) != (_OR in said[1]))
    ):
        return (Verdict.RIGHT if said[0] == said[1] else Verdict.WRONG), "text"  # wrong: one leaves open which
    if _is_rearranged(wanted, given):
        return Verdict.WRONG, "text"
    letter = _GOLD_CHOICE.fullmatch(wanted) or option
    if not letter or (chosen := chosen_letter(predicted)) is None:
        return (Verdict.WRONG, "choice") if letter and _SEVERAL.search(given) else None
    if chosen == letter[1] and letter.re is _GOLD_OPTION and len(given.strip("()[] .")) > 1:
        return None  # `(E) 25` for `(E) 24`
    return (Verdict.RIGHT if chosen == letter[1] else Verdict.WRONG), "choice"


def _by_places(wanted: str, given: str) -> Verdict | None:
    """Dates, versions and times of day, number by number: 2026-03-04 is not 2019, 06:30 no ratio of 02:10. None where
    neither is one, and for words (`4 March`). A time without a zero in front (`13:30`) may be a ratio, unless it could
    be reduced (`12:30`): nobody writes a ratio so."""
    time = _TIME.fullmatch(wanted)
    if time and wanted[0] == "0" and _AFTERNOON.search(given):
        return Verdict.WRONG  # 9:30 pm for 09:30
    is_time = time is not None and math.gcd(int(time[1]), int(time[2])) > 1
    if not is_time and not _PLACES.fullmatch(wanted) and not (":" in wanted and _PLACES.fullmatch(given)):
        return None
    if _NUMBERS.sub("", wanted) == _NUMBERS.sub("", given):
        same = [*map(int, _NUMBERS.findall(wanted))] == [*map(int, _NUMBERS.findall(given))]
        return Verdict.RIGHT if same else Verdict.WRONG
    return None if any(map(str.isalpha, given)) else Verdict.WRONG


def _is_rearranged(wanted: str, given: str) -> bool:
    """Whether only the order of its letters is another than the word's. Rows of few different letters (abc, ABCD) may
    be products or names of figures, whose order does not matter."""
    row, other = (text.replace(" ", "").lower() for text in (wanted, given))
    few = len(set(row)) == len(row) < (5 if wanted.isupper() else 4)
    return row.isascii() and row.isalpha() and not few and row != other and sorted(row) == sorted(other)


def compare_exactly(gold: str, predicted: str) -> tuple[Verdict, str]:
    """(verdict, "text"): RIGHT for the same letters in the same case, whatever delimiters and \\text{} are around."""
    return (Verdict.RIGHT if plain_text(gold) == plain_text(predicted) else Verdict.WRONG), "text"


def is_words(text: str) -> bool:
    """Whether an answer is words and nothing else."""
    return bool(_said(plain_text(text))) and not _NUMERALS.fullmatch(text)


def _are_products(gold: str, predicted: str) -> bool:
    """Whether only capitals tell two rows of letters apart that are no words: NK is not nk."""
    is_row = gold.isascii() and gold.isalpha() and gold.lower() == predicted.lower()
    return is_row and gold != predicted and loose_style(gold) != loose_style(predicted)


def _said(text: str) -> str:
    """Words without case, article, "it is" before them and the comment after a yes or no; names joined by "and" in one
    order; one name for what has no solution; "" for what is not only words."""
    text = _SUBJECT.sub("", text.strip(_QUOTES + ".,!").replace("right-angled", "right"))
    if _NOTHING.fullmatch(text):
        return "none"
    if (found := _YES_NO.match(text)) and not _HEDGE.search(found["rest"]):
        return found["word"].lower()
    if not _WORDS.fullmatch("".join(map(_latin, text))):
        return ""
    words = _ARTICLE.sub("", " ".join(text.lower().split())).replace("dne", "does not exist")
    return _OR.join(sorted(_AND.join(sorted(_ANDS.split(part))) for part in words.split(_OR)))


def _latin(letter: str) -> str:
    """Letters for one that is not ASCII, its marks and pictures included; one that has capitals is no word alone."""
    kind = unicodedata.category(letter)
    if letter.isascii() or not (kind[0] in "LM" or kind == "So"):
        return letter
    return "x" if kind in ("Lu", "Ll") else "xx"


def chosen_letter(text: str) -> str | None:
    """The one letter of a choice that a text surely names, A to J: `(B)`, `b`, `[B]`, `B. 12`, `\\text{Option B}`, `the
    answer is B`. None where it names several (`(A) or (B)`, `A-D`), where a word begins with it (`A photon`) and where
    it stands in a formula (`(b)+1`). Source: ours."""
    if _PRIMED.fullmatch(text):
        return None
    said = _LEAD.sub("", plain_text(text).strip(_QUOTES), count=1).removesuffix(" only").strip(_QUOTES)
    found = _CHOICE.fullmatch(said)
    if found is None or _ANOTHER.search(found["rest"]):
        return None
    return (found["closed"] or found["open"]).upper()
