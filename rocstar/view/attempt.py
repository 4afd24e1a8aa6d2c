"""One attempt as the page shows it: turns with their calls and results, tokens as pieces of text with their numbers.

Not here: colours, which are the page's, and the choice among siblings (whatif.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rocstar.record.call_errors import calls_of
from rocstar.record.formats import Feedback
from rocstar.record.rollouts import TOKEN_COLUMNS, result_of

DIGITS = 4  # of logprobs and entropies on the page
LONGEST_MERGE = 8  # tokens that one character can be spelled in; more is no text at all
NUMBERS = ("sampled_logprobs", "old_logprobs", "entropies")

Decode = Callable[[Sequence[int]], str]


def attempt_of(row: Mapping[str, Any], decode: Decode | None, feedback: Feedback | None) -> dict[str, Any]:
    """A row of attempts for the page, each turn with its text; each result has as `read` what the model read of it,
    null where that is not known."""
    plain = {name: value for name, value in row.items() if name not in ("turns", "text", "fields", *TOKEN_COLUMNS)}
    plain |= {"fields": json.loads(row["fields"])} if "fields" in row else {}
    texts = [*(row["text"] or []), *[""] * len(row["turns"])]
    turns = [{**turn, "text": text, "calls": []} for turn, text in zip(row["turns"], texts, strict=False)]
    for number, call, result, error in calls_of(row["turns"]):
        result_read = result and {**result, "read": _read(result, feedback)}
        turns[number]["calls"].append({**call, "result": result_read, "error": error})
    return {**plain, "turns": turns, "tokens": tokens_of(row, decode) if decode else None}


def _read(result: Mapping[str, Any], feedback: Feedback | None) -> str | None:
    try:
        return feedback(result_of(result)) if feedback else None
    except (TypeError, ValueError):  # fields that this version does not know
        return None


def tokens_of(row: Mapping[str, Any], decode: Decode) -> dict[str, Any]:
    """Pieces of text in order, each of `lengths` tokens; `starts` says in which piece each part of the attempt begins:
    the prompt, then each completion and its reply by turns. Numbers are those of a piece's first token; a number that
    was not recorded is null, one that is missing for all of it makes the whole list null."""
    ids, begin = row["token_ids"], 0
    starts, pieces, lengths, places = list[int](), list[str](), list[int](), list[int]()
    shown = [turn.get("prompt_tokens", 0) for turn in row["turns"][1:]] + [0]  # anew before the next turn
    pairs = zip(row["turns"], shown, strict=False)
    replied = (n for turn, more in pairs for n in (turn["sampled_tokens"], turn["reply_tokens"] + more))
    for size in (len(row["prompt_ids"]), *replied):
        starts.append(len(pieces))
        for text, count in merged(ids[begin : begin + size], decode):
            pieces.append(text)
            lengths.append(count)
            places.append(begin)
            begin += count
    return {
        "pieces": pieces,
        "lengths": lengths,
        "starts": starts,
        **{name: _numbers(row.get(name), places) for name in NUMBERS},
    }


def merged(ids: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """(text, tokens) in order: tokens that spell a character together stand together."""
    found, start = [], 0
    while start < len(ids):
        text, end = decode(ids[start : start + 1]), start + 1
        while "\ufffd" in text and end < min(len(ids), start + LONGEST_MERGE):
            end += 1
            text = decode(ids[start:end])
        if "\ufffd" in text:  # bytes that are no text: one token at a time
            text, end = decode(ids[start : start + 1]), start + 1
        found.append((text, end - start))
        start = end
    return found


def _numbers(values: Sequence[float] | None, places: Sequence[int]) -> list[float | None] | None:
    if values is None or not any(value == value for value in values):
        return None
    known = len(values)
    return [round(values[at], DIGITS) if at < known and math.isfinite(values[at]) else None for at in places]


@lru_cache(maxsize=4)
def decoder_of(folder: Path) -> Decode | None:
    """Token ids to text by a model folder's tokenizer, single tokens remembered; None where it cannot be read here."""
    try:
        from rocstar.dialogue.codec import Codec
    except ModuleNotFoundError:
        return None
    from rocstar.errors import ConfigError

    try:
        codec = Codec.load(folder)
    except (ConfigError, OSError, ValueError):
        return None
    one = lru_cache(maxsize=1 << 17)(lambda token: codec.decode([token]))
    return lambda ids: one(ids[0]) if len(ids) == 1 else codec.decode(ids)
