"""The datasheet of a build: where each row went, by source and reason, with the hashes that let it be checked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocstar.data.sft.collect import SourceCounts
from rocstar.data.sft.mix import Share
from rocstar.data.sft.reading import file_digest
from rocstar.data.sft.recipe import MixRecipe, SourcePart
from rocstar.data.sft.shelf import Shelf
from rocstar.data.sft.tokens import folder_digest

SCHEMA_VERSION = 1


def datasheet(
    recipe: MixRecipe,
    tallies: Mapping[str, SourceCounts],
    taken: Mapping[str, Share],
    shelf: Shelf,
    *,
    rows_digest: str,
) -> dict[str, Any]:
    """Plain JSON values; nothing in it depends on when or where it was made, but file names are as the recipe has
    them. Raises DataError."""
    tokenizer = recipe.mix.tokenizer
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe_sha256": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        "recipe": recipe.model_dump(mode="json"),
        "tokenizer_sha256": folder_digest(Path(tokenizer)) if tokenizer else None,
        "rows": sum(share.taken for share in taken.values()),
        "rows_sha256": rows_digest,
        "sources": [_source(source, tallies[source.name], taken[source.name], shelf) for source in recipe.source],
    }


def quantiles(values: Sequence[int]) -> dict[str, int]:
    """p50, p95 (nearest rank) and max; empty when there are none."""
    if not values:
        return {}
    ranked = sorted(values)
    return {name: ranked[math.ceil(p * len(ranked)) - 1] for name, p in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}


def _source(source: SourcePart, tally: SourceCounts, share: Share, shelf: Shelf) -> dict[str, Any]:
    positions = shelf.positions(source.name)
    return {
        "name": source.name,
        "layout": source.layout,
        "files": [
            {"path": file, "sha256": file_digest(Path(file))}
            for file in (*source.files, *source.tool_files, *source.answer_files)
        ],
        "rows_read": tally.rows,
        "conversations": tally.conversations,
        "refused": {str(reason): count for reason, count in sorted(tally.refused.items())},
        "built": len(positions),
        "calls_validated": tally.calls,
        "tokens": quantiles([tokens for tokens in shelf.lengths(positions) if tokens]),
        "wanted": share.wanted,
        "taken": share.taken,
        "short": share.short,
        "left_over": share.available - share.taken,
    }
