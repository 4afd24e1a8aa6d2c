"""One published family carried through all commands, by the benchmark that carries all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.tiny_run import Command

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_a_llama_shape_is_trained_evaluated_and_loaded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    families = importlib.import_module("model_families")

    class Check(families.Check):  # type: ignore[misc]
        def _run(self, *arguments: str) -> str:
            ended = Command.start(self.place, *arguments).wait()
            assert ended.code == 0, ended.told
            return ended.out

    row = Check("llama", families.CASES["llama"], tmp_path / "place").row()
    assert row["failed"] == []
    assert len(row["passed"]) >= 18
