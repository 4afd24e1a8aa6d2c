"""The story of a build: sources become checked rows, rows become a mix, and a datasheet says what became of each.

    rows.jsonl      the mix, in the order of training
    refused.jsonl   every row left out, with file, line, field and reason
    datasheet.json  counts by source and reason, lengths, shares, hashes

The same recipe and files give the same bytes, rewriting included once the endpoint's answers are in the cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from rocstar.data.rows import output_folder, refuse_missing
from rocstar.data.sft.cache import AnswerCache
from rocstar.data.sft.collect import Bench, Passed, SourceCounts, collect
from rocstar.data.sft.datasheet import datasheet
from rocstar.data.sft.endpoint import Endpoint, Service
from rocstar.data.sft.format import dumped
from rocstar.data.sft.mix import Share, chosen, ordered, shares, smaller
from rocstar.data.sft.reading import file_digest
from rocstar.data.sft.recipe import EndpointPart, MixRecipe, SourcePart
from rocstar.data.sft.refusal import Reason, Refusal, Refused
from rocstar.data.sft.shelf import Shelf
from rocstar.data.sft.tokens import special_tokens
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import CHAT
from rocstar.errors import ConfigError, DataError
from rocstar.protocols import ToolSpec

ROWS, REFUSED, DATASHEET = "rows.jsonl", "refused.jsonl", "datasheet.json"

Note = Callable[[str], None]


def build(
    recipe: MixRecipe, out: Path, *, code_tool: ToolSpec, environment: Mapping[str, str], note: Note
) -> dict[str, Any]:
    """Write the three files into `out` and return the datasheet. `environment` is where the endpoint's key is looked
    up; `note` hears one sentence a source. Starts an event loop of its own. Raises ConfigError, DataError,
    EngineUnavailable; the files in `out` are then those of the build before, and `refused.jsonl.tmp` tells how far
    this one came."""
    refuse_missing(file for s in recipe.source for file in (*s.files, *s.tool_files, *s.answer_files))
    output_folder(out, "--out ")
    with Shelf(out / f".{ROWS}.shelf") as shelf:
        with _partial(out, REFUSED).open("w", encoding="utf-8") as refused:
            tallies = asyncio.run(_fill_all(recipe, shelf, refused, code_tool, environment, note))
        if not shelf.ids:
            raise DataError(f"no row of any source was built; {_partial(out, REFUSED)} says why")
        taken = _shares(recipe, shelf)
        for told in smaller(taken, recipe.mix.rows):
            note(told)
        digest = _write_mix(out, shelf, taken, recipe.mix.seed)
        sheet = datasheet(recipe, tallies, taken, shelf, rows_digest=digest)
    sheet["refused_sha256"] = file_digest(_partial(out, REFUSED))
    text = json.dumps(sheet, indent=2, ensure_ascii=False) + "\n"
    _partial(out, DATASHEET).write_text(text, encoding="utf-8")
    for name in (ROWS, REFUSED, DATASHEET):
        os.replace(_partial(out, name), out / name)
    return sheet


def _partial(out: Path, name: str) -> Path:
    """Where a file is written until all of them are done."""
    return out / f"{name}.tmp"


async def _fill_all(
    recipe: MixRecipe,
    shelf: Shelf,
    refused: IO[str],
    code_tool: ToolSpec,
    environment: Mapping[str, str],
    note: Note,
) -> dict[str, SourceCounts]:
    tallies: dict[str, SourceCounts] = {}
    async with _bench(recipe, code_tool, environment, note) as bench:
        for source in recipe.source:
            tallies[source.name] = await _fill(source, bench, shelf, refused)
            built = len(shelf.positions(source.name))
            note(f"{source.name}: {tallies[source.name].rows} rows read, {built} conversations built")
    return tallies


async def _fill(source: SourcePart, bench: Bench, shelf: Shelf, refused: IO[str]) -> SourceCounts:
    tally = SourceCounts()
    async for result in collect(source, bench, tally):
        if isinstance(result, Passed):
            if shelf.add(result.conversation, result.tokens):
                tally.calls += result.calls
                continue
            again = Refused(Reason.DUPLICATE, "messages", f"the same row {result.conversation.id} came before")
            result = result.draft.refusal(source.name, again)
        _refuse(result, tally, refused)
    return tally


def _refuse(refusal: Refusal, tally: SourceCounts, refused: IO[str]) -> None:
    tally.refused[refusal.reason] += 1
    # Half surrogates, which the row may be refused for, cannot be written as UTF-8.
    refused.write(dumped(refusal.as_row()).encode("utf-8", "replace").decode() + "\n")


def _shares(recipe: MixRecipe, shelf: Shelf) -> dict[str, Share]:
    available = {source.name: len(shelf.positions(source.name)) for source in recipe.source}
    weights = {source.name: source.weight for source in recipe.source if source.weight is not None}
    empty = [name for name in weights if not available[name]]
    if empty and recipe.mix.rows is None:
        raise DataError(
            f"source {empty[0]!r} gave no row, so no mix keeps its weight; mend it, take it out, or set mix.rows"
        )
    return shares(available, weights, recipe.mix.rows)


def _write_mix(out: Path, shelf: Shelf, taken: Mapping[str, Share], seed: int) -> str:
    """The chosen rows in their final order; SHA-256 of the file."""
    positions: list[int] = []
    for name, share in taken.items():
        of_source = shelf.positions(name)
        positions += [of_source[n] for n in chosen([shelf.ids[n] for n in of_source], share.taken, seed)]
    digest = hashlib.sha256()
    with _partial(out, ROWS).open("wb") as rows:
        for position in ordered(positions, shelf.ids, f"{seed}\x1forder"):
            line = shelf.line(position)
            digest.update(line)
            rows.write(line)
    return digest.hexdigest()


@asynccontextmanager
async def _bench(
    recipe: MixRecipe, code_tool: ToolSpec, environment: Mapping[str, str], note: Note
) -> AsyncIterator[Bench]:
    folder = Path(recipe.mix.tokenizer) if recipe.mix.tokenizer else None
    async with _endpoint(recipe, environment, note) as endpoint:
        yield Bench(
            codec=Codec.load(folder) if folder else None,
            markers=tuple(dict.fromkeys((*CHAT.reserved, *(special_tokens(folder) if folder else ())))),
            max_tokens=recipe.mix.max_tokens,
            endpoint=endpoint,
            concurrency=recipe.endpoint.concurrency if recipe.endpoint else 1,
            code_tool=code_tool,
            seed=recipe.mix.seed,
        )


@asynccontextmanager
async def _endpoint(recipe: MixRecipe, environment: Mapping[str, str], note: Note) -> AsyncIterator[Endpoint | None]:
    if recipe.endpoint is None or not any(source.rewrite for source in recipe.source):
        yield None
        return
    cache = AnswerCache(Path(recipe.endpoint.cache))
    try:
        async with Endpoint(_service(recipe.endpoint, environment), cache) as endpoint:
            yield endpoint
            note(
                f"endpoint: {endpoint.asked} requests sent, {endpoint.remembered} answered from {recipe.endpoint.cache}"
            )
    finally:
        cache.close()


def _service(part: EndpointPart, environment: Mapping[str, str]) -> Service:
    if part.key_variable and part.key_variable not in environment:
        raise ConfigError(f"endpoint.key_variable {part.key_variable!r} is not set in the environment; export it")
    return Service(
        url=part.url,
        model=part.model,
        key=environment[part.key_variable] if part.key_variable else None,
        concurrency=part.concurrency,
        timeout_seconds=part.timeout_seconds,
        attempts=part.attempts,
        parameters=part.parameters,
    )
