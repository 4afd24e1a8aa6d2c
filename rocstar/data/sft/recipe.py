"""The keys of a recipe for SFT rows (`recipes/data/sft_mix.toml`), typed. `config/layers.py` reads it.

Paths are relative to the folder the command runs in, as in training recipes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from rocstar.config.values import Section
from rocstar.data.sft.layouts import LAYOUTS
from rocstar.support.plugins import is_reference

Step = Literal["prompt", "response"]


class MixPart(Section):
    seed: int = 0
    """Which rows of a source are taken, and in which order."""
    rows: int | None = Field(default=None, ge=1)
    """Rows of the mix; absent: as many as the weights allow before the first source runs dry."""
    tokenizer: str | None = None
    """Folder of the tokenizer that lengths are measured with; absent: lengths are not measured."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longer rows are refused, tokens of the whole row."""


class EndpointPart(Section):
    url: str
    """Base of an OpenAI-compatible API, such as http://localhost:8000/v1."""
    model: str
    key_variable: str | None = None
    """Name of the environment variable that holds the API key."""
    concurrency: int = Field(default=16, ge=1)
    """Requests under way at once."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Limit on one request."""
    attempts: int = Field(default=6, ge=1)
    """Tries of one request before the build stops; faults of the service only."""
    cache: str = "sft_cache.sqlite"
    """File that keeps every answer, so that a build that stopped goes on where it was."""
    parameters: dict[str, Any] = {}
    """Sent along with every request (temperature, max_tokens ...)."""


class SourcePart(Section):
    name: str
    layout: str
    files: list[str] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)
    """Read only the first so many rows of each file."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the mix, relative to the other weights; give one to every source, or to none to take all rows."""
    rewrite: list[Step] = []
    """What the endpoint rewrites, in this order."""

    def complaints(self) -> Iterator[str]:
        if self.layout not in LAYOUTS and not is_reference(self.layout):
            near = difflib.get_close_matches(self.layout, LAYOUTS, n=1, cutoff=0.0)[0]
            yield (
                f"layout {self.layout!r} is unknown; the nearest is {near!r}, of {', '.join(LAYOUTS)}; a function of "
                "your own is written package.module:name or file.py:name"
            )


class MixRecipe(Section):
    mix: MixPart = MixPart()
    endpoint: EndpointPart | None = None
    source: list[SourcePart] = Field(min_length=1)

    def complaints(self) -> Iterator[str]:
        if len({source.weight is None for source in self.source}) > 1:
            yield "some sources have a weight and some have none; give one to each or to none"
        if self.endpoint is None and any(source.rewrite for source in self.source):
            yield "a source asks for rewriting and there is no [endpoint]; add one"
        if self.mix.max_tokens is not None and self.mix.tokenizer is None:
            yield "mix.max_tokens needs mix.tokenizer to measure with"
