"""The counting of benchmarks/drift.py: what a figure of several runs is, and that no two cells share a folder."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from runpy import run_path

from hypothesis import given
from hypothesis import strategies as st

DRIFT = run_path(str(Path(__file__).parents[2] / "benchmarks" / "drift.py"))
counts = st.integers(0, 50).flatmap(lambda whole: st.tuples(st.integers(0, whole), st.just(whole)))


@given(st.lists(counts, min_size=1, max_size=6))
def test_a_figure_is_that_of_all_attempts_within_the_range_of_runs(parts: list[tuple[int, int]]) -> None:
    found, whole = DRIFT["pooled"](parts), sum(n for _, n in parts)
    if not whole:
        assert found["value"] is None
        return
    assert found["value"] == sum(part for part, _ in parts) / whole
    assert (found["interval"] is None) is (len(found["runs"]) < 3)
    low, high = found["interval"] or [found["value"]] * 2
    assert min(found["runs"]) - 1e-4 <= low <= high <= max(found["runs"]) + 1e-4


def test_no_two_cells_share_a_folder() -> None:
    cells = product(DRIFT["TOOLS"], DRIFT["METHODS"], ["0", "1", "unread-0", "chain-0"], [10, 11])
    names = [DRIFT["Cell"](*cell).name for cell in cells]
    assert len(set(names)) == len(names) == 64


def test_a_kind_of_cold_start_stands_before_its_seed() -> None:
    kinds = {cold: DRIFT["Cell"]("can ask", "GRPO", cold, 10).kind for cold in ("0", "12", "unread-0", "chain-3")}
    assert kinds == {"0": "", "12": "", "unread-0": "unread", "chain-3": "chain"}
    assert set(kinds.values()) == set(DRIFT["COLD"])
