"""Inspects a file of problems before use: the columns read, a sample prompt, and faults.

Nothing is written or dropped; `build.py` does that. Rows that cannot be read are counted, not fatal.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rocstar.data.pool.overlap import BenchmarkIndex, QuestionIndex
from rocstar.data.pool.rewording import before_asking, same_form
from rocstar.data.pool.rules import Check
from rocstar.data.problems import ProblemColumns, asked_under_another_system, problem_of
from rocstar.data.rows import fingerprint, rows_and_faults
from rocstar.errors import DataError
from rocstar.types import Problem

SHOWN_EXAMPLES = 5
MAX_SHOWN_CHARS = 400
TRIED = 100  # references that are compared with another answer, which for formulas takes tens of milliseconds each
NEAR = 0.7


UNREAD = ("gold_unparsed", "unsure")
"""Methods of the verdict that a reference cannot be read."""

FINDINGS = {
    "bad": "rows that train and eval refuse",
    "refused": "references the verifier refuses",
    "unread": "references, of the first 100, beside which any other answer is undecided, and a run halts by those; set "
    "evaluate.verifier to boxed_text or to a function of your own",
    "reordered": "references that are right backwards too; where order counts, set evaluate.verifier to boxed_text, "
    "and where a comma is a decimal one, write a point",
    "held_out": "held out by the recipe, and so not learnt from",
    "asked_again": "held-out questions under another system text, which are learnt from",
    "conflicts": "same text, another answer",
    "duplicates": "same text, same answer",
    "near": "nearly the same text, same answer",
    "overlaps": "overlap with benchmarks",
}
"""What may be wrong with a row, in words."""

ColumnsOf = Callable[[Any, str], ProblemColumns]
"""(row, its file and line) -> the columns to read. Raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How a problem becomes a prompt, and how its length is measured."""

    render: Callable[[Problem], str]
    """Everything before the first completion. Raises DataError for a row that training refuses."""
    markers: Sequence[str]
    """Special tokens, to be made visible."""
    length: Callable[[str], int]
    """Length of a prompt, in `unit`."""
    unit: str
    """`tokens` or `characters`."""
    room: float = math.inf
    """The longest prompt, in `unit`, that training takes."""


@dataclass(slots=True)
class FindingCount:
    """The rows with one fault."""

    lines: dict[str, list[int]] = field(default_factory=dict)
    """What is wrong, with `line N` for the row's own -> the lines of the rows of which this holds."""

    def add(self, line: int, message: str) -> None:
        self.lines.setdefault(message.replace(f"line {line}", "line N", 1), []).append(line)

    @property
    def rows(self) -> int:
        return sum(map(len, self.lines.values()))

    @property
    def examples(self) -> list[str]:
        """The first few messages, each with its first line."""
        examples = []
        for found, lines in islice(self.lines.items(), SHOWN_EXAMPLES):
            message = found.replace("line N", f"line {lines[0]}", 1)
            cut = message if len(message) <= MAX_SHOWN_CHARS else f"{message[: MAX_SHOWN_CHARS - 1]}…"
            examples.append(f"{cut} ({len(lines):,} rows)" if len(lines) > 1 else cut)
        return examples

    @property
    def not_shown(self) -> int:
        """The rows that no example counts."""
        return sum(map(len, islice(self.lines.values(), SHOWN_EXAMPLES, None)))


