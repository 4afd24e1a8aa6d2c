"""Build SFT rows: sources become checked rows, rows become a mix, and a datasheet counts the fate of each.

    rows.jsonl      the mix, in the order of training
    refused.jsonl   every refused row, with file, line, field and reason
    datasheet.json  counts by source and reason, lengths, shares, hashes

The same recipe and files give the same bytes, rewriting included once the endpoint's answers are in the cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from rocstar.data.rows import fingerprint, output_folder, refuse_missing, rows_and_faults
from rocstar.data.sft.check import check, check_tokens
from rocstar.data.sft.endpoint import AnswerCache, ChatEndpoint, rewritten
from rocstar.data.sft.format import Chat, Refusal, Refused, dumped
from rocstar.data.sft.layouts import conversation, reader_of
from rocstar.data.sft.mix import RowStore, Share, chosen, ordered, quantiles, shares, smaller
from rocstar.data.sft.recipe import MixRecipe, SourcePart
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import CHAT
from rocstar.dialogue.tokenizer_files import found_file
from rocstar.errors import ConfigError, DataError, naming
from rocstar.protocols import ToolSpec
from rocstar.support.weights import hash_of
from rocstar.types import utf8

ROWS, REFUSED, DATASHEET = "rows.jsonl", "refused.jsonl", "datasheet.json"
SCHEMA_VERSION = 1
EXCERPT_CHARS = 200
UNDER_WAY = 4  # rows in work per allowed request, so that one slow answer does not idle the rest
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")

Note = Callable[[str], None]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(slots=True, kw_only=True)
class SourceCounts:
    """Counts of the rows of one source by fate."""

    rows: int = 0
    """Lines read; each is built or refused."""
    calls: int = 0
    """Tool calls of the built rows, each validated."""
    refused: Counter[Refusal] = field(default_factory=Counter)
    first_refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A conversation, as read by the layout or as checked, and its place in the source."""

    source: str
    """Name of the source in the recipe."""
    file: str
    line: int
    """From 1; in files that are one JSON list, the number of the item; in parquet, of the row."""
    row: Any
    made: Chat | Refused
    calls: int = 0
    """Tool calls that were validated."""
    tokens: int = 0
    """0 where nothing was measured."""

    def refusal(self, refused: Refused) -> dict[str, Any]:
        """A line of the file of refused rows; its excerpt is the start of the row as it was read."""
        row = self.row
        if isinstance(row, dict):  # parquet rows may hold dates and the like
            row = json.dumps(row, ensure_ascii=False, default=str)
        return {
            "source": self.source,
            "file": self.file,
            "line": self.line,
            "reason": refused.reason,
            "field": refused.field,
            "detail": refused.detail,
            "excerpt": str(row)[:EXCERPT_CHARS],
        }


