"""One source analysed: an object for programs. Every part says which figure or table of the paper it answers to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rocstar.analysis.attempts import Attempt
from rocstar.analysis.examples import Examples
from rocstar.analysis.sources import Entropies, Source
from rocstar.analysis.tally import LEVELS, AttemptCounts, after_error_table, right_after
from rocstar.analysis.tokens import Piece, TokenCounts, TokenKind, count_tokens
from rocstar.evaluation.contamination import note_of, questions_of
from rocstar.record.folder import step_of
from rocstar.record.journal import read_journal

SHOWN_WORDS = 20  # most frequent marked tokens of each kind in a report
METRICS = {
    "reward": "reward/mean",
    "tokens": "len/tokens",
    "cut": "len/truncated",
    "entropy": "policy/entropy",
    "calls": "tool/calls",
    "failed_call_share": "tool/error_rate",
    "failed_call_share_in_right": "tool/failed_call_share_in_correct",
    **{name: f"suspect/{name}" for name in ("constant_print", "unfounded_answer", "several_boxes")},
}
"""Figure of a training step -> its metric: Fig. 8, Fig. 4 where no attempts were kept, and right attempts that look as
if the reward was won without solving the problem (run/report.py)."""


@dataclass(slots=True)
class Tokens:
    """Counts of tokens by step, and attempts to look at."""

    piece: Piece
    steps: dict[int, TokenCounts] = field(default_factory=lambda: defaultdict(TokenCounts))
    examples: Examples = field(default_factory=Examples)

    def add(self, attempt: Attempt) -> None:
        kinds = count_tokens(self.steps[attempt.step], attempt, self.piece)
        if kinds:
            self.examples.offer(attempt, kinds, self.piece)


def analyse(
    source: Source, *, method: str, piece: Piece | None = None, entropies: Entropies | None = None
) -> dict[str, Any]:
    """Everything about one source; docs/analysis.md says what each key means.

    method: what it is a run of (methods.py). piece: text of a token; None leaves tokens out. entropies: a pass for
    attempts that have none. Raises DataError."""
    tally, tokens = AttemptCounts(), Tokens(piece) if piece else None
    for attempt in tally.watched(source.attempts(tokens=piece is not None, entropies=entropies)):
        if tokens:
            tokens.add(attempt)
    whole = tally.whole()
    report: dict[str, Any] = {
        "source": source.name,
        "method": method,
        "whole": whole.figures(),
        "after_error": after_error_table(whole),
        "right_share_after_error": right_after(whole),
        "by_step": [{"step": step, **counts.figures()} for step, counts in sorted(tally.steps.items())],
        "by_difficulty": [
            {"solved": level, **tally.levels[level].figures()} for level in LEVELS if level in tally.levels
        ],
        "training": _training(source),
        "evaluations": _evaluations(source),
        "contamination": _contamination(source),
    }
    if tokens is None or not any(counts.attempts for counts in tokens.steps.values()):
        return report
    return report | {"tokens": _tokens(tokens, source.temperatures())}


def _tokens(tokens: Tokens, temperature: Callable[[int], float | None]) -> dict[str, Any]:
    words = {kind: _words(tokens.steps.values(), kind) for kind in TokenKind}
    return {
        "by_step": [
            {"step": step, "temperature": temperature(step), **counts.figures()}
            for step, counts in sorted(tokens.steps.items())
        ],
        "words": {
            str(kind): dict(islice(sorted(found.items(), key=_most), SHOWN_WORDS)) for kind, found in words.items()
        },
        "examples": tokens.examples.shown(),
    }


def _most(word: tuple[str, int]) -> tuple[int, str]:
    return -word[1], word[0]


def _words(steps: Iterable[TokenCounts], kind: TokenKind) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for counts in steps:
        for (what, text), count in counts.words.items():
            if what is kind:
                found[text] += count
    return found


def _training(source: Source) -> list[dict[str, Any]]:
    """The metrics of RL steps."""
    rows = read_journal(source.run.metrics) if source.run else []
    temperature = source.temperatures() if rows else None
    return [
        {
            "step": row["step"],
            "temperature": temperature and temperature(row["step"]),
            **{name: row.get(key) for name, key in METRICS.items()},
        }
        for row in rows
        if "reward/mean" in row
    ]


def _evaluations(source: Source) -> list[dict[str, Any]]:
    """Tables 3 to 6: one row for each evaluation, with accuracy and mean tokens."""
    if source.run:
        return [_evaluation(name, step, result) for name, step, result in source.run.evaluations()]
    return [_evaluation(source.name, source.result["setup"].get("step", 0), source.result)] if source.result else []


def _contamination(source: Source) -> dict[str, Any] | None:
    """Which questions of an evaluation its run had trained on by then; None where the training is not known."""
    if source.trainer is None:
        return None
    asked = (question for file in source.files for question in questions_of(file))
    return note_of(source.trainer, step_of(source.files[0].parent), asked, source.name)


def _evaluation(name: str, step: int, result: Mapping[str, Any]) -> dict[str, Any]:
    setup = result.get("setup", {})
    return {
        "name": name,
        "step": step,
        "accuracy": result.get("accuracy"),
        "tokens": result.get("mean_response_tokens"),
        "calls": result.get("calls_per_attempt"),
        "tools": (setup.get("sandbox") or {}).get("tools") if (setup.get("max_turns") or 2) > 1 else [],
        "attempts": setup.get("attempts"),
    }
