"""The README as a promise: two set-up commands, and a map of files that are there."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, blocks

BLOCKS = blocks(ROOT / "README.md")


def test_exactly_two_commands_set_everything_up() -> None:
    commands = [command for block in BLOCKS if block.language == "sh" for command in block.commands]
    assert [command for command in commands if command.startswith("scripts/install")] == [
        "scripts/install train && .venv/bin/rocstar train recipes/quickstart.toml",
        "scripts/install dev && .venv/bin/pytest -n auto",
    ]


def test_every_place_in_the_file_map_exists() -> None:
    (tree,) = [block.text for block in BLOCKS if block.text.startswith("rocstar/\n")]
    missing = []
    for line in tree.splitlines():
        folder = ROOT / "rocstar" if line.startswith(" ") else ROOT
        names = re.split(r" {2,}", line.strip())[0].split()
        missing += [name for name in names if not (folder / name).exists()]
    assert missing == []
