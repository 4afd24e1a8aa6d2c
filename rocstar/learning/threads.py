"""How many threads torch computes with: a setting of the whole process, so only the verbs that own one call it."""

from __future__ import annotations

import torch


def use_threads(count: int) -> None:
    """Compute with `count` threads from here on."""
    torch.set_num_threads(count)
