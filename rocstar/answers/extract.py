"""Find the final answer in text a model wrote. Pure text scanning in linear time; what the answer is worth is
decided in `grade.py`, and nothing here guesses at answers that are not boxed.

    "so <answer>it is \\boxed{\\frac{1}{2}}</answer>"   strict and lenient: "\\frac{1}{2}"
    "so \\boxed{3} <answer>three</answer>"             strict: None, lenient: "3"
    "\\boxed{3} and then \\boxed{4"                     "3", the last box that closes
    "\\boxed{x = \\boxed{5}}"                           "5", the box that opens last
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A doubled backslash before `boxed` is what text looks like after one JSON round trip too many; as LaTeX it would
# be a line break followed by the letters "boxed{", which nobody writes.
_BRACES = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_ANSWER_TAG = re.compile(r"</?answer>")


def last_box(text: str) -> str | None:
    """Content, stripped, of the balanced `\\boxed{}` or `\\fbox{}` that opens last; None when there is none.

    Escaped braces do not count. Source: paper §2.1 (final result in `\\boxed{}`); release, prime_math."""
    spans = list(_boxes(text)) if "box" in text else []
    if not spans:
        return None
    start, end = max(spans)
    return text[start:end].strip()


def answer_blocks(text: str) -> list[str]:
    """Contents of the well-formed `<answer>...</answer>` blocks, in order: an opening tag and the next closing tag
    with no other answer tag between them."""
    blocks = []
    opened: int | None = None
    for tag in _ANSWER_TAG.finditer(text):
        if tag.group() == "<answer>":
            opened = tag.end()
        elif opened is not None:
            blocks.append(text[opened : tag.start()])
            opened = None
    return blocks


def strict_answer(text: str) -> str | None:
    """The last box inside the last well-formed answer block; None when either is missing. Source: paper §2.2.1."""
    blocks = answer_blocks(text)
    return last_box(blocks[-1]) if blocks else None


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of the content of every box that closes, in order of closing."""
    opened: list[int | None] = []  # content start of a box, None for a plain brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if match["box"]:
            opened.append(match.end())
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None:
                yield start, match.start()
