"""Which tokens are marked, and of which kind, on completions written by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.analysis.attempts import Attempt, TurnSpan, read_attempts
from rocstar.analysis.sources import piece_of
from rocstar.analysis.tokens import (
    GAP,
    NEAR,
    RUN,
    TokenCounts,
    TokenKind,
    Words,
    blocks,
    count_tokens,
    count_words,
    enclosed,
    kinds_of,
    marked_places,
    runs_of,
)
from rocstar.dialogue.calls import LLAMA
from rocstar.dialogue.segments import text_of
from tests.analysis.rows import attempt, turn, written
from tests.dialogue.test_marked_calls import NAMES, SYNTAXES

TEXTS = ["<tool_call>", "{}", "</tool_call>", "<answer>", "5", "</answer>", " wait", " a", " b", " c"]
OPEN, BODY, CLOSE, ANSWER, FIVE, END, WAIT, A, B, C = range(10)
MORE = ["<|im_end|>", "</", "reason", ">", "\n"]
STOP, TAG, REASON, SHUT, LINE = range(10, 15)


def piece(token: int) -> str:
    return [*TEXTS, *MORE][token] if token < len(TEXTS) + len(MORE) else "?"


def told(*turns: tuple[list[int], str | None], entropies: dict[int, float] | None = None) -> Attempt:
    """A prompt of two tokens, completions with what came before them, and replies of one token."""
    ids, places = [99, 99], []
    for tokens, after in turns:
        places.append(TurnSpan(start=len(ids), end=len(ids) + len(tokens), after=after))
        ids += [*tokens, 99]
    values = [0.0] * len(ids)
    for place, value in (entropies or {}).items():
        values[place] = value
    return Attempt(
        step=1, problem="p", right=True, cut=False, tokens=0, calls=(), turns=tuple(places), token_ids=ids,
        entropies=values,
    )  # fmt: skip


def test_a_fifth_of_the_written_tokens_is_marked_the_highest_first() -> None:
    assert marked_places([9.0, 0.1, 0.5, 0.4, 0.3, 0.2, 0.0, 0.6], range(1, 8)) == {7}
    assert marked_places([0.0, 0.1, 0.5, 0.4, 0.3, 0.2, 0.0, 0.6, 0.0, 0.0, 0.0], range(1, 11)) == {7, 2}
    assert marked_places([], []) == set()


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_marked_tokens_are_a_fifth_and_none_outside_is_higher(entropies: list[float]) -> None:
    marked = marked_places(entropies, range(len(entropies)))
    others = [entropies[place] for place in range(len(entropies)) if place not in marked]
    assert len(marked) == max(1, round(len(entropies) / 5))
    assert min(entropies[place] for place in marked) >= max(others, default=0)


def test_runs_bridge_small_gaps_and_need_three() -> None:
    assert list(runs_of([1, 2, 3])) == [[1, 2, 3]]
    assert list(runs_of([1, 1 + GAP + 1, 1 + 2 * (GAP + 1)])) == [[1, 4, 7]]
    assert list(runs_of([1, 2, 2 + GAP + 2])) == []
    assert list(runs_of(range(RUN - 1))) == []


@given(st.sets(st.integers(0, 80)))
def test_runs_are_parts_of_what_was_given_and_far_from_each_other(places: set[int]) -> None:
    runs = list(runs_of(sorted(places)))
    assert all(len(run) >= RUN and set(run) <= places for run in runs)
    assert all(after[0] - before[-1] > GAP + 1 for before, after in pairwise(runs))


def test_calls_and_answers_are_found_across_tokens() -> None:
    one = told(([A, OPEN, BODY, CLOSE, B, ANSWER, FIVE, END, C], None))
    found = dict(enclosed(one, one.turns[0], piece))
    assert found == {**dict.fromkeys((3, 4, 5), TokenKind.CALL), **dict.fromkeys((7, 8, 9), TokenKind.ANSWER)}
    never_closed = told(([A, OPEN, BODY, B], None))
    assert sorted(dict(enclosed(never_closed, never_closed.turns[0], piece))) == [3, 4, 5], "it goes to the end"


def test_a_run_right_after_a_reply_reflects_and_the_same_run_before_any_reply_forks() -> None:
    one = told(([A, B, C], None), ([WAIT, A, B, OPEN, BODY, CLOSE], "error"))
    marked = {2, 3, 4, 6, 7, 8, 10}
    kinds = kinds_of(one, marked, dict(enclosed(one, one.turns[0], piece)) | dict(enclosed(one, one.turns[1], piece)))
    assert [kinds[place] for place in sorted(marked)] == [TokenKind.FORKING] * 3 + [TokenKind.REFLECTION] * 3 + [
        TokenKind.CALL
    ]


def test_a_run_that_begins_late_and_lone_tokens_fork() -> None:
    late = told(([A], None), ([A] * (NEAR + 10), "ok"))
    start = late.turns[1].start
    marked = {start, *range(start + NEAR, start + NEAR + 4)}
    assert set(kinds_of(late, marked, {}).values()) == {TokenKind.FORKING}


def test_counts_name_what_the_reply_said() -> None:
    entropies = {6: 1.0, 7: 0.9, 8: 0.8}
    one = told(([A, B, C], None), ([WAIT, A, B, *[C] * 9], "error"), entropies=entropies)
    counts = TokenCounts()
    assert count_tokens(counts, one, piece) == dict.fromkeys((6, 7, 8), TokenKind.REFLECTION)
    figures = counts.figures()
    assert (figures["reflection_after_error"], figures["reflection_after_ok"]) == (3, 0)
    assert figures["entropy"] == 2.7 / 15


def test_words_are_counted_over_all_steps_and_the_rarest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the paper's size has 510 steps, each with most words of a vocabulary."""
    monkeypatch.setattr("rocstar.analysis.tokens.MOST_WORDS", 4)
    words, held = Words(), list[int]()
    for step in range(50):
        one = replace(told(([A, *range(100 + 3 * step, 103 + 3 * step)], None)), step=step)
        count_words(words, one, dict.fromkeys(range(2, 6), TokenKind.FORKING), str)
        held.append(len(words))
    assert words[TokenKind.FORKING, str(A)] == 50 and max(held) <= 4


