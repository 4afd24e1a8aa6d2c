"""Steps that others have published can be planned, and the largest of them within a quarter of what it took."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest

from rocstar.forecast.plan import Assumptions
from rocstar.parts import shape

PUBLISHED = run_path(str(Path(__file__).parents[2] / "benchmarks" / "plan_published.py"))


@pytest.mark.parametrize("row", [row for row in PUBLISHED["ROWS"] if "Qwen3-32B" in row.name], ids=lambda row: row.half)
def test_a_published_step_is_planned_and_not_refused(row: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "PUBLISHED", shape.PUBLISHED)  # the script sets it
    planned = PUBLISHED["planned"](row, Assumptions())
    assert 0.75 < planned.step_seconds / row.seconds < 1.25  # type: ignore[attr-defined]
