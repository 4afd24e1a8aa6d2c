"""Sliding windows of a transformers model, made narrow for a check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def windows_of(model: Any, positions: int) -> Iterator[None]:
    """Within this context every sliding window has only `positions` positions, so that a check with short rows shows
    whether an attention function gets the window; a model may keep it in its config, in its layers or in both."""
    owners = [model.config, model.config.get_text_config(), *model.modules()]
    original = [(owner, width) for owner in owners if isinstance(width := getattr(owner, "sliding_window", None), int)]
    try:
        for owner, _ in original:
            owner.sliding_window = positions
        yield
    finally:
        for owner, width in original:
            owner.sliding_window = width
