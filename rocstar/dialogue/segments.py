"""Text with its author. Templates return segments, `Codec.encode_segments` encodes them; no text is checked here.

The author decides which control tokens a stretch of text may become. Text that looks like a marker of the template is
one only where the template itself wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_HARMLESS = re.compile(r"[\w.\- ]*")
_HOLE = "\ufdd0"  # a noncharacter: never in interchanged text; strings that hold one are replaced whole below


class Author(StrEnum):
    TEMPLATE = "template"
    """Our own markup: may become any token."""
    ASSISTANT = "assistant"
    """Text that the model writes or learns: any token except special ones and those with a reserved string."""
    OTHERS = "others"
    """Questions, system texts, tool schemas, tool output: no control token at all."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Text by one author."""

    text: str
    author: Author = Author.TEMPLATE


def ours(text: str) -> Segment:
    return Segment(text)


def written(text: str) -> Segment:
    return Segment(text, Author.ASSISTANT)


def foreign(text: str) -> Segment:
    return Segment(text, Author.OTHERS)


def text_of(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def is_harmless(text: str) -> bool:
    """Whether the text has only letters, digits, `_`, `.`, `-` and spaces, so that it can't be a marker."""
    return _HARMLESS.fullmatch(text) is not None


def json_segments(value: Any, author: Author) -> Iterator[Segment]:
    """`value` as JSON in one line: punctuation, numbers and plain words are ours; every string (keys too) that could
    hold a marker is `author`'s. Raises TypeError, ValueError for what JSON cannot write."""
    strings: list[str] = []

    def hole(text: str) -> str:
        if is_harmless(text):
            return text
        strings.append(text)
        return f"{_HOLE}{len(strings) - 1}{_HOLE}"

    def holed(inner: Any) -> Any:
        if isinstance(inner, str):
            return hole(inner)
        if isinstance(inner, dict):
            return {hole(key) if isinstance(key, str) else key: holed(one) for key, one in inner.items()}
        return [holed(one) for one in inner] if isinstance(inner, list | tuple) else inner

    for place, part in enumerate(re.split(f"{_HOLE}(\\d+){_HOLE}", json.dumps(holed(value), ensure_ascii=False))):
        text = json.dumps(strings[int(part)], ensure_ascii=False)[1:-1] if place % 2 else part
        if text:
            yield Segment(text, author if place % 2 else Author.TEMPLATE)
