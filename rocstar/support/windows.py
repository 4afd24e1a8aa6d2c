"""Sliding windows of a transformers model, made narrow for a check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def windows_of(model: Any, positions: int) -> Iterator[None]:
    """Inside it every layer that attends to a window attends to one of so many positions, so that a check by short
    rows tells whether an attention function is told of windows; a model may keep them in its config, in its layers or
    in both."""
    owners = [model.config, model.config.get_text_config(), *model.modules()]
    kept = [(owner, width) for owner in owners if isinstance(width := getattr(owner, "sliding_window", None), int)]
    try:
        for owner, _ in kept:
            owner.sliding_window = positions
        yield
    finally:
        for owner, width in kept:
            owner.sliding_window = width
