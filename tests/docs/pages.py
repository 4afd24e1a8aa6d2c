"""What the pages of this repository show: their blocks of code, with what each needs, and their links. Reads only.

A block that tests cannot carry out says so in a comment on the line before it, which readers of the page do not see:

    <!-- needs: gpu -->                                   for the whole block
    <!-- needs: hours (rocstar train, rocstar plan) -->   for those of its commands that begin so
    <!-- needs: hours (rocstar train mine.toml$) -->      $ is the end of a command

The reasons are `REASONS`. What cannot be run is parsed and checked all the same (`test_blocks.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
"""The pages whose blocks are checked here; tests/docs says which tests check those of tutorials."""

LANGUAGES = {"sh", "python", "toml", "json", "yaml", "text", "{toctree}"}
REASONS = {
    "gpu": "a GPU",
    "network": "files or services from the network",
    "cluster": "several machines",
    "hours": "more time than tests have",
    "library": "a library that rocstar does not install",
    "yours": "a file, a model or code of the reader's own",
    "fragment": "the rest of a program that the page does not show",
}

MARKDOWN = MarkdownIt("commonmark").enable("table")
WITHOUT_WORDS = MarkdownIt("commonmark").enable("table").disable("inline")  # each process of the tests reads all blocks
MARK = re.compile(r"<!-- needs: (\w+)(?: \((.+)\))? -->")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Why something is not run."""

    reason: str
    """One of `REASONS`."""
    beginnings: tuple[str, ...]
    """Of the commands that it holds for; none: it holds for the whole block."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    """Of the first line of code, from 1."""
    language: str
    text: str
    needs: tuple[Need, ...]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @cached_property
    def commands(self) -> list[str]:
        """The command lines of a shell block, without their comments; a line that ends in a backslash goes on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := without_comment(line))]

    def need(self, command: str = "") -> str | None:
        """Why the block, or one of its commands, is not run; None: it is."""
        for need in self.needs:
            if not need.beginnings or any(f"{command}$".startswith(beginning) for beginning in need.beginnings):
                return need.reason
        return None


def blocks(page: Path) -> list[Block]:
    """All of a page, in order. Raises ValueError for a comment that starts like a mark and is none, and for an indented
    block, which names no language."""
    found: list[Block] = []
    needs: list[Need] = []
    for token in WITHOUT_WORDS.parse(page.read_text()):
        if token.type == "html_block":
            needs += _needs(token.content)
        elif token.type == "fence":
            assert token.map is not None
            language, line = token.info.strip(), token.map[0] + 2
            found.append(Block(page=page, line=line, language=language, text=token.content, needs=tuple(needs)))
            needs = []
        elif token.type == "code_block":
            raise ValueError(f"{page}: {token.content[:40]!r} is an indented block; write a fence with its language")
        elif needs:
            raise ValueError(f"{page}: {needs} stands before no block")
    return found


def without_comment(line: str) -> str:
    """A shell line up to its comment: a # that stands outside quotes and after a space."""
    found = re.match(r"""(?:'[^']*'|"[^"]*"|[^'"#]|(?<=\S)#)*""", line)
    return found[0].strip() if found else ""


def _needs(comment: str) -> list[Need]:
    marks = MARK.findall(comment)
    if len(marks) != comment.count("needs:") or any(reason not in REASONS for reason, _ in marks):
        raise ValueError(f"{comment.strip()!r} is no mark; write <!-- needs: REASON --> with one of {sorted(REASONS)}")
    return [Need(reason=reason, beginnings=tuple(b for b in which.split(", ") if b)) for reason, which in marks]


def inline_code(page: Path) -> list[str]:
    """Every `code span`."""
    return [token.content for token in _inline(page) if token.type == "code_inline"]


def links(page: Path) -> list[str]:
    """Every target of a link or picture."""
    targets = [token.attrGet("href") or token.attrGet("src") for token in _inline(page)]
    return [str(target) for target in targets if target]


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings, as a forge names them. Many links lead to one page."""
    tokens = MARKDOWN.parse(page.read_text())
    titles = [after for token, after in pairwise(tokens) if token.type == "heading_open"]
    names: list[str] = []
    for title in titles:
        text = "".join(child.content for child in title.children or ())
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


def _inline(page: Path) -> list[Token]:
    return [child for token in MARKDOWN.parse(page.read_text()) for child in token.children or ()]
