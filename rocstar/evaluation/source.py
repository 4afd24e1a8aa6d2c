"""What an evaluation is made on: a file of problems, or a benchmark. Both give problems and say what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rocstar.data.problems import columns_of, load_problems
from rocstar.data.rows import fingerprint, read_rows
from rocstar.evaluation.benchmark import Benchmark, ProtocolSection, checksum, refuse_no_folder
from rocstar.evaluation.kinds import KINDS, BenchmarkKind
from rocstar.types import Problem


class ProblemSource(Protocol):
    @property
    def stem(self) -> str:
        """Names the place of the result."""
        ...

    @property
    def title(self) -> str:
        """As the result says what was asked."""
        ...

    @property
    def kind(self) -> BenchmarkKind | None:
        """What a benchmark does beyond asking its questions; None for a plain file."""
        ...

    @property
    def protocol(self) -> ProtocolSection:
        """How it is asked where the command line does not say otherwise."""
        ...

    def problems(self) -> list[Problem]:
        """Raises DataError, ConfigError."""
        ...

    def described(self) -> dict[str, Any]:
        """For the `setup` of a result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFile:
    """A file of problems, and how it is read."""

    path: str
    question: Sequence[str]
    """Columns, joined by a space."""
    answer: str
    limit: int | None
    """Read only the first so many rows."""
    kind: None = None

    @property
    def protocol(self) -> ProtocolSection:
        return ProtocolSection(attempts=1, temperature=1.0)

    @property
    def title(self) -> str:
        return self.path

    @property
    def stem(self) -> str:
        return Path(self.path).name.split(".")[0]

    def problems(self) -> list[Problem]:
        """Raises DataError."""
        return load_problems(self.path, question=self.question, answer=self.answer, limit=self.limit)

    def described(self) -> dict[str, Any]:
        """The columns are those that were found."""
        found = fingerprint(self.path)
        _, row = next(iter(read_rows(self.path)))
        columns = columns_of(row, self.path, tuple(self.question), self.answer)
        return {
            "path": str(Path(self.path).resolve()) if found else self.path,
            "sha256": found[0] if found else None,
            "question": list(columns.question),
            "answer": columns.answer,
            "limit": self.limit,
        }


class BenchmarkRows:
    """A benchmark's rows, read and checked once."""

    def __init__(self, benchmark: Benchmark, folder: Path | None, *, limit: int | None, accept: bool) -> None:
        """accept: take rows with another checksum. Raises DataError, ConfigError."""
        self._benchmark = benchmark
        self._limit = limit
        self.kind: BenchmarkKind = KINDS[benchmark.file.kind]
        self.kind.check()
        refuse_no_folder(folder, benchmark.name)
        rows, self._place = benchmark.read(folder)
        self._sha256 = checksum(rows, self.kind.columns(benchmark.file))
        benchmark.checked(self._sha256, accept=accept)
        self._problems = self.kind.problems(benchmark.file, rows)[:limit]

    @property
    def stem(self) -> str:
        return self._benchmark.name

    @property
    def title(self) -> str:
        return self._benchmark.name

    @property
    def protocol(self) -> ProtocolSection:
        return self._benchmark.file.protocol

    def problems(self) -> list[Problem]:
        return self._problems

    def described(self) -> dict[str, Any]:
        """`expected_sha256` is what the benchmark's file says, None where it says nothing; `sha256` is what it is."""
        file = self._benchmark.file
        return {
            "benchmark": self._benchmark.name,
            "title": file.title,
            "place": self._place,
            "sha256": self._sha256,
            "expected_sha256": file.sha256,
            "limit": self._limit,
        }
