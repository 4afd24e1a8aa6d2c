"""Some of the families that docs/families.md tells of are run or refused as it says; all are by the script that writes
it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "families.md").read_text()


@pytest.mark.parametrize(
    "name", ["bigbird_pegasus", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "inkling_text", "mistral", "qwen3_moe"]
)
def test_a_family_runs_or_is_refused_as_the_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """inkling_text ended in an AttributeError, for its config has no tie_word_embeddings; bigbird_pegasus, whose class
    ties nothing whatever its config says, was refused for a head that differs from the embedding."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    row = next(
        line
        for line in PAGE.splitlines()
        if line.startswith("|") and f" {name}," in line.replace(" |", ",") and not line.startswith(f"| {name} ")
    )
    found = import_module("every_family").verdict(name)
    assert [found[part].partition(":")[0] for part in ("learner", "engine")] == [
        cell.strip() for cell in row.split("|")[1:3]
    ]
