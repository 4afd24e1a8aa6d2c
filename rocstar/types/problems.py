"""What is asked, and the names and seeds that follow from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def problem_id(question: str) -> str:
    """A stable 16-hex-digit name for a question; equal questions share it. Source: ours."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def seed_for(*identity: int | str) -> int:
    """A 63-bit seed from an identity such as (run.seed, step, problem.id, index): the same attempt draws
    the same randomness on any number of workers and in any order. Source: ours."""
    text = "\x1f".join(str(part) for part in identity)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    id: str
    """Stable hash of the question (`problem_id`)."""
    question: str
    """What the model is asked, plain text."""
    answer: str
    """Reference answer, plain text or LaTeX."""
    source: str = ""
    """Data set or file it came from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything else a loader knows (family, level, row number); never read by training."""
