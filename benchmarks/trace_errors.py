"""Failed tool calls in published transcripts: classes with counts, what came after, agreement with judgements.

The transcripts are those of MathCoder and ToRA under traces/ of ../shared/data, or of
$ROCSTAR_DATA; only replies as text were kept, so a failure is known by its form (rocstar/record/call_errors.py).
`trace_errors_judged.jsonl` has the calls whose replies were read by hand: file, line, attempt and call, and the class,
"none" for a call that did not fail. Rules were written on the other half of the files; draw 1 was read before the rule
knew a notebook's "Timeout waiting for reply" (35 of 50 agreed), draw 2 after it, draw 3 (35 replies with a word
such as "error" or "time", 15 others) before any verdict on it was seen. Prints tables and last one JSON line.

    python benchmarks/trace_errors.py        # 20 seconds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frame import Table, data_folder, read_rows, report

from rocstar.analysis.attempts import read_transcripts
from rocstar.analysis.tally import AfterFailure, AttemptCounts, after_error_table

JUDGED = Path(__file__).with_name("trace_errors_judged.jsonl")
SETS = ("mathcoder", "tora")


def ours(file: Path, name: str) -> Iterator[tuple[str, str]]:
    """(id, class) of every call of a file."""
    for attempt in read_transcripts(file):
        line = attempt.problem.removeprefix("line ")
        for number, call in enumerate(attempt.calls):
            yield f"{name}:{line}:0:{number}", call.error or "none"


def analysed(files: list[Path]) -> AttemptCounts:
    tally = AttemptCounts()
    for file in files:
        for _ in tally.watched(read_transcripts(file)):
            pass
    return tally


def agreement(folder: Path) -> dict[str, Any]:
    """Our class against the judged one, by draw."""
    judged = list(read_rows(JUDGED))
    files = sorted({row["id"].partition(":")[0] for row in judged})
    found = dict(pair for name in files for pair in ours(folder / name, name))
    agreed = Counter(row["draw"] for row in judged if found.get(row["id"]) == row["judged"])
    drawn = Counter(row["draw"] for row in judged)
    differ = [{**row, "ours": found.get(row["id"])} for row in judged if found.get(row["id"]) != row["judged"]]
    return {"agreed": dict(agreed), "judged": dict(drawn), "differ": differ}


def main() -> None:
    folder = data_folder("traces")
    result: dict[str, Any] = {}
    for name in SETS:
        whole = analysed(sorted((folder / name).glob("*.jsonl.gz"))).whole()
        rows = after_error_table(whole)
        counts = {"attempts": whole.attempts, "calls": whole.calls, "failed": whole.errors.total()}
        result[name] = {**counts, "classes": rows}
        print(f"\n{name}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}")
        table = Table("class", "failed", *AfterFailure, first=30)
        for row in rows:
            table.row(row["error"], row["failed"], *(row[str(after)] for after in AfterFailure))
    result["judged"] = agreement(folder)
    for draw, count in sorted(result["judged"]["judged"].items()):
        print(f"draw {draw}: {result['judged']['agreed'].get(draw, 0)} of {count} judgements agree")
    report(**result)


if __name__ == "__main__":
    main()
