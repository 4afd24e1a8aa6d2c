"""A small byte-level BPE trained from given texts, for models that start from random weights.

Fixed phrases become single tokens when merges may cross spaces (`word_merges=False`): a whole JSON wrapper is then one
token, which makes sequences about half as long as with word boundaries. Digits always stay single.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rocstar.dialogue.calls import render_call
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import Template
from rocstar.dialogue.tokenizer_files import ModelFiles
from rocstar.errors import ConfigError

UNKNOWN = "<|unknown|>"
"""Replaces bytes that are neither in the training texts nor printable ASCII; also the padding token."""

# Printable ASCII and the line end as byte-level BPE spells them ("Ġ" is a space, "Ċ" a line end). The other 160 bytes
# get a token only when the texts hold them: in a vocabulary of 512 each of those costs a merge.
ALPHABET = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, markers: Sequence[str], word_merges: bool, atoms: Sequence[str] = ()
) -> Codec:
    """Train a tokenizer with at most `vocab_size` ids; the same texts give the same tokenizer.

    markers      special tokens, kept whole; no merge crosses them
    atoms        ordinary strings that are also kept whole (pieces of the call wrapper, placeholders)
    word_merges  keep merges inside words (GPT-2's pattern); False lets them cross spaces and punctuation

    Raises ConfigError when `vocab_size` leaves no room for the alphabet. Source: ours.
    """
    refuse_small_vocabulary(vocab_size, markers, atoms)
    tokenizer = _untrained(word_merges)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(atoms),
        special_tokens=[UNKNOWN, *markers],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts, [*markers, *atoms]), trainer)
    tokenizer.add_tokens([AddedToken(atom, normalized=False) for atom in atoms])
    return Codec(tokenizer, ModelFiles(tokenizer={"unk_token": UNKNOWN, "pad_token": UNKNOWN}))


def refuse_small_vocabulary(vocab_size: int, markers: Sequence[str], atoms: Sequence[str]) -> None:
    """Raises ConfigError when `train_bpe` would have no room for the alphabet."""
    smallest = len(ALPHABET) + len(markers) + len(atoms) + 1
    if vocab_size < smallest:
        raise ConfigError(f"model.vocab_size {vocab_size} is too small; set it to at least {smallest}")


def fixed_phrases(template: Template, tool_name: str) -> tuple[str, ...]:
    """The text a conversation repeats word for word (roles, tool tags, call wrapper, answer box), for `train_bpe`'s
    atoms: without them the merges that build up these phrases use a third of a vocabulary of 512. Only for templates
    without a system text, which would become one huge atom. Source: ours."""
    hole = "\0"
    call = render_call(tool_name, {"code": ""}).replace('""', f'"{hole}"')
    opening, reply = text_of(template.opening(hole, ())), text_of(template.reply([hole]))
    texts = opening, reply, call, f"<answer>\\boxed{{{hole}}}</answer>"
    phrases = (piece for text in texts for piece in re.split(f"{hole}|{re.escape(template.stop)}", text))
    return tuple(dict.fromkeys(filter(None, phrases)))


def _untrained(word_merges: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=word_merges),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(texts: Iterable[str], whole: Sequence[str]) -> Iterator[str]:
    """Texts cut at the strings kept whole: the trainer does not look for them itself, and a merge that crosses one
    could never be used."""
    longest_first = sorted(whole, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    for text in texts:
        yield from filter(None, pattern.split(text))
