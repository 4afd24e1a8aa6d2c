"""Other texts for a reply: each differs in what it says it does."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from rocstar.analysis.swap import Replies, holds

ERRORS = [
    "ValueError: use blem",
    "ValueError: use corvit",
    "ValueError: use dralk",
    "NameError: name 'x' is not defined",
]
SAID = [*((True, text) for text in ERRORS), (False, "42"), (False, "1234")]


def test_another_reply_is_one_after_a_call_that_ended_alike() -> None:
    replies = Replies(SAID)
    seen = {replies.another(True, ERRORS[0], random.Random(seed)) for seed in range(40)}
    assert seen == {*ERRORS[1:]}
    assert replies.another(False, "42", random.Random(0)) == "1234"


def test_there_is_no_other_reply_where_all_say_the_same() -> None:
    assert Replies([(True, "no"), (True, "no")]).another(True, "no", random.Random(0)) is None


def test_a_false_reply_takes_the_word_of_another_one_that_the_attempt_did_not_write() -> None:
    replies = Replies(SAID)
    for seed in range(20):
        false = replies.false("ValueError: use blem", 'read("7", "corvit")', random.Random(seed))
        assert false is not None
        assert (false.text, false.true_word, false.false_word) == ("ValueError: use dralk", "blem", "dralk")


def test_a_number_without_like_becomes_another_of_as_many_digits() -> None:
    false = Replies([(False, "sum 100 of 17 values")]).false("sum 100 of 17 values", "", random.Random(1))
    assert false is not None and false.true_word == "17" and re.fullmatch(r"sum 100 of \d\d values", false.text)


def test_nothing_is_made_up_where_there_is_nothing_to_replace() -> None:
    assert Replies([(True, "no such name")]).false("no such name", "", random.Random(0)) is None
    assert Replies([(False, "")]).false("", "", random.Random(0)) is None


def test_a_word_stands_whole_or_not_at_all() -> None:
    assert holds('"unit": "blem"}}', "blem") and not holds("problem", "blem") and not holds("", "blem")


words = st.lists(st.sampled_from(["use", "blem", "12", "7", "x", ":", "no", "é"]), max_size=8).map(" ".join)


@given(st.lists(words, min_size=1, max_size=12), words, st.integers(0, 5))
def test_a_false_reply_differs_in_one_new_word(texts: list[str], written: str, seed: int) -> None:
    false = Replies((False, text) for text in texts).false(texts[0], written, random.Random(seed))
    if false is not None:
        before, after = texts[0].split(), false.text.split()
        assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [(false.true_word, false.false_word)]
        assert not holds(f"{texts[0]} {written}", false.false_word)
