"""A few attempts to look at, with their marked tokens shown: Fig. 10 and 11 of the paper, from any run.

Kept are the attempts with the most reflection tokens after a reply without a failure (Fig. 10) and after a failed call
(Fig. 11), and the one with the most forking tokens; right attempts go before others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rocstar.analysis.attempts import Attempt
from rocstar.analysis.tokens import Piece, TokenKind, turn_of

FIGURES = {"reflection_after_ok": "Fig. 10", "reflection_after_error": "Fig. 11", "forking": "§5.4, class 1"}
BRACKETS = {
    TokenKind.REFLECTION: "[[{}]]",
    TokenKind.FORKING: "<<{}>>",
    TokenKind.CALL: "{}",
    TokenKind.ANSWER: "{}",
    TokenKind.MARK: "{}",
}
MOST_TOKENS = 4000  # of one example; what follows is left out


@dataclass(slots=True)
class Examples:
    found: dict[str, tuple[tuple[bool, int], dict[str, Any]]] = field(default_factory=dict)
    """What was looked for -> whether it was right, how many such tokens, and the attempt."""

    def offer(self, attempt: Attempt, kinds: Mapping[int, TokenKind], piece: Piece) -> None:
        counts = dict.fromkeys(FIGURES, 0)
        for place, kind in kinds.items():
            if kind is TokenKind.REFLECTION:
                counts[f"reflection_after_{turn_of(attempt, place).after}"] += 1
            elif kind is TokenKind.FORKING:
                counts["forking"] += 1
        for what, count in counts.items():
            rank = (bool(attempt.right), count)
            if count and (what not in self.found or rank > self.found[what][0]):
                self.found[what] = (rank, _shown(attempt, kinds, piece))

    def shown(self) -> dict[str, dict[str, Any]]:
        """By what each is an example of."""
        return {what: {"figure": FIGURES[what], "count": rank[1], **one} for what, (rank, one) in self.found.items()}


def _shown(attempt: Attempt, kinds: Mapping[int, TokenKind], piece: Piece) -> dict[str, Any]:
    end = min(len(attempt.token_ids), attempt.turns[0].start + MOST_TOKENS)
    tokens = [
        {"text": piece(attempt.token_ids[place]), "entropy": attempt.entropies and attempt.entropies[place],
         "kind": str(kinds[place]) if place in kinds else None}
        for place in range(attempt.turns[0].start, end)
    ]  # fmt: skip
    return {"step": attempt.step, "problem": attempt.problem, "right": attempt.right, "tokens": tokens}


def as_text(example: Mapping[str, Any]) -> str:
    """Reflection tokens in [[ ]], forking ones in << >>."""
    marks = {str(kind): form for kind, form in BRACKETS.items()}
    return "".join(marks.get(token["kind"], "{}").format(token["text"]) for token in example["tokens"])
