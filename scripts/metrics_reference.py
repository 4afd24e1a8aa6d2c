"""Writes docs/metrics.md from rocstar/view/static/glossary.json, which explains each metric once, for page and docs.

`python scripts/metrics_reference.py` after a change there (`--print` prints it instead); a test compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rocstar.support.screen import STEP_LINE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
GLOSSARY = ROOT / "rocstar" / "view" / "static" / "glossary.json"
OPENING = """\
# What the numbers mean

Written by `python scripts/metrics_reference.py` from `rocstar/view/static/glossary.json`; edit that file instead.
The page of `rocstar view` shows the same sentences. `*` stands for any end of a name. A number that JSON cannot say
(nan) is null.
"""


def reference() -> str:
    """The page."""
    shown = {name: text.replace("{}", "").strip(" /") for text, name, _ in STEP_LINE}
    parts = [OPENING]
    for title, terms in json.loads(GLOSSARY.read_text()).items():
        parts.append(f"## {title.capitalize()}\n")
        parts.append("| name | called | meaning |\n|---|---|---|")
        for name, (label, meaning) in terms.items():
            told = f"; on the step line: {shown[name]}" if shown.get(name) else ""
            parts.append(f"| `{name}` | {label}{told} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="") if "--print" in sys.argv else PAGE.write_text(reference())
