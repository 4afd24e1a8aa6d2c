"""The README as a promise: two set-up commands, and a map of files that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rocstar.cli import main as cli
from rocstar.faults.kit import FAULTS, faults_named
from rocstar.support import exits
from tests.docs.pages import ROOT, blocks

BLOCKS = blocks(ROOT / "README.md")


def test_exactly_two_commands_set_everything_up() -> None:
    commands = [command for block in BLOCKS if block.language == "sh" for command in block.commands]
    assert [command for command in commands if command.startswith("scripts/install")] == [
        "scripts/install train && .venv/bin/rocstar train recipes/quickstart.toml",
        "scripts/install dev && .venv/bin/pytest -n auto",
    ]


def test_its_recipe_fits_the_gpu_that_it_is_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = [block.text for block in BLOCKS if block.text.startswith("[model]")]
    commands = [command for block in BLOCKS for command in block.commands]
    planned = [command for command in commands if command.startswith("rocstar plan mine.toml")]
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(recipe)
    Path("problems.jsonl").write_text('{"question": "What is 1+1?", "answer": "2"}\n')
    Path("heldout.jsonl").write_text('{"question": "What is 1+2?", "answer": "3"}\n')
    assert [cli.run([*shlex.split(command)[1:], "--placement"]) for command in planned] == [exits.OK]


def test_every_place_in_the_file_map_exists() -> None:
    (tree,) = [block.text for block in BLOCKS if block.text.startswith("rocstar/\n")]
    missing = []
    for line in tree.splitlines():
        folder = ROOT / "rocstar" if line.startswith(" ") else ROOT
        names = re.split(r" {2,}", line.strip())[0].split()
        missing += [name for name in names if not (folder / name).exists()]
    assert missing == []


def test_pages_name_the_faults_and_how_many_there_are() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    said = re.findall(r"(\d+) injected faults|injects (\d+) faults", (ROOT / "README.md").read_text() + page)
    assert [int(one or other) for one, other in said] == [len(FAULTS)] * 2
    assert re.findall(r"the (\d+) faults that have an address", page) == [f"{len(faults_named([], at_addresses=True))}"]
    own = page.partition("## rocstar's own results\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z-]+) \| \d", own, re.M) == list(FAULTS)
