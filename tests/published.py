"""Where the published files lie that tests read, and some of them skip without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("ROCSTAR_DATA", Path(__file__).parents[2] / "shared" / "data"))
WORD_PROBLEMS = DATA / "word_problems"
needs_word_problems = pytest.mark.skipif(
    not WORD_PROBLEMS.is_dir(), reason=f"{WORD_PROBLEMS} is absent; set ROCSTAR_DATA to the data folder"
)
