"""Counts of attempts by training step; memory grows with steps only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from rocstar.analysis.attempts import AfterFailure, Attempt, after_errors, share_of


@dataclass(slots=True)
class Counts:
    """Sums over some attempts. Those without a verdict are in all figures but those of right attempts; undecided ones
    count as not right."""

    attempts: int = 0
    decided: int = 0
    right: int = 0
    cut: int = 0
    calls: int = 0
    tokens: int = 0
    right_with_failed: int = 0
    """Right attempts with a failed call."""
    calls_of_right: int = 0
    failed_of_right: int = 0
    without_calls: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Failed calls by class."""
    after: Counter[tuple[str, AfterFailure]] = field(default_factory=Counter)
    """Failed calls by class and by what came after."""
    after_right: Counter[AfterFailure] = field(default_factory=Counter)
    """Failed calls of right attempts by what came after."""
    after_decided: Counter[AfterFailure] = field(default_factory=Counter)
    undecided: int = 0

    def add(self, attempt: Attempt) -> None:
        failed = [call.error for call in attempt.calls if call.error is not None]
        came_after = list(after_errors(attempt))
        self.attempts += 1
        self.cut += attempt.cut
        self.calls += len(attempt.calls)
        self.tokens += attempt.tokens
        self.without_calls += not attempt.calls
        self.errors.update(failed)
        self.after.update(came_after)
        self.undecided += attempt.undecided
        if attempt.right is not None:
            self.decided += 1
            self.after_decided.update(after for _, after in came_after)
        if attempt.right:
            self.right += 1
            self.right_with_failed += bool(failed)
            self.calls_of_right += len(attempt.calls)
            self.failed_of_right += len(failed)
            self.after_right.update(after for _, after in came_after)

    @classmethod
    def of_all(cls, parts: Iterable[Counts]) -> Counts:
        """The sums of some counts."""
        whole = cls()
        for part, name in product(parts, cls.__slots__):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole

    def figures(self) -> dict[str, Any]:
        """Means and shares; None where they would be over nothing."""
        return {
            "attempts": self.attempts,
            "right_share": share_of(self.right, self.decided),
            "tokens": share_of(self.tokens, self.attempts),
            "calls": share_of(self.calls, self.attempts),
            "no_call_share": share_of(self.without_calls, self.attempts),
            "cut_share": share_of(self.cut, self.attempts),
            "failed_call_share": share_of(self.errors.total(), self.calls),
            "failed_call_share_in_right": share_of(self.failed_of_right, self.calls_of_right),
            "right_with_failed_call_share": share_of(self.right_with_failed, self.right),
            "undecided_share": share_of(self.undecided, self.decided),
            "errors": dict(self.errors.most_common()),
            "after_error": {
                str(after): sum(count for (_, what), count in self.after.items() if what is after)
                for after in AfterFailure
            },
        }


def after_error_table(counts: Counts) -> list[dict[str, Any]]:
    """One row for each class of failure, the most frequent first: how often each thing came after it."""
    return [
        {"error": error, "failed": failed, **{str(after): counts.after[error, after] for after in AfterFailure}}
        for error, failed in counts.errors.most_common()
    ]


def right_after(counts: Counts) -> dict[str, float | None]:
    """Share of failed calls whose attempt ended right, by what came after them."""
    return {str(after): share_of(counts.after_right[after], counts.after_decided[after]) for after in AfterFailure}
