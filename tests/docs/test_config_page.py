"""The reference of a recipe's keys is what the typed tree says."""

from __future__ import annotations

import subprocess
import sys

from rocstar.config.sections import Recipe
from rocstar.config.tree import all_keys
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "config.md"
SCRIPT = ROOT / "scripts" / "config_reference.py"


def test_the_page_is_what_the_script_writes() -> None:
    written = subprocess.run(
        [sys.executable, SCRIPT, "--print"], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert PAGE.read_text() == written.stdout, f"run: python {SCRIPT.relative_to(ROOT)}"


def test_every_key_has_a_row_in_its_section() -> None:
    keys = [keys for keys in all_keys(Recipe) if len(keys) == 2]
    sections = dict(part.partition("]\n")[::2] for part in PAGE.read_text().split("\n## [") if "]\n" in part)
    assert len(keys) > 100
    assert [key for key in keys if f"\n| `{key[1]}` |" not in sections[key[0]]] == []
