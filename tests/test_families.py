"""One published family carried through all commands, by the benchmark that carries all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_a_llama_shape_is_trained_evaluated_and_loaded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    families = importlib.import_module("model_families")
    row = families.Check("llama", families.CASES["llama"], tmp_path).row(kill=False)  # tests/test_train.py kills runs
    assert row["failed"] == []
    assert len(row["passed"]) >= 18
