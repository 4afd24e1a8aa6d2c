"""Which views of a run the page is measured on."""

from __future__ import annotations

from typing import Any

import view


class Listed:
    """A server that knows one run with these evaluations."""

    def __init__(self, *evals: dict[str, Any]) -> None:
        self.evals = evals

    def get(self, path: str, **query: Any) -> Any:
        if path == "sources":
            return {"sources": [{"name": "big", "kind": "run", "evals": self.evals}]}
        return {"tried": [], "rows": [{"step": 1, "row": 0, "grp": 0}]}


def test_two_evaluations_of_the_same_problems_are_paired_whatever_others_there_are() -> None:
    """The first and the last by name had no problem in common in a run with a benchmark, so the page showed no pair."""
    names = (("after", 9, "held out"), ("aime24", 9, "aime24"), ("before", 2, "held out"), ("x", 9, "x"))
    evals = [{"name": name, "step": step, "asked": asked} for name, step, asked in names]
    address, _ = view.views_of(Listed(*evals), "big")["paired"]
    assert address == "#/eval/big/after/9?against=big/before/2"
    assert "paired" not in view.views_of(Listed(*evals[:2]), "big")
