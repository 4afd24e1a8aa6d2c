"""A report as text for a terminal: plain tables, the widest columns cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rocstar.analysis.attempts import AfterFailure

MOST_STEPS = 24  # rows of a table by step; more are thinned out evenly
MOST_ERRORS = 12

Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""(title, what makes a cell of a row)"""
STEP: Column = ("step", lambda row: f"{row['step']}")
NOTHING: Column = ("", lambda row: "")
"""Stands last where the last column of figures is to stand to the right as well."""


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None, digits: int) -> str:
    if value is not None and abs(value) >= 1e12:  # 1e300 has 301 digits
        return f"{value:.4g}"
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(title: str, key: str) -> Column:
    return title, lambda row: share(row[key])


def _number(title: str, key: str, digits: int) -> Column:
    return title, lambda row: number(row[key], digits)


def page(report: Mapping[str, Any]) -> str:
    """All parts of one report that have something to say."""
    steps = report["by_step"]
    by_step = steps_table([STEP, *FIGURES], steps) if len(steps) > 1 else ""
    parts = [
        _headline(report),
        _section("Failed calls by class, and what came after", _errors(report)),
        _section("By step (Fig. 4: failed calls in right attempts)", by_step),
        _section("Suspicion: right attempts that may not have solved their problem", _suspicion(report["training"])),
        _section("Training, from the metrics (Fig. 8, Fig. 4)", _training(report)),
        _section("Evaluations (Tables 3 to 6)", _evaluations(report["evaluations"])),
        _contamination(report["contamination"]),
        *_tokens(report.get("tokens")),
    ]
    return "\n\n".join(part for part in parts if part)


def _headline(report: Mapping[str, Any]) -> str:
    whole = report["whole"]
    if not whole["attempts"]:
        return f"{report['source']}: no attempts are there: no RL step is done yet, or run.save_rollouts is off"
    undecided = f"{share(whole['undecided_share'])} undecided, " if whole["undecided_share"] else ""
    return (
        f"{report['source']}: {whole['attempts']:,} attempts, {share(whole['right_share'])} right, {undecided}"
        f"{number(whole['calls'], 2)} calls each, {share(whole['failed_call_share'])} of them failed"
    )


def _training(report: Mapping[str, Any]) -> str:
    """A table from the metrics, only where no attempts were kept: attempts say the same and more."""
    if report["whole"]["attempts"] or not report["training"]:
        return ""
    columns: list[Column] = [
        STEP,
        _number("reward", "reward", 3),
        _number("tokens", "tokens", 1),
        _share("cut", "cut"),
        _number("entropy", "entropy", 3),
        _number("calls", "calls", 2),
        _share("failed", "failed_call_share"),
        _share("in right", "failed_call_share_in_right"),
    ]
    return _by_temperature(columns, report["training"])


def _suspicion(rows: Sequence[Mapping[str, Any]]) -> str:
    seen = [row for row in rows if any(row[name] is not None for name in SUSPECT)]
    if not any(row[name] for row in seen for name in SUSPECT):
        return "  none of them looks so" if seen else ""
    columns = [_share(title, name) for name, title in SUSPECT.items()]
    return steps_table([STEP, *columns, NOTHING], seen)


def _section(title: str, body: str) -> str:
    return f"{title}\n{body}" if body else ""


def _errors(report: Mapping[str, Any]) -> str:
    rows = report["after_error"]
    total = sum(row["failed"] for row in rows)
    if not total:
        return ""
    columns: list[Column] = [
        ("class", lambda row: row["error"]),
        ("failed", lambda row: f"{row['failed']:,}"),
        *((str(what), lambda row, what=str(what): share(row[what] / row["failed"])) for what in AfterFailure),
    ]
    shown = rows[:MOST_ERRORS]
    rest = rows[MOST_ERRORS:]
    if rest:
        shown = [*shown, {"error": f"{len(rest)} other classes", **_sum(rest)}]
    right = report["right_share_after_error"]
    ended = "  ".join(f"{name} {share(value)}" for name, value in right.items() if value is not None)
    said = f"\nfailed calls whose attempt was right in the end, by what came after: {ended}" if ended else ""
    return table(columns, [*shown, {"error": "all", **_sum(rows)}]) + said


