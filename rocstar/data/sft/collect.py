"""One source: every row of its files read, rewritten where asked, checked, measured; what fails is a Refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rocstar.data.sft.check import check, check_tokens
from rocstar.data.sft.format import Conversation, dumped
from rocstar.data.sft.layouts import LAYOUTS
from rocstar.data.sft.layouts.base import Layout, Surroundings
from rocstar.data.sft.reading import read_rows
from rocstar.data.sft.recipe import SourcePart
from rocstar.data.sft.refusal import Reason, Refusal, Refused
from rocstar.data.sft.render import encoded, pieces
from rocstar.data.sft.rewrite import Answers, in_order, rewritten
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import CHAT
from rocstar.errors import DataError
from rocstar.protocols import ToolSpec

EXCERPT_CHARS = 200
UNDER_WAY = 4  # rows in work for each request that may be sent, so that one slow answer does not leave the rest idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all rows of a build are held against."""

    codec: Codec | None
    """None to measure nothing."""
    markers: tuple[str, ...]
    """Strings that no text may hold."""
    max_tokens: int | None
    endpoint: Answers | None
    concurrency: int
    """Requests of the endpoint under way at once."""
    code_tool: ToolSpec
    """The tool that runs programs."""
    seed: int


@dataclass(slots=True, kw_only=True)
class SourceCounts:
    """What became of a source's rows, counted."""

    rows: int = 0
    """Lines read."""
    conversations: int = 0
    """What the layout made of them; each is built or refused, and so is each line that gives none."""
    calls: int = 0
    """Tool calls of the built rows, each validated."""
    refused: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    conversation: Conversation
    calls: int
    tokens: int
    """0 where nothing was measured."""
    draft: Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A conversation as the layout read it, and where it was read."""

    file: str
    line: int
    row: Any
    made: Conversation | Refused

    def refusal(self, source: str, refused: Refused) -> Refusal:
        shown = self.row if not isinstance(self.row, dict) else dumped({k: _plain(v) for k, v in self.row.items()})
        return Refusal(
            source=source,
            file=self.file,
            line=self.line,
            reason=refused.reason,
            field=refused.field,
            detail=refused.detail,
            excerpt=str(shown)[:EXCERPT_CHARS],
        )


async def collect(source: SourcePart, bench: Bench, tally: SourceCounts) -> AsyncIterator[Passed | Refusal]:
    """Every row of a source, in order; `tally.rows` and `tally.conversations` are counted here. Raises DataError for a
    file that cannot be read, ConfigError, and EngineUnavailable when the endpoint is gone."""

    async def finish(draft: Draft) -> Passed | Refusal:
        try:
            return await _finished(draft, source, bench)
        except Refused as refused:
            return draft.refusal(source.name, refused)

    width = bench.concurrency * UNDER_WAY if source.rewrite else 1
    async for result in in_order(_drafts(source, bench, tally), finish, width):
        yield result


def _drafts(source: SourcePart, bench: Bench, tally: SourceCounts) -> Iterator[Draft]:
    files = tuple(Path(file) for file in source.files)
    around = Surroundings(
        files=files,
        tool_files=tuple(Path(file) for file in source.tool_files),
        answer_files=tuple(Path(file) for file in source.answer_files),
        other_tools=source.other_tools,
        seed=bench.seed,
        code_tool=bench.code_tool,
    )
    try:
        layout = LAYOUTS[source.layout](around)
    except Refused as refused:  # the layout looks through files before the first row
        raise DataError(f"source {source.name!r}: tool_files or answer_files: {refused}") from None
    for file in files:
        for line, row in islice(read_rows(file), source.limit):
            tally.rows += 1
            for made in _made(layout, row):
                tally.conversations += 1
                yield Draft(file=str(file), line=line, row=row, made=made)


def _made(layout: Layout, row: Any) -> Iterator[Conversation | Refused]:
    if isinstance(row, Refused):
        yield row
    elif not isinstance(row, dict):
        yield Refused(Reason.LAYOUT, "line", f"expected an object with fields, got {type(row).__name__}")
    else:
        try:
            yield from layout(row)
        except Refused as refused:
            yield refused


async def _finished(draft: Draft, source: SourcePart, bench: Bench) -> Passed:
    if isinstance(draft.made, Refused):
        raise draft.made
    conversation = replace(draft.made, source=source.name)
    if source.rewrite and bench.endpoint:
        conversation = await rewritten(conversation, source.rewrite, bench.endpoint)
    calls = check(conversation, bench.markers)
    return Passed(conversation=conversation, calls=calls, tokens=_measured(conversation, bench), draft=draft)


def _measured(conversation: Conversation, bench: Bench) -> int:
    """Tokens of the row as training lays it out; its loss spans are checked on the way."""
    if bench.codec is None:
        return 0
    parts = list(pieces(conversation, CHAT, conversation.tools or ()))
    row = encoded(parts, bench.codec, CHAT.reserved)
    if bench.max_tokens is not None and len(row.token_ids) > bench.max_tokens:
        raise Refused(Reason.TOO_LONG, "messages", f"{len(row.token_ids)} tokens; at most {bench.max_tokens} are taken")
    check_tokens(row, parts, bench.codec)
    return len(row.token_ids)


def _plain(value: Any) -> Any:
    """Parquet rows may hold dates and the like."""
    return value if isinstance(value, str | int | float | list | dict | None) else str(value)
