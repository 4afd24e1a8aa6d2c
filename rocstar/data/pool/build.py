"""Build a pool of problems: read every source, judge every row, write the kept rows, the dropped ones with the reason,
and the counts.

One pass over the sources, then one over the kept rows, for rules that need all rows. Memory does not grow with the
rows: kept rows go to disk at once, and an SQLite file holds what later rows are compared with.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rocstar.data.pool.config import InputSection, PoolConfig
from rocstar.data.pool.overlap import BenchmarkIndex, QuestionIndex
from rocstar.data.pool.rules import RULE_NAMES, AnswerBook, Check, Drop, Judges, disagreement
from rocstar.data.problems import EmptyField, ProblemColumns, detect_columns, problem_of, refuse_no_columns, value_at
from rocstar.data.rows import fingerprint, output_folder, read_rows, refuse_missing, rows_and_faults
from rocstar.errors import ConfigError, DataError
from rocstar.support.scratch import scratch
from rocstar.types import Problem, problem_id

POOL_FILE, DROPPED_FILE, SHEET = "problems.jsonl", "dropped.jsonl", "datasheet.json"
_KEPT_SO_FAR = "kept.jsonl"
SCHEMA = 1
KEPT = "kept"
READ = "read"
NOTE_ROWS = 10_000  # half a minute to two, by machine

Write = Callable[[bytes], Any]
Note = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Datasheet:
    """Counts every row of a build, by source and fate. Nothing in it depends on the time, the machine or the place of
    the files: same input and config, same bytes."""

    config: PoolConfig
    rules: Sequence[str]
    """Names of all rules that were applied, in order."""
    inputs: list[Mapping[str, Any]] = field(default_factory=list)
    """Each file that was read, as datasheet.json tells it."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Benchmark excluded from the comparison -> why."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(source, READ, KEPT or a rule) -> rows."""
    asked: Counter[str] = field(default_factory=Counter)
    """Source -> kept rows whose question was extended so that the answer is an integer."""
    unasked: int = 0
    """Kept rows of the sources it covers for which the agreement check had no answers."""
    outputs: dict[str, str] = field(default_factory=dict)
    """File -> sha256."""

    @property
    def sources(self) -> list[str]:
        return [file["name"] for file in self.inputs if file["role"] == "source"]

    @property
    def answers(self) -> Sequence[str]:
        """The files that labels are checked with."""
        return self.config.agreement.answers if "disagreement" in self.rules else []

    @property
    def benchmarks(self) -> list[str]:
        """Sentences that list the benchmarks compared with, and those that were not."""
        files = (file for file in self.inputs if file["role"] == "benchmark")
        compared = ", ".join(f"{file['name']} ({file['rows']:,})" for file in files)
        others = [f"not compared with {name}: {why}" for name, why in self.not_compared.items()]
        return [f"compared with the questions of {compared or 'no benchmark'}", *others]

    def total(self, fate: str) -> int:
        """Rows of one fate over all sources."""
        return sum(count for (_, name), count in self.counts.items() if name == fate)

    def funnel(self) -> list[tuple[str, int, dict[str, int]]]:
        """(fate, rows, rows by source): read, each rule that dropped something, kept."""
        fates = [READ, *(rule for rule in self.rules if self.total(rule)), KEPT]
        return [(fate, self.total(fate), {s: self.counts[s, fate] for s in self.sources}) for fate in fates]

    def as_json(self) -> dict[str, Any]:
        config = self.config.model_dump(mode="json", exclude={"data", "out"})
        return {
            "schema": SCHEMA,
            "kept": self.total(KEPT),
            "funnel": {fate: {"all": rows, **by_source} for fate, rows, by_source in self.funnel()},
            "asked_for_integer": {source: self.asked[source] for source in self.sources},
            "agreement_unasked": self.unasked,
            "benchmarks_not_compared": dict(self.not_compared),
            "inputs": self.inputs,
            "outputs": dict(self.outputs),
            "config": config,
        }


def row_of(values: Mapping[str, Any]) -> bytes:
    """One JSONL line; equal values give equal bytes."""
    return (json.dumps(values, ensure_ascii=False, default=str) + "\n").encode("utf-8", "surrogatepass")


def build_pool(config: PoolConfig, check: Check, note: Note, absent: Mapping[str, str] | None = None) -> Datasheet:
    """Write `problems.jsonl`, `dropped.jsonl` and `datasheet.json` into `config.out`.

    check: the verifier, for references and answers. note: called with progress. absent: benchmarks excluded from the
    comparison, and why, for the datasheet. Files are written atomically. Raises DataError for an input that cannot be
    read and ConfigError for a rule that does not exist."""
    for rule in config.rules.skip:
        if rule not in RULE_NAMES:
            close = difflib.get_close_matches(rule, RULE_NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(RULE_NAMES)}"
            raise ConfigError(f"rules.skip: there is no rule {rule!r}; {hint}")
    rules = [rule for rule in RULE_NAMES if rule not in config.rules.skip]
    sheet = Datasheet(config=config, rules=rules, not_compared=absent or {})
    for section in (*config.benchmark, *config.source):
        _refuse_unreadable(config, section)
    refuse_missing(sheet.answers)
    out = output_folder(Path(config.out), "out=")
    with scratch(out, ".building-", out) as work:
        with (work / DROPPED_FILE).open("wb") as dropped:
            judges = _read_sources(sheet, check, work, dropped.write, note)
            _finish(sheet, judges, work, dropped.write)
        for name in (POOL_FILE, DROPPED_FILE):
            with (work / name).open("rb") as file:
                sheet.outputs[name] = hashlib.file_digest(file, "sha256").hexdigest()
        (work / SHEET).write_text(json.dumps(sheet.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for name in (POOL_FILE, DROPPED_FILE, SHEET):
            os.replace(work / name, out / name)
    return sheet


def _refuse_unreadable(config: PoolConfig, section: InputSection) -> None:
    """Report a missing file, or one with other columns, before reading any. Raises DataError."""
    path = _path_of(config, section)
    refuse_missing([path])
    if path.startswith("hf:") or config.limits.max_bad_rows:
        return
    for line, row in itertools.islice(read_rows(path), 1):
        where = f"{path}, line {line}"
        columns = _columns_of(row, section, where, "source" if section in config.source else "benchmark")
        for name in (*columns.question, *([columns.answer] if columns.answer else [])):
            value_at(row, name, where)


def _path_of(config: PoolConfig, section: InputSection) -> str:
    return section.path if section.path.startswith("hf:") else str(Path(config.data) / section.path)


def _read_sources(sheet: Datasheet, check: Check, work: Path, drop: Write, note: Note) -> Judges:
    """First pass: every row is dropped or kept for now. The judges record conflicts that later rows reveal in earlier
    ones."""
    config = sheet.config
    benchmarks = BenchmarkIndex(benchmark_questions(sheet))
    note(f"{len(benchmarks)} benchmark questions read from {len(config.benchmark)} files")
    seen = QuestionIndex(work / "seen.sqlite", near=config.duplicates.near)
    with seen, (work / _KEPT_SO_FAR).open("wb") as kept:
        judges = Judges(config=config, check=check, seen=seen, benchmarks=benchmarks)
        for source in config.source:
            for number, problem in enumerate(read_problems(sheet, source, "source", drop), start=1):
                if number % NOTE_ROWS == 0:
                    note(f"{source.name}: {number} rows so far")
                judged, reason = judges.judge(problem)
                if reason is None:
                    kept.write(_pool_row(judged, config.keep))
                else:
                    _drop(sheet, drop, problem, reason)
            note(f"{source.name}: {sheet.counts[source.name, READ]} rows judged")
    return judges


def _finish(sheet: Datasheet, judges: Judges, work: Path, drop: Write) -> None:
    """Second pass: rules that need the whole first pass."""
    config = sheet.config
    book = _answers(sheet, work)
    with (work / POOL_FILE).open("wb") as pool:
        for problem, reason in _judged_again(judges, work):
            is_checked = config.agreement.covers(problem.source)
            said = book.answers(problem.id) if is_checked else []
            if reason is None and said:
                evidence = disagreement(problem.answer, said, config.agreement.least, judges.check)
                reason = ("disagreement", evidence) if evidence else None
            if reason is None:
                pool.write(_pool_row(problem, config.keep))
                sheet.counts[problem.source, KEPT] += 1
                sheet.asked[problem.source] += "asked_from" in problem.metadata
                sheet.unasked += is_checked and not said
            else:
                _drop(sheet, drop, problem, reason)
    book.close()


def _answers(sheet: Datasheet, work: Path) -> AnswerBook:
    """What somebody answered; nothing where the labels are not checked."""
    book = AnswerBook(work / "answers.sqlite")
    columns = ProblemColumns(layout="answers", question=("id or question",), answer="answers")
    for path in sheet.answers:
        _add_input(sheet, InputSection(name="answers", path=path), path, "answers", book.read(Path(path)), columns)
    return book


def benchmark_questions(sheet: Datasheet) -> Iterator[Problem]:
    """The questions of all benchmarks of a config, in order. Raises DataError."""
    for section in sheet.config.benchmark:
        yield from read_problems(sheet, section, "benchmark", None)


def read_problems(sheet: Datasheet, section: InputSection, role: str, drop: Write | None) -> Iterator[Problem]:
    """The problems of one file of a config. Unreadable rows are dropped as far as the config allows, and empty ones
    always; without `drop` the first of either stops it. Raises DataError naming file, line and field."""
    path = _path_of(sheet.config, section)
    rows, columns = 0, None

    def drop_unread(rule: str, fault: DataError) -> None:
        if drop is None or rule not in sheet.rules:
            raise fault
        sheet.counts[section.name, rule] += 1
        drop(row_of({"rule": rule, "evidence": str(fault), "source": section.name}))

    for line, row in rows_and_faults(path):
        rows += 1
        sheet.counts[section.name, READ] += role == "source"
        try:
            if isinstance(row, DataError):
                raise row
            where = f"{path}, line {line}"
            refuse_no_columns(row, where)
            columns = columns or _columns_of(row, section, where, role)
            problem = _alone(problem_of(row, columns, where=where, source=section.name, line=line), where)
        except EmptyField as fault:
            drop_unread("empty", fault)
        except DataError as fault:
            if sheet.total("bad_row") >= sheet.config.limits.max_bad_rows:
                raise
            drop_unread("bad_row", fault)
        else:
            yield _cut(problem, section.cut)
    if columns is None:
        raise DataError(f"{path} has no row that can be read; give a file with at least one problem.")
    _add_input(sheet, section, path, role, rows, columns)


def _add_input(
    sheet: Datasheet, section: InputSection, path: str, role: str, rows: int, columns: ProblemColumns
) -> None:
    digest, size = fingerprint(path)
    sheet.inputs.append(
        {
            "name": section.name,
            "path": section.path,
            "license": section.license,
            "role": role,
            "sha256": digest,
            "size_bytes": size,
            "rows": rows,
            "layout": columns.layout,
            "question": " + ".join(columns.question),
            "answer": columns.answer,
        }
    )


def _columns_of(row: Any, section: InputSection, where: str, role: str) -> ProblemColumns:
    """The columns that a config names, or those of the row's layout. Raises DataError."""
    needs_answer = role == "source"
    if section.question and (section.answer or not needs_answer):
        return ProblemColumns(layout="given", question=tuple(section.question), answer=section.answer)
    found = detect_columns(row, where=where, needs_answer=needs_answer and not section.answer)
    return ProblemColumns(
        layout=found.layout,
        question=tuple(section.question) or found.question,
        answer=(section.answer or found.answer) if needs_answer else None,
    )


