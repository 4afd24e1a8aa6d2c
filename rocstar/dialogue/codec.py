"""Text <-> token ids over any Hugging Face fast tokenizer, without adding BOS, padding or truncation."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from rocstar.dialogue.segments import Author, Segment
from rocstar.dialogue.tokenizer_files import ModelFiles, read_model_files, read_tokenizer, without_prefix_spaces
from rocstar.errors import ConfigError, first_line
from rocstar.protocols import Marked, end_of_answer

PIECES = 64
"""Texts between markers whose tokens are kept: the system text and the list of tools begin every prompt."""


class Codec:
    """A TextCodec that can be saved beside a model."""

    def __init__(self, tokenizer: Tokenizer, files: ModelFiles | None = None) -> None:
        """files: the other files of the tokenizer's folder, which `save` keeps."""
        # A tokenizer.json may come with a length limit, padding or dropout of merges; each would change the ids.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        self._saved = tokenizer
        self._tokenizer = without_prefix_spaces(tokenizer)
        self._files = files or ModelFiles()
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: (number, bool(token.special)) for number, token in added.items()}
        self._forbidden = cache(self._forbidden_by)
        raw = [token for token in added.values() if not token.normalized]
        longest_first = sorted((re.escape(token.content) for token in raw), key=len, reverse=True)
        joined = any(token.lstrip or token.single_word for token in raw)
        self._cuts = None if joined or not raw else re.compile("|".join(longest_first))
        self._piece = lru_cache(PIECES)(self._encoded_piece)

    @classmethod
    def load(cls, folder: Path | str) -> Codec:
        """Read a Hugging Face folder: `tokenizer.json`, or the older `vocab.json` and `merges.txt`, and the settings
        beside it (tokenizer_config.json, generation_config.json, config.json). Raises ConfigError."""
        files = read_model_files(Path(folder))
        return cls(read_tokenizer(Path(folder), files.tokenizer), files)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included; the model's embedding may be larger."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts that are always tokens of their own, including those that mark turns and calls."""
        return tuple(self._added)

    def covered(self, rows: int) -> int:
        """How many of a model's first `rows` embedding rows have a token here."""
        return sum(number < rows for number in set(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    def encode(self, text: str) -> list[int]:
        """Encode `text` as the template's: every marker in it becomes its token."""
        return list(self._encoding(text).ids)

    def encode_segments(self, segments: Iterable[Segment], reserved: Sequence[str]) -> list[int]:
        """Encode the segments as one text, in which only the template can write control tokens.

        The ids are those of the joined text, as from `apply_chat_template`, unless another author's text would become a
        control token, whole or in part: the text is then cut inside that token and both sides are encoded separately,
        which spells the same characters in ordinary tokens. A string of `reserved` that is not a single token would be
        encoded the same for every author; in another author's text it gets a space after its first character
        (`<tool_call>` becomes `< tool_call>`); so does text that the tokenizer's normalizer would turn into such a
        string. Source: ours."""
        plain = [marker for marker in reserved if marker not in self._added]
        used = [segment for segment in segments if segment.text]
        texts = [s.text if s.author is Author.TEMPLATE else self._neutral(s.text, plain) for s in used]
        forbidden = self._forbidden(tuple(reserved))
        ends = [*accumulate(map(len, texts))]
        return self._encoded("".join(texts), 0, ends, [forbidden.get(segment.author, frozenset()) for segment in used])

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of the text, a hundred times faster than encoding: each character counts as one
        over the length of the longest token that contains it. Halved, because tokens may begin within a character, and
        normalizers merge some. Source: ours."""
        longest, most = self._longest, max(self._longest.values())
        return int(sum(times / longest.get(character, most) for character, times in Counter(text).items()) / 2)

    @cached_property
    def _longest(self) -> Mapping[str, int]:
        """By character: the length of the longest token that contains it."""
        longest: dict[str, int] = {}
        for token in map(self.decode, ([number] for number in self._tokenizer.get_vocab().values())):
            longest |= {character: len(token) for character in token if len(token) > longest.get(character, 0)}
        return longest

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_id(self, text: str) -> int:
        """The id of a marker. Raises ConfigError when the tokenizer has no single token for it."""
        ids = self.encode(text)
        if len(ids) != 1 or self.decode(ids) != text:
            raise ConfigError(
                f"{text!r} is {len(ids)} tokens in this tokenizer and must be one; "
                "give the model that token (`rocstar model add-tokens`), or use rollout.template = 'model', its own."
            )
        return ids[0]

    def stop_ids(self, template: Marked) -> tuple[int, ...]:
        """Every token that ends an assistant turn: the template's stop marker first, then the end-of-sequence tokens
        named by the tokenizer and by the model's generation_config.json and config.json. Raises ConfigError."""
        named = filter(None, (template.stop, end_of_answer(template), self._files.eos_token))
        return tuple(dict.fromkeys((*map(self.token_id, named), *self._files.eos_ids)))

    def save(self, folder: Path | str, template: Marked) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json, so that transformers and vLLM load
        them, render the template, and stop where a rollout would. Settings of the tokenizer and its model are kept;
        under our own templates the stop marker becomes the end-of-sequence token. Raises ConfigError."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / "tokenizer.json").write_text(self._saved.to_str(pretty=True), "utf-8")  # its `save` raises no OSError
        stops = self.stop_ids(template)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": template.stop, **self._files.tokenizer}
        if template.jinja is not None:
            settings |= {"chat_template": template.jinja}
            settings |= {"eos_token": template.stop} if template.stop in getattr(template, "markers", ()) else {}
        elif self._files.chat_template is not None:
            (target / "chat_template.jinja").write_text(self._files.chat_template, encoding="utf-8")
        _write(target / "tokenizer_config.json", settings)
        _write(target / "generation_config.json", {**self._files.generation, "eos_token_id": list(stops)})

    def _forbidden_by(self, reserved: Sequence[str]) -> dict[Author, frozenset[int]]:
        """Ids forbidden in an author's text. Added tokens of only letters, digits and blanks are words of the
        vocabulary, not markers."""
        marks = {
            text: number
            for text, (number, special) in self._added.items()
            if special or not all(letter.isalnum() or letter.isspace() for letter in text)
        }
        turns = {
            number for text, number in marks.items() if self._added[text][1] or any(mark in text for mark in reserved)
        }
        return {Author.OTHERS: frozenset(marks.values()), Author.ASSISTANT: frozenset(turns)}

    def _neutral(self, text: str, plain: Sequence[str]) -> str:
        """`text` without the strings of `plain`, before and after the normalizer (NFKC, lowercase ...)."""
        text = _spaced(text, plain)
        normalizer = self._tokenizer.normalizer
        if normalizer is None or not plain:
            return text
        normalized = normalizer.normalize_str(text)
        spaced = _spaced(normalized, [normalizer.normalize_str(marker) for marker in plain])
        return text if spaced == normalized else spaced

    def _encoded(self, text: str, start: int, ends: Sequence[int], forbidden: Sequence[frozenset[int]]) -> list[int]:
        """Ids of `text`, which begins at character `start` of the full text. ends, forbidden: of each segment, where it
        ends and which tokens it must not become."""
        token_ids, found, begin = list[int](), set[int | None](), start
        for piece in self._pieces(text):
            there, suspects = self._piece(piece)
            token_ids += there
            found |= {_cut(ends, forbidden, token, begin + left, begin + right) for token, (left, right) in suspects}
            begin += len(piece)
        cuts = sorted(cut - start for cut in found if cut is not None)
        if not cuts:
            return token_ids
        parts = pairwise((0, *cuts, len(text)))
        return [
            token for left, right in parts for token in self._encoded(text[left:right], start + left, ends, forbidden)
        ]

    def _pieces(self, text: str) -> list[str]:
        """`text` cut before each marker. The tokenizer looks for markers before all else, so that no other token, and
        nothing that a normalizer or a merge does, crosses the beginning of one."""
        begins = [found.start() for found in self._cuts.finditer(text)] if self._cuts else []
        return [text[left:right] for left, right in pairwise((0, *begins, len(text))) if left < right]

    def _encoding(self, text: str) -> Encoding:
        """Raises ConfigError for a text that the tokenizer fails on: its regex gives up, or it lacks a token."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):  # of Rust
                raise
            told = f"the tokenizer fails on {text[:40]!r} ({first_line(error)}); take another model"
            raise ConfigError(told) from None

    def _encoded_piece(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, tuple[int, int]]]]:
        """Token ids; and those that some author must not write, with the characters of each."""
        encoding = self._encoding(text)
        markers = self._forbidden(())[Author.OTHERS]
        placed = zip(encoding.ids, encoding.offsets, strict=True)
        return encoding.ids, [(token, characters) for token, characters in placed if token in markers]


def _cut(ends: Sequence[int], forbidden: Sequence[frozenset[int]], token: int, left: int, right: int) -> int | None:
    """Where to cut so that the characters `left` to `right` are not this token: at the edge of the segment that forbids
    it, or in the middle. None if it is allowed, or is a single character, which can't be cut (bytes the tokenizer does
    not know)."""
    place = bisect_right(ends, left)
    while place < len(ends) and (begin := ends[place - 1] if place else 0) < right:
        if token in forbidden[place]:
            if begin > left:
                return begin
            if ends[place] < right:
                return ends[place]
            return (left + right) // 2 if right - left > 1 else None
        place += 1
    return None


def _spaced(text: str, markers: Iterable[str]) -> str:
    for marker in markers:
        text = text.replace(marker, f"{marker[0]} {marker[1:]}")
    return text


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
