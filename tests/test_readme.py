"""The README as a promise: two set-up commands, links that lead somewhere, examples that run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for kind, text in fenced if kind == language]


def test_exactly_two_commands_set_everything_up() -> None:
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("scripts/install")]
    assert lines == [
        "scripts/install train && .venv/bin/rocstar train recipes/quickstart.toml",
        "scripts/install dev && .venv/bin/pytest -n auto",
    ]


def test_every_link_leads_to_a_file() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert len(targets) > 8
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_place_in_the_file_map_exists() -> None:
    (tree,) = [block for block in blocks("") if block.startswith("rocstar/\n")]
    missing = []
    for line in tree.splitlines():
        folder = ROOT / "rocstar" if line.startswith(" ") else ROOT
        names = re.split(r" {2,}", line.strip())[0].split()
        missing += [name for name in names if not (folder / name).exists()]
    assert missing == []


@pytest.mark.parametrize("block", blocks("python"))
def test_python_examples_run(block: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