def _sum(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(row[name] for row in rows) for name in ("failed", *map(str, AfterFailure))}


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> str:
    columns: list[Column] = [
        ("evaluation", lambda row: row["name"]),
        STEP,
        ("accuracy", lambda row: share((row["accuracy"] or {}).get("value"))),
        ("95%", lambda row: " to ".join(map(share, (row["accuracy"] or {}).get("interval") or ()))),
        ("problems", lambda row: number((row["accuracy"] or {}).get("n"), 0)),
        _number("attempts", "attempts", 0),
        _number("tokens", "tokens", 1),
        _number("calls", "calls", 2),
        ("tools", lambda row: ", ".join(row["tools"] or ()) or "none"),
    ]
    return table(columns, rows) if rows else ""


def _contamination(note: Mapping[str, Any] | None) -> str:
    if note is None:
        return ""
    said = (
        f"Contamination: of {note['questions']:,} questions, {note['same']:,} were trained on and "
        f"{note['shared_8_gram']:,} more share 8 words in a row with one of {note['trained_questions']:,} trained ones"
    )
    return "\n".join([said, *(f"  {line}" for line in note["evidence"])])


def _tokens(tokens: Mapping[str, Any] | None) -> list[str]:
    if not tokens:
        return []
    columns: list[Column] = [
        STEP,
        _number("attempts", "attempts", 0),
        _number("nats", "entropy", 3),
        _number("in calls", "entropy_in_calls", 3),
        _number("outside", "entropy_outside_calls", 3),
        _number("forking", "forking_tokens", 0),
        _number("reflection", "reflection_tokens", 0),
        _number("after ok", "reflection_after_ok", 0),
        _number("after error", "reflection_after_error", 0),
        _share("call share", "call_share"),
    ]
    return [
        _section(
            "Tokens: the fifth with the highest entropy of each attempt (§5.4)",
            _by_temperature(columns, tokens["by_step"]),
        ),
        "Which tokens these are, and attempts with their tokens marked: --json (tokens.words, tokens.examples)",
    ]


SUSPECT = {
    "constant_print": "programs print constants only",
    "unfounded_answer": "answer stands nowhere before",
    "several_boxes": "several answers at the end",
}
"""Figure of `training[]` -> its title."""
FIGURES: Sequence[Column] = (
    ("attempts", lambda row: f"{row['attempts']:,}"),
    _share("right", "right_share"),
    _number("tokens", "tokens", 1),
    _number("calls", "calls", 2),
    _share("failed", "failed_call_share"),
    _share("in right", "failed_call_share_in_right"),
    _share("no call", "no_call_share"),
    _share("cut", "cut_share"),
    ("most frequent", lambda row: ", ".join(f"{name} {count}" for name, count in [*row["errors"].items()][:2])),
)


def swap_page(found: Mapping[str, Any]) -> str:
    """What swap.py found in one evaluation."""
    if not found["rows"]:
        return f"{found['evaluation']}: no tool replied in the words of its template, so there is nothing to swap"
    columns: list[Column] = [
        ("after a", lambda row: row["after"]),
        ("told", lambda row: row["told"]),
        ("attempts", lambda row: f"{row['attempts']:,}"),
        *[(title, lambda row, key=key: _estimate(row[key])) for key, title in SWAP_FIGURES.items()],
        NOTHING,
    ]
    return _section(
        f"{found['evaluation']}: the first reply of a tool as it was, swapped, blank and false (95% intervals)",
        table(columns, found["rows"]),
    )


def _estimate(figure: Mapping[str, Any]) -> str:
    if not figure["n"]:
        return "-"
    low, high = figure["interval"]
    return f"{figure['value']:.0%} ({low:.0%} to {high:.0%})"


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned: the first and the last column to the left, the others to the right."""
    cells = [[title for title, _ in columns], *([form(row) for _, form in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(columns) - 1
    lines = (
        "  ".join(
            cell.ljust(width) if place in (0, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
    return "\n".join(f"  {line}" for line in lines)


def _by_temperature(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for each temperature: entropies of distributions at different ones cannot be compared."""
    found = {row["temperature"]: [one for one in rows if one["temperature"] == row["temperature"]] for row in rows}
    said = {known: "" if known is None else f"  entropies at temperature {known:g}\n" for known in found}
    return "\n".join(f"{said[known]}{steps_table(columns, some)}" for known, some in found.items())


def steps_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a step; at most MOST_STEPS of them, evenly, the first and the last among them."""
    if len(rows) <= MOST_STEPS:
        return table(columns, rows)
    shown = [rows[round(place * (len(rows) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS)]
    return f"{table(columns, shown)}\n  {MOST_STEPS} of {len(rows)} steps are shown; --json has all"


SWAP_FIGURES = {
    "calls": "calls again",
    "call_works": "call works",
    "same_next": "goes on alike",
    "right": "right",
    "true_word": "true word",
    "false_word": "false word",
}
"""Figure of swap.py -> its title."""
