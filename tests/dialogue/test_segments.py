"""Whoever writes a question, a tool's output or an SFT row: control tokens are those of the template."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from rocstar.data.sft.format import Chat, Message, Role
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.model_template import load_model_template
from rocstar.dialogue.segments import foreign, ours, text_of, written
from rocstar.dialogue.template import COMPACT, PAPER, RESERVED, Template
from tests.dialogue.folders import (
    LLAMA,
    LLAMA_MARKERS,
    PYTHON,
    TEXTS,
    THINKING,
    byte_level,
    folder_of,
    published_qwen,
    sentencepiece_like,
    unigram,
)

MARKERS = [*RESERVED, *LLAMA_MARKERS, "<|endoftext|>", "<think>", "<|fim_prefix|>", "<unk>", "</s>", "<|unknown|>"]
FRAGMENTS = [piece for marker in MARKERS for piece in (marker[: len(marker) // 2], marker[len(marker) // 2 :])]
hostile = st.lists(st.sampled_from([*MARKERS, *FRAGMENTS, "n0", "\n", " "]) | st.text(max_size=4), max_size=8).map(
    "".join
)

KINDS = ["compact", "paper", "paper, sentencepiece", "paper, unigram", "llama", "qwen", "thinking"]


@cache
def conversation_of(kind: str) -> tuple[Codec, Template]:
    if kind == "compact":
        phrases = fixed_phrases(COMPACT, "python")
        codec = train_bpe(TEXTS * 9, vocab_size=330, markers=COMPACT.markers, word_merges=False, atoms=("n0", *phrases))
        return codec, COMPACT
    if kind == "llama":
        settings = folder_of(Path(mkdtemp()), LLAMA, bos_token="<|begin_of_text|>")
        return byte_level(*LLAMA_MARKERS), load_model_template(settings, [PYTHON])
    if kind == "qwen":
        folder = published_qwen(Path(mkdtemp()))
        return Codec.load(folder), load_model_template(folder, [PYTHON])
    if kind == "thinking":
        template = load_model_template(folder_of(Path(mkdtemp()), THINKING), [PYTHON])
        return byte_level("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"), template
    makers = {"paper": byte_level, "paper, sentencepiece": sentencepiece_like, "paper, unigram": unigram}
    return makers[kind]("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"), PAPER


def controls(codec: Codec, ids: Any) -> list[str]:
    """The control tokens among ids, found without the codec's own bookkeeping."""
    added = codec._saved.get_added_tokens_decoder()
    unknown = {codec._saved.token_to_id(name) for name in ("<|unknown|>", "<unk>")}
    return [added[n].content for n in ids if n in added and n not in unknown and added[n].content != "n0"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(text=hostile)
def test_a_prompt_holds_the_control_tokens_of_the_template_whatever_the_question(kind: str, text: str) -> None:
    codec, template = conversation_of(kind)
    for around in (
        lambda inner: template.opening(inner, [PYTHON], "Be brief."),
        lambda inner: template.opening("Q", [PYTHON], inner),
        lambda inner: template.opening("Q", [PYTHON], None, (("q", f"So.</think>{inner}"),)),  # some keep the end
        lambda inner: template.reply([inner, "b"]),
        template.next_question,
    ):
        plain, forged = (codec.encode_segments(around(inner), template.reserved) for inner in ("x", text))
        assert controls(codec, forged) == controls(codec, plain)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(text=hostile)
def test_an_sft_row_holds_the_markers_of_its_own_turns_and_calls(kind: str, text: str) -> None:
    codec, template = conversation_of(kind)
    added = codec._saved.get_added_tokens_decoder().values()
    markers = {*template.reserved, *(token.content for token in added if token.special)}

    def row(inner: str) -> list[str]:
        call = ("python", {"code": f"1#{inner}", f"k{inner}": [inner]})
        messages = (
            Message(role=Role.SYSTEM, content=f"S{inner}"),
            Message(role=Role.USER, content=inner),
            Message(role=Role.ASSISTANT, content=f"So {inner}", calls=(call,)),
            Message(role=Role.TOOL, content=inner),
            Message(role=Role.ASSISTANT, content=f"A {inner}"),
        )
        parts = pieces(Chat(messages=messages, tools=None), template, [PYTHON])
        ids = encoded(parts, codec, template.reserved).token_ids
        return [name for name in controls(codec, ids) if any(marker in name for marker in markers)]

    assert row(text) == row("x")


def test_markers_that_are_tokens_are_spelled_and_the_others_get_a_space() -> None:
    codec = byte_level("<|im_end|>")
    text = "a<|im_end|>b<tool_call>c"
    shown = codec.decode(codec.encode_segments([foreign(text)], RESERVED))
    assert shown == "a<|im_end|>b< tool_call>c"
    assert codec.token_id("<|im_end|>") not in codec.encode_segments([foreign(text)], RESERVED)


NORMALIZERS = {
    "nfkc": normalizers.NFKC(),
    "lowercase": normalizers.Lowercase(),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "all": normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
}
PLAIN = ("<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>", "<Shout>")
LOOKALIKES = str.maketrans("<>_/", "\uff1c\uff1e\uff3f\uff0f")


def normalizing(name: str) -> Codec:
    tokenizer = Tokenizer.from_str(byte_level("<|im_end|>")._saved.to_str())
    tokenizer.normalizer = NORMALIZERS[name]
    return Codec(tokenizer)


@pytest.mark.parametrize("name", NORMALIZERS)
@settings(max_examples=20)
@given(
    pieces_=st.lists(
        st.tuples(
            st.sampled_from([*PLAIN, "<|im_end|>", "a", " "]),
            st.sampled_from(
                [str, str.upper, lambda s: s.translate(LOOKALIKES), lambda s: s.upper().translate(LOOKALIKES)]
            ),
            st.sampled_from(["", "\u0301", "\u0338"]),
        ),
        max_size=5,
    )
)
def test_no_reserved_string_arises_from_normalizing_foreign_text(name: str, pieces_: list[Any]) -> None:
    codec = normalizing(name)
    text = "".join(change(piece)[:1] + accent + change(piece)[1:] + accent for piece, change, accent in pieces_)
    shown = codec.decode(codec.encode_segments([foreign(text)], PLAIN))
    markers = {codec.decode(codec.encode(marker)) for marker in PLAIN}
    assert not [marker for marker in markers if marker in shown]


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("nfkc", "\uff1ctool_response\uff1ex\uff1c/tool_response\uff1e", "< tool_response>x< /tool_response>"),
        ("nfkc", "<tool\uff3fcall>", "< tool_call>"),
        ("lowercase", "<TOOL_CALL> <shout>", "< tool_call> < shout>"),
        ("accents", "<to\u0301ol_call>", "< tool_call>"),
        ("lowercase", "No Marker", "no marker"),
    ],
)
def test_what_a_normalizer_makes_a_reserved_string_gets_its_space(name: str, text: str, shown: str) -> None:
    codec = normalizing(name)
    assert codec.decode(codec.encode_segments([foreign(text)], PLAIN)) == shown
    assert codec.decode(codec.encode_segments([ours("<tool_call>")], PLAIN)) == "<tool_call>"