def test_marks_of_the_template_are_no_forks_wherever_their_tokens_are_cut() -> None:
    one = told(([A, TAG, REASON, SHUT, LINE, OPEN, BODY, CLOSE, STOP], None))
    found = dict(enclosed(one, one.turns[0], piece))
    assert [place - 2 for place, kind in found.items() if kind is TokenKind.MARK] == [1, 2, 3, 8]
    kinds = kinds_of(one, {2, 3, 4, 5, 10}, found)
    assert [kinds[place] for place in (2, 3, 4, 5, 10)] == [TokenKind.FORKING, *[TokenKind.MARK] * 4]


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_marks_of_every_syntax_are_no_forks(name: str) -> None:
    syntax = SYNTAXES[name]
    call = text_of(syntax.render("python", {"code": "[1]"})).strip()
    (found,) = blocks(f"So [x], [A] <a> {call}")
    assert found == (16, 16 + len(call), TokenKind.CALL)
    assert [kind for *_, kind in blocks(f"So. {syntax.reserved[-1]}")] in ([TokenKind.MARK], [TokenKind.CALL])


def test_llama_s_calls_are_no_forks() -> None:
    call = text_of(LLAMA.render("python", {"code": "[1]"}))
    assert list(blocks(f"So [x] {call}", called=True)) == [(7, 7 + len(call), TokenKind.CALL)]
    assert list(blocks(f"<|python_tag|>{call}", called=True)) == [(0, 14 + len(call), TokenKind.CALL)]
    assert list(blocks('It is {"name": "Ann"}')) == []


def test_a_call_that_a_program_s_text_seems_to_end_goes_on() -> None:
    call = text_of(SYNTAXES["mistral"].render("python", {"code": "'</tool_call>'"}))
    assert list(blocks(call)) == [(0, len(call), TokenKind.CALL)]


def test_the_token_that_ends_a_completion_is_a_mark_whatever_it_says() -> None:
    one = told(([A, B, C], None))
    ended = replace(one, turns=(replace(one.turns[0], ended=True),))
    assert dict(enclosed(one, one.turns[0], piece)) == {}
    assert dict(enclosed(ended, ended.turns[0], piece)) == {4: TokenKind.MARK}


def test_a_mark_between_tokens_neither_ends_a_reflection_nor_belongs_to_it() -> None:
    one = told(([A], None), ([WAIT, A, TAG, REASON, SHUT, B, C, OPEN, BODY, CLOSE], "ok"))
    start = one.turns[1].start
    inside = dict(enclosed(one, one.turns[1], piece))
    kinds = kinds_of(one, {start, start + 1, start + 2, start + 5}, inside)
    assert kinds[start + 2] is TokenKind.MARK
    assert {kinds[start + place] for place in (0, 1, 5)} == {TokenKind.FORKING}  # a gap of three
    closer = kinds_of(one, {start, start + 1, start + 2, start + 3, start + 4}, inside)
    assert closer[start] is TokenKind.FORKING  # two tokens and a mark are no run of three


def test_a_token_of_a_tokenizer_of_words_keeps_its_space(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<unk>", "▁a", "▁wait", "a", "▁"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert piece_of(tmp_path)(vocabulary["▁wait"]) == " wait"


def test_an_attempt_without_entropies_counts_nothing() -> None:
    counts = TokenCounts()
    assert count_tokens(counts, replace(told(([A], None)), entropies=None), piece) == {}
    assert counts.attempts == 0


def test_places_of_turns_are_those_of_the_recorded_tokens(tmp_path: Path) -> None:
    record = attempt([turn("x", "NameError: x\n"), turn("1"), turn(None)], entropies=[0.0] * 15)
    (read,) = read_attempts(written(tmp_path / "a.parquet", [record]), tokens=True)
    assert [(one.start, one.end, one.after) for one in read.turns] == [(2, 5, None), (7, 10, "error"), (12, 15, "ok")]
    mask = record.trajectory.loss_mask
    assert [place for one in read.turns for place in range(one.start, one.end)] == [p for p, w in enumerate(mask) if w]
