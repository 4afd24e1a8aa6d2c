"""One source analysed: an object for programs. Every part says which figure or table of the paper it answers to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.analysis.attempts import Attempt
from rocstar.analysis.screen import SUSPECT
from rocstar.analysis.sources import Entropies, Source
from rocstar.analysis.tally import Counts, after_error_table, right_after
from rocstar.analysis.tokens import Piece, TokenCounts, TokenKind, Words, count_tokens, count_words, turn_of
from rocstar.evaluation.contamination import note_of
from rocstar.record.folder import step_of
from rocstar.record.journal import read_journal
from rocstar.record.rollouts import questions_of

FIGURES = {"reflection_after_ok": "Fig. 10", "reflection_after_error": "Fig. 11", "forking": "§5.4, class 1"}
MOST_TOKENS = 4000  # of one example; what follows is left out
SHOWN_WORDS = 20  # most frequent marked tokens of each kind in a report
METRICS = {
    "reward": "reward/mean",
    "tokens": "len/tokens",
    "cut": "len/truncated",
    "entropy": "policy/entropy",
    "calls": "tool/calls",
    "failed_call_share": "tool/error_rate",
    "failed_call_share_in_right": "tool/failed_call_share_in_correct",
    **{name: f"suspect/{name}" for name in SUSPECT},
}
"""Figure of a training step -> its metric: Fig. 8, Fig. 4 where no attempts were kept, and right attempts that look as
if the reward was won without solving the problem (run/report.py)."""


Examples = dict[str, tuple[tuple[bool, int], dict[str, Any]]]
"""A few attempts to look at, by what each is an example of: the ones with the most reflection tokens after a reply
without a failure (Fig. 10) and after a failed call (Fig. 11), and the one with the most forking tokens; right attempts
go before others. (whether it was right, how many such tokens), and the attempt with its marked tokens."""


def _offer(examples: Examples, attempt: Attempt, kinds: Mapping[int, TokenKind], piece: Piece) -> None:
    counts = dict.fromkeys(FIGURES, 0)
    for place, kind in kinds.items():
        if kind is TokenKind.REFLECTION:
            counts[f"reflection_after_{turn_of(attempt, place).after}"] += 1
        elif kind is TokenKind.FORKING:
            counts["forking"] += 1
    for what, count in counts.items():
        rank = (bool(attempt.right), count)
        if count and (what not in examples or rank > examples[what][0]):
            examples[what] = (rank, _shown(attempt, kinds, piece))


def _shown(attempt: Attempt, kinds: Mapping[int, TokenKind], piece: Piece) -> dict[str, Any]:
    end = min(len(attempt.token_ids), attempt.turns[0].start + MOST_TOKENS)
    tokens = [
        {"text": piece(attempt.token_ids[place]), "entropy": attempt.entropies and attempt.entropies[place],
         "kind": str(kinds[place]) if place in kinds else None}
        for place in range(attempt.turns[0].start, end)
    ]  # fmt: skip
    return {"step": attempt.step, "problem": attempt.problem, "right": attempt.right, "tokens": tokens}


def analyse(
    source: Source,
    *,
    piece: Piece | None = None,
    entropies: Entropies | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Everything about one source; docs/analysis.md says what each key means.

    piece: text of a token; None leaves tokens out. entropies: a pass for attempts that have none. progress: called
    with (files read, all files). Raises DataError."""
    words, examples = Words(), Examples()
    by_step, steps = defaultdict[int, Counts](Counts), defaultdict[int, TokenCounts](TokenCounts)
    for attempt in source.attempts(tokens=piece is not None, entropies=entropies, progress=progress):
        by_step[attempt.step].add(attempt)
        if piece and (kinds := count_tokens(steps[attempt.step], attempt, piece)):
            count_words(words, attempt, kinds, piece)
            _offer(examples, attempt, kinds, piece)
    whole = Counts.of_all(by_step.values())
    report: dict[str, Any] = {
        "source": source.name,
        "whole": whole.figures(),
        "after_error": after_error_table(whole),
        "right_share_after_error": right_after(whole),
        "by_step": [{"step": step, **counts.figures()} for step, counts in sorted(by_step.items())],
        "training": _training(source),
        "evaluations": _evaluations(source),
        "contamination": _contamination(source),
    }
    if not any(counts.attempts for counts in steps.values()):
        return report
    temperature = source.temperatures()
    tokens = {
        "by_step": [
            {"step": step, "temperature": temperature(step), **counts.figures()}
            for step, counts in sorted(steps.items())
        ],
        "words": {str(kind): _most_frequent(words, kind) for kind in TokenKind},
        "examples": {
            what: {"figure": FIGURES[what], "count": rank[1], **one} for what, (rank, one) in examples.items()
        },
    }
    return report | {"tokens": tokens}


def _most_frequent(words: Words, kind: TokenKind) -> dict[str, int]:
    found = [(text, count) for (what, text), count in words.items() if what is kind]
    return dict(sorted(found, key=lambda word: (-word[1], word[0]))[:SHOWN_WORDS])


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
