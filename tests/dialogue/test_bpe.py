import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.dialogue.bpe import UNKNOWN, fixed_phrases, train_bpe
from rocstar.dialogue.calls import render_call
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError

COMPACT = template_named("compact")
TEXTS = [
    text_of(COMPACT.opening(f"What is {n}*{n + 7}?", ()))
    + render_call("python", {"code": f"print({n}*{n + 7})"})
    + COMPACT.stop
    + text_of(COMPACT.reply([str(n * (n + 7))]))
    + f"<answer>\\boxed{{{n * (n + 7)}}}</answer>{COMPACT.stop}"
    for n in range(100, 300)
]


def trained(*, word_merges: bool = False, atoms: tuple[str, ...] = (), vocab_size: int = 320) -> Codec:
    return train_bpe(TEXTS, vocab_size=vocab_size, markers=COMPACT.markers, word_merges=word_merges, atoms=atoms)


CODEC = trained(atoms=fixed_phrases(COMPACT, "python"))


def test_the_same_texts_give_the_same_tokenizer() -> None:
    first, second = trained(), trained()
    assert first.vocab_size == second.vocab_size
    assert [first.encode(text) for text in TEXTS] == [second.encode(text) for text in TEXTS]


def test_digits_stay_single() -> None:
    ids = CODEC.encode("1234567")
    assert [CODEC.decode([token]) for token in ids] == list("1234567")


def test_merges_cross_spaces_only_without_word_merges() -> None:
    atoms = fixed_phrases(COMPACT, "python")
    assert len(trained(atoms=atoms).encode("What is ")) == 1
    assert len(trained(atoms=atoms, word_merges=True).encode("What is ")) == 3


@pytest.mark.parametrize("word_merges", [False, True])
def test_fixed_phrases_are_single_tokens(word_merges: bool) -> None:
    phrases = fixed_phrases(COMPACT, "python")
    codec = trained(word_merges=word_merges, atoms=phrases)
    assert '<tool_call>\n{"name": "python", "arguments": {"code": "' in phrases
    assert "\n<|im_start|>user\n<tool_response>\n" in phrases
    assert all(codec.token_id(phrase) for phrase in phrases)


def test_atoms_and_markers_count_toward_the_vocabulary() -> None:
    assert CODEC.vocab_size <= 320
    with pytest.raises(ConfigError, match="vocab_size 60 is too small"):
        trained(vocab_size=60)


def test_a_byte_never_seen_is_marked_and_not_dropped() -> None:
    assert CODEC.decode(CODEC.encode("aéb")) == f"a{UNKNOWN}{UNKNOWN}b"


@settings(deadline=None)
@given(st.lists(st.sampled_from(TEXTS) | st.text(st.characters(min_codepoint=32, max_codepoint=126))))
def test_encoding_then_decoding_gives_the_text_back(parts: list[str]) -> None:
    text = "\n".join(parts)
    assert CODEC.decode(CODEC.encode(text)) == text