@dataclass(slots=True, kw_only=True)
class FileReport:
    """The output of `rocstar data check`."""

    file: str
    sha256: str | None = None
    rows: int = 0
    columns: ProblemColumns | None = None
    """The columns read from the first row; None if no row could be read."""
    others: list[str] = field(default_factory=list)
    """ProblemColumns of the first row that are not used."""
    prompt: str = ""
    """The first question as a prompt, special tokens in «»."""
    answer: str = ""
    """Its answer, in the form that rewards compare with."""
    unit: str = "characters"
    """Unit of the lengths: `tokens` or `characters`."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Length of the prompt -> rows."""
    findings: dict[str, FindingCount] = field(default_factory=lambda: {name: FindingCount() for name in FINDINGS})
    """What is wrong with rows, by its name in FINDINGS."""
    by_benchmark: Counter[str] = field(default_factory=Counter)
    """Overlapping rows by the benchmark they share most with."""
    compared_with: dict[str, int] = field(default_factory=dict)
    """Benchmark -> its questions."""

    def quantile(self, share: float) -> int:
        """The length that this share of the rows does not exceed."""
        remaining = share * self.lengths.total()
        for length in sorted(self.lengths):
            remaining -= self.lengths[length]
            if remaining <= 0:
                return length
        return 0

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, below, rows) in doubling steps."""
        bins = Counter({power: 0 for power in range(max(self.lengths, default=0).bit_length() + 1)})
        for length, rows in self.lengths.items():
            bins[length.bit_length()] += rows
        found = [power for power in sorted(bins) if bins[power]]
        return (
            [(1 << power >> 1, 1 << power, bins[power]) for power in range(min(found), max(found) + 1)] if found else []
        )

    def as_json(self) -> dict[str, Any]:
        quantiles = {name: self.quantile(share) for name, share in QUANTILES.items()}
        counted = {
            name: {"rows": found.rows, "examples": found.examples, "lines": found.lines}
            for name, found in self.findings.items()
        }
        return {
            "file": self.file,
            "sha256": self.sha256,
            "rows": self.rows,
            "columns": asdict(self.columns) if self.columns else None,
            "unused_columns": self.others,
            "prompt": self.prompt,
            "answer": self.answer,
            "length_unit": self.unit,
            "length": quantiles,
            "histogram": [list(step) for step in self.histogram()],
            **counted,
            "overlaps_by_benchmark": dict(self.by_benchmark),
            "compared_with": self.compared_with,
        }


QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}


def check_file(
    path: str,
    columns: ColumnsOf,
    check: Check,
    wording: Wording,
    benchmarks: Iterable[Problem],
    held_out: Sequence[Problem] = (),
) -> FileReport:
    """Read the file once. held_out: problems that training excludes. Raises DataError if it cannot be read at all, or
    has no row. Source: ours."""
    ids, is_asked = {problem.id for problem in held_out}, asked_under_another_system(held_out)
    report = FileReport(file=path, unit=wording.unit)
    report.sha256, _ = fingerprint(path)
    index = BenchmarkIndex(benchmarks)
    report.compared_with = dict(index.sizes())
    with tempfile.TemporaryDirectory() as folder, QuestionIndex(Path(folder) / "seen.sqlite", near=NEAR) as seen:
        for problem, prompt in _readable(path, columns, wording, report):
            line: int = problem.metadata["line"]
            name = f"line {line}"
            if not report.prompt:
                report.prompt, report.answer = _visible(prompt, wording.markers), problem.answer
            accepted, method = check(problem.answer, f"\\boxed{{{problem.answer}}}")
            if problem.answer and not accepted:
                report.findings["refused"].add(line, f'{name}: "{problem.answer[:60]}" ({method})')
            if report.rows <= TRIED and check(problem.answer, "\\boxed{0}")[1] in UNREAD:
                report.findings["unread"].add(line, f'{name}: "{problem.answer[:60]}"')
            backwards = _backwards(problem.answer)
            if backwards != problem.answer and check(problem.answer, f"\\boxed{{{backwards}}}")[0]:
                report.findings["reordered"].add(line, f'{name}: "{backwards[:60]}" for "{problem.answer[:60]}"')
            place = f"{name}: {problem.question[:60]}"
            if problem.id in ids:
                report.findings["held_out"].add(line, place)
            elif is_asked(problem):
                report.findings["asked_again"].add(line, place)
            _compare(report, problem, check, seen, index)
    if not report.rows:
        raise DataError(f"{path} has no rows; give a file with at least one problem.")
    return report


def _backwards(answer: str) -> str:
    """The parts of a list, or the letters of a word, in reverse order; anything else unchanged."""
    parts = [part.strip() for part in answer.split(",")]
    if len(parts) > 1:
        return ", ".join(reversed(parts))
    return answer[::-1] if answer.isalnum() and not answer.isdigit() else answer


def _readable(path: str, columns: ColumnsOf, wording: Wording, report: FileReport) -> Iterator[tuple[Problem, str]]:
    """The problems that training takes, with their prompts."""
    for line, row in rows_and_faults(path):
        report.rows += 1
        where = f"{path}, line {line}"
        try:
            if isinstance(row, DataError):
                raise row
            found = columns(row, where)
            if report.columns is None:
                report.columns = found
                report.others = [str(name) for name in row if name not in found.used]
            problem = problem_of(row, found, where=where, source=Path(path).name, line=line)
            prompt = wording.render(problem)
            length = wording.length(prompt)
            if length > (room := max(0, wording.room)):
                leave_out = f"leave such rows out with data.max_prompt_tokens={room}, or " if room else ""
                raise DataError(
                    f"{where}: a prompt of {length} tokens, where the model and rollout.max_response_tokens leave "
                    f"{room}; {leave_out}lower rollout.max_response_tokens."
                )
            report.lengths[length] += 1
            yield problem, prompt
        except DataError as fault:
            report.findings["bad"].add(line, str(fault))


def _compare(report: FileReport, problem: Problem, check: Check, seen: QuestionIndex, index: BenchmarkIndex) -> None:
    line: int = problem.metadata["line"]
    name = f"line {line}"
    question, answer = before_asking(problem)
    match = seen.add(question, answer, name, form=same_form(answer))
    if match is not None and not match.exact:
        report.findings["near"].add(line, f"{name}: {match.evidence}")
    elif match is not None:
        same = match.same_answer or check(match.answer, f"\\boxed{{{answer}}}")[0]
        difference = "" if same else f" and the answer {match.answer}, not {answer}"
        report.findings["duplicates" if same else "conflicts"].add(line, f"{name}: {match.evidence}{difference}")
    if index and (overlap := index.find(problem.question)):
        report.findings["overlaps"].add(line, f"{name}: {overlap.evidence}")
        report.by_benchmark[overlap.found.source] += 1


def _visible(prompt: str, markers: Sequence[str]) -> str:
    if not markers:
        return prompt
    longest_first = sorted(markers, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: f"«{found.group()}»", prompt)