def build(
    recipe: MixRecipe, out: Path, *, code_tool: ToolSpec, environment: Mapping[str, str], note: Note
) -> dict[str, Any]:
    """Write the three files into `out` and return the datasheet. `environment` is where the endpoint's key is looked
    up; `note` is called with one sentence per source. Starts its own event loop. Raises ConfigError, DataError,
    EngineUnavailable; then the files in `out` are unchanged, and `refused.jsonl.tmp` shows how far this build got."""
    refuse_missing(file for s in recipe.source for file in s.files)
    for source in recipe.source:
        reader_of(source.layout, code_tool)  # refuses code that is not there before anything is written
    output_folder(out, "--out ")
    # Files are written under another name until all of them are done.
    partial = {name: out / f"{name}.tmp" for name in (ROWS, REFUSED, DATASHEET)}
    with naming(out), RowStore(out / f".{ROWS}.shelf") as store:
        with partial[REFUSED].open("w", encoding="utf-8") as refused:
            counts = asyncio.run(_read_sources(recipe, store, refused, code_tool, environment, note))
        if not store.ids:
            raise DataError(f"no row of any source was built; {partial[REFUSED]} says why")
        taken = _shares(recipe, store)
        for sentence in smaller(taken, recipe.mix.rows):
            note(sentence)
        _write_mix(partial[ROWS], store, taken, recipe.mix.seed)
        sheet = {
            **_datasheet(recipe, counts, taken, store, rows_sha256=fingerprint(partial[ROWS])[0]),
            "refused_sha256": fingerprint(partial[REFUSED])[0],
        }
    partial[DATASHEET].write_text(json.dumps(sheet, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, written in partial.items():
        os.replace(written, out / name)
    return sheet


async def _read_sources(
    recipe: MixRecipe,
    store: RowStore,
    refused: IO[str],
    code_tool: ToolSpec,
    environment: Mapping[str, str],
    note: Note,
) -> dict[str, SourceCounts]:
    """Every row of every source goes into the store, or into the file of refused rows."""
    codec = Codec.load(recipe.mix.tokenizer) if recipe.mix.tokenizer else None
    markers = tuple(dict.fromkeys((*CHAT.reserved, *(codec.added_tokens if codec else ()))))
    measure = partial(_measured, codec=codec, max_tokens=recipe.mix.max_tokens)
    counts = {source.name: SourceCounts() for source in recipe.source}
    async with _endpoint(recipe, environment, note) as endpoint:
        for source in recipe.source:
            counted = counts[source.name]
            drafts = _drafts(source, counted, code_tool)
            async for draft in _checked_drafts(drafts, source, endpoint, markers, measure):
                _keep_or_refuse(draft, store, refused, counted)
            built = len(store.positions(source.name))
            why = f", the first row refused for: {counted.first_refusal}" if counted.rows and not built else ""
            note(f"{source.name}: {counted.rows} rows read, {built} conversations built{why}")
    return counts


@asynccontextmanager
async def _endpoint(
    recipe: MixRecipe, environment: Mapping[str, str], note: Note
) -> AsyncIterator[ChatEndpoint | None]:
    part = recipe.endpoint
    if part is None or not any(source.rewrite for source in recipe.source):
        yield None
        return
    if part.key_variable and part.key_variable not in environment:
        raise ConfigError(f"endpoint.key_variable {part.key_variable!r} is not set in the environment; export it")
    key = environment[part.key_variable] if part.key_variable else None
    cache = AnswerCache(Path(part.cache))
    try:
        settings = part.model_dump(exclude={"key_variable", "cache"})
        async with ChatEndpoint(**settings, key=key, cache=cache) as endpoint:
            yield endpoint
            note(f"endpoint: {endpoint.http.sent} requests sent, {endpoint.remembered} answered from {part.cache}")
    finally:
        cache.close()


def _drafts(source: SourcePart, counts: SourceCounts, code_tool: ToolSpec) -> Iterator[Draft]:
    """The layout's conversation for every row of a source, in order. Raises DataError."""
    reader = reader_of(source.layout, code_tool)
    for file in source.files:
        for line, row in islice(rows_and_faults(file), source.limit):
            counts.rows += 1
            yield Draft(source=source.name, file=file, line=line, row=row, made=conversation(reader, row))


async def _checked_drafts(
    drafts: Iterable[Draft],
    source: SourcePart,
    endpoint: ChatEndpoint | None,
    markers: tuple[str, ...],
    measure: Callable[[Chat], int],
) -> AsyncIterator[Draft]:
    """The drafts in their order, each rewritten where asked, checked and measured, or refused. markers: strings that no
    text may hold."""

    async def finished(draft: Draft) -> Draft:
        if isinstance(draft.made, Refused):
            return draft
        chat = replace(draft.made, source=source.name)
        try:
            if source.rewrite and endpoint:
                chat = await rewritten(chat, source.rewrite, endpoint)
            return replace(draft, made=chat, calls=check(chat, markers), tokens=measure(chat))
        except Refused as refused:
            return replace(draft, made=refused)

    width = endpoint.concurrency * UNDER_WAY if source.rewrite and endpoint else 1
    async for draft in _in_order(drafts, finished, width):
        yield draft


async def _in_order(items: Iterable[T], work: Callable[[T], Awaitable[U]], width: int) -> AsyncIterator[U]:
    """Results in the order of the items, `width` of them under way. An error of `work` ends everything: the others are
    cancelled."""
    waiting: deque[asyncio.Future[U]] = deque()
    try:
        for item in items:
            waiting.append(asyncio.ensure_future(work(item)))
            if len(waiting) >= width:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _measured(chat: Chat, codec: Codec | None, max_tokens: int | None) -> int:
    """Tokens of the row as in training; also checks its loss spans. Without a codec nothing is measured."""
    if codec is None:
        return 0
    parts = list(pieces(chat, CHAT, chat.tools or ()))
    row = encoded(parts, codec, CHAT.reserved)
    if max_tokens is not None and len(row.token_ids) > max_tokens:
        detail = f"{len(row.token_ids)} tokens; at most {max_tokens} are taken"
        raise Refused(Refusal.TOO_LONG, "messages", detail)
    check_tokens(row, parts, codec)
    return len(row.token_ids)


def _keep_or_refuse(draft: Draft, store: RowStore, refused: IO[str], counts: SourceCounts) -> None:
    why = draft.made
    if isinstance(why, Chat):
        if store.add(why, draft.tokens):
            counts.calls += draft.calls
            return
        why = Refused(Refusal.DUPLICATE, "messages", f"the same row {why.id} came before")
    counts.refused[why.reason] += 1
    counts.first_refusal = counts.first_refusal or str(why)
    # Half surrogates, a possible reason of refusal, cannot be written as UTF-8.
    refused.write(utf8(dumped(draft.refusal(why))) + "\n")


def _shares(recipe: MixRecipe, store: RowStore) -> dict[str, Share]:
    available = {source.name: len(store.positions(source.name)) for source in recipe.source}
    weights = {source.name: source.weight for source in recipe.source if source.weight is not None}
    empty = [name for name in weights if not available[name]]
    if empty and recipe.mix.rows is None:
        raise DataError(
            f"source {empty[0]!r} gave no row, so no mix keeps its weight; mend it, take it out, or set mix.rows"
        )
    return shares(available, weights, recipe.mix.rows)


def _write_mix(path: Path, store: RowStore, taken: Mapping[str, Share], seed: int) -> None:
    """The chosen rows in their final order."""
    positions: list[int] = []
    for name, share in taken.items():
        of_source = store.positions(name)
        positions += [of_source[n] for n in chosen([store.ids[n] for n in of_source], share.taken, seed)]
    with path.open("wb") as rows:
        rows.writelines(store.line(position) for position in ordered(positions, store.ids, f"{seed}\x1forder"))


def _datasheet(
    recipe: MixRecipe,
    counts: Mapping[str, SourceCounts],
    taken: Mapping[str, Share],
    store: RowStore,
    *,
    rows_sha256: str | None,
) -> dict[str, Any]:
    """Where each row went, by source and reason, with the hashes that let it be checked: plain JSON values. Nothing in
    it depends on time or place; file names are as in the recipe. Raises DataError."""
    tokenizer = recipe.mix.tokenizer
    files = [file for name in TOKENIZER_FILES if tokenizer and (file := found_file(Path(tokenizer), name))]
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe_sha256": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        "recipe": recipe.model_dump(mode="json"),
        "tokenizer_sha256": hash_of(files) if tokenizer else None,
        "rows": sum(share.taken for share in taken.values()),
        "rows_sha256": rows_sha256,
        "sources": [_source_row(source, counts[source.name], taken[source.name], store) for source in recipe.source],
    }


def _source_row(source: SourcePart, counts: SourceCounts, share: Share, store: RowStore) -> dict[str, Any]:
    positions = store.positions(source.name)
    return {
        "name": source.name,
        "layout": source.layout,
        "files": [{"path": file, "sha256": fingerprint(file)[0]} for file in source.files],
        "rows_read": counts.rows,
        "refused": {str(reason): count for reason, count in sorted(counts.refused.items())},
        "built": len(positions),
        "calls_validated": counts.calls,
        "tokens": quantiles([tokens for tokens in store.lengths(positions) if tokens]),
        "wanted": share.wanted,
        "taken": share.taken,
        "short": share.short,
        "left_over": share.available - share.taken,
    }