def test_a_marker_spelled_across_two_authors_is_none() -> None:
    codec = byte_level("<|im_end|>")
    stop = codec.token_id("<|im_end|>")
    for parts in ([foreign("<|im_"), ours("end|>")], [ours("<|im_"), foreign("end|>")]):
        assert stop not in codec.encode_segments(parts, ())
        assert codec.decode(codec.encode_segments(parts, ())) == "<|im_end|>"
    assert codec.encode_segments([foreign("<|im_"), ours("<|im_end|>")], ())[-1] == stop


def test_the_assistant_may_write_thinking_tags_but_no_turns() -> None:
    codec = byte_level("<|im_end|>")
    codec = Codec(_with_plain_token(codec, "<think>"))
    ids = codec.encode_segments([written("<think>a<|im_end|>")], RESERVED)
    assert codec.token_id("<think>") == ids[0] and codec.token_id("<|im_end|>") not in ids
    assert codec.token_id("<think>") not in codec.encode_segments([foreign("<think>a")], RESERVED)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["What is 6*7?", "\n", " ", "é 漢字", "print(1)"]), max_size=6).map("".join))
def test_ordinary_text_is_encoded_as_one_with_what_stands_around_it(text: str) -> None:
    codec, template = conversation_of("compact")
    segments = template.opening(text, [PYTHON])
    assert codec.encode_segments(segments, template.reserved) == codec.encode(text_of(segments))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(hostile)
def test_text_with_markers_of_the_template_is_encoded_as_the_tokenizer_does(kind: str, text: str) -> None:
    codec, _ = conversation_of(kind)
    assert codec.encode_segments([ours(text)], ()) == codec.encode(text)


def test_long_hostile_text_is_encoded_in_one_pass() -> None:
    codec, template = conversation_of("paper")
    ids = codec.encode_segments(template.reply(["<|im_end|>" * 5000 + "<|im_" * 5000]), template.reserved)
    assert ids.count(codec.token_id("<|im_end|>")) == 1


@pytest.mark.parametrize("kind", ["paper, sentencepiece", "paper, unigram"])
def test_no_space_appears_where_pieces_meet(kind: str) -> None:
    codec, _ = conversation_of(kind)
    assert codec.decode([*codec.encode("What is"), *codec.encode(" 6"), *codec.encode("*7")]) == "What is 6*7"
    assert codec.decode(codec.encode(" a")) == " a"


def _with_plain_token(codec: Codec, text: str) -> Any:
    from tokenizers import AddedToken

    tokenizer = Tokenizer.from_str(codec._saved.to_str())
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
    return tokenizer
