"""Files that tests read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def jsonl(path: Path, *rows: Any) -> Path:
    """A file of rows, packed where its name says so; a text among them is a line as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    return path
