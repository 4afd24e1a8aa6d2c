"""Numbers in the form that results, run folders and tables use."""

from __future__ import annotations

from typing import Any

from rocstar.evaluation.intervals import Estimate


def figure(estimate: Estimate, missing: int = 0) -> dict[str, Any]:
    """An estimate in the form that run folders and tables use; `missing` counts the attempts that are not in it,
    because a fault of ours ended them or the verifier could not judge them."""
    shown = {"value": estimate.value, "interval": [estimate.low, estimate.high], "n": estimate.n}
    return {**shown, "missing": missing} if missing else shown