def _alone(problem: Problem, where: str) -> Problem:
    """The problem without its system text: a pool holds questions. Raises DataError where turns stand before it."""
    if problem.earlier:
        raise DataError(f"{where}: the question follows earlier turns, which a pool can't hold; leave such rows out.")
    return replace(problem, id=problem_id(problem.question), messages=()) if problem.messages else problem


def _cut(problem: Problem, texts: Sequence[str]) -> Problem:
    question = problem.question
    for text in texts:
        question = question.replace(text, "")
    question = question.strip()
    return problem if question == problem.question else replace(problem, question=question, id=problem_id(question))


def _drop(sheet: Datasheet, drop: Write, problem: Problem, reason: Drop) -> None:
    rule, evidence = reason
    sheet.counts[problem.source, rule] += 1
    drop(row_of({"rule": rule, "evidence": evidence, **_described(problem)}))


def _described(problem: Problem) -> dict[str, Any]:
    place = {"source": problem.source, "line": problem.metadata["line"]}
    return {"id": problem.id, "question": problem.question, "answer": problem.answer, **place}


def _pool_row(problem: Problem, keep: Sequence[str]) -> bytes:
    further = [name for name in ("asked_from", *keep) if name in problem.metadata]
    return row_of({**_described(problem), **{name: problem.metadata[name] for name in further}})


def _judged_again(judges: Judges, work: Path) -> Iterator[tuple[Problem, Drop | None]]:
    """Each row that the first pass kept, and the reason if it is dropped now."""
    with (work / _KEPT_SO_FAR).open("rb") as kept:
        for row in kept:
            value = json.loads(row)
            named = {name: value.pop(name) for name in ("id", "question", "answer", "source")}
            problem = Problem(**named, metadata=value)
            yield problem, judges.late(problem)
