"""A benchmark is one small TOML file: the source of its rows, their checksum, their kind, and the paper's protocol.

The files are in `benchmarks/`; a path to your own works like a name. Rows are read from a local folder or from the hub,
and never copied. `kinds.py` defines what each `kind` of benchmark does with its rows."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rocstar.config.layers import load
from rocstar.config.values import Section, Temperature
from rocstar.data.rows import read_rows
from rocstar.errors import ConfigError, DataError

FOLDER = Path(__file__).parent / "benchmarks"
Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[tuple[int, Row]]]
"""Name of a file in the benchmark's TOML -> its (line, row) pairs in their order."""


class ProtocolSection(Section):
    """How the benchmark is sampled, unless the command line changes it."""

    attempts: int = Field(default=1, ge=1)
    """Samples per problem."""
    temperature: Temperature = Field(default=0.0, ge=0)
    settings: list[str] = Field(default=[])
    """Further settings as on the command line, `section.key=value`."""


class BenchmarkFile(Section):
    """The contents of a benchmark's TOML file."""

    title: str
    """Full name, for tables."""
    source: str
    """Where the rows were published, and the sources of the protocol."""
    kind: Literal["math", "choice", "ifeval", "ifbench", "functions", "judged"]
    """The kind of rows and of scoring (`kinds.py`)."""
    files: list[str] = Field(min_length=1)
    """Files of rows, below the data folder; the stems of several name the parts of the benchmark."""
    answers: list[str] = Field(default=[])
    """Files of reference answers separate from the rows: one for each of `files` that has any (functions), or the
    answers of the baseline model (judged)."""
    hub: str | None = None
    """The same rows as hf:NAME[:CONFIG]@SPLIT, used without a data folder; None: not on the hub in this form."""
    question: str = "question"
    """Column."""
    answer: str = "answer"
    """Column."""
    sha256: str | None = None
    """Checksum of the columns that are read, in hex (`checksum`); None if unknown: nothing is checked."""
    protocol: ProtocolSection = ProtocolSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    name: str
    file: BenchmarkFile

    def read(self, folder: Path | None) -> tuple[Rows, str]:
        """All rows, and their source. Raises DataError, ConfigError if neither folder nor hub has them."""
        if folder is not None:
            names = [*self.file.files, *self.file.answers]
            return {name: list(read_rows(folder / name)) for name in names}, str(folder.resolve())
        if self.file.hub is None:
            raise ConfigError(
                f"the rows of benchmark {self.name} are not on the hub in a form that is read here; fetch them from "
                f"{self.file.source}, save them as {self.file.files[0]} in a folder, and give that with --data-folder"
            )
        return {self.file.files[0]: list(read_rows(self.file.hub))}, self.file.hub

    def checked(self, found: str, *, accept: bool) -> None:
        """Raises DataError if the rows do not match the file's checksum, unless other rows are accepted."""
        if self.file.sha256 is not None and found != self.file.sha256 and not accept:
            raise DataError(
                f"the rows of benchmark {self.name} have sha256 {found}, not {self.file.sha256}; get the "
                "expected rows, or accept these, which the result records, with --accept-rows of rocstar eval, or "
                "accept_rows = true in a recipe's [[evaluate.benchmark]]"
            )


def refuse_no_folder(folder: Path | None, name: str) -> None:
    """Raises ConfigError for a missing folder of rows."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the one that holds the rows of {name}")


def find_benchmarks(names: str) -> list[Benchmark]:
    """The benchmarks of a comma list of names and paths. Raises ConfigError."""
    return [_find(name.strip()) for name in names.split(",")]


def known() -> list[str]:
    """Names of the benchmarks that come with rocstar."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def checksum(rows: Rows, columns: Sequence[str]) -> str:
    """sha256 of these columns of all rows, file by file, as JSON with sorted keys: equal for the same rows from a JSONL
    file, parquet or the hub, whatever other columns they have. A null counts as a missing value."""
    digest = hashlib.sha256()
    for _, row in itertools.chain.from_iterable(rows.values()):
        values = _without_nulls({name: row.get(name) for name in columns})
        digest.update(json.dumps(values, sort_keys=True, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def column(row: Any, name: str, where: str) -> Any:
    """One field of a row. Raises DataError."""
    if not isinstance(row, Mapping) or row.get(name) is None:
        raise DataError(f'{where}: no field "{name}"; the rows are not in the form of this benchmark')
    return row[name]


def lines(rows: Rows, names: Sequence[str]) -> Iterator[tuple[str, str, Row]]:
    """(part, place for messages, row) of these files; a part is the file's stem."""
    for name in names:
        for line, row in rows.get(name, ()):
            yield Path(name).name.split(".")[0], f"{name}, line {line}", row


def _find(name: str) -> Benchmark:
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        close = get_close_matches(name, known(), n=1, cutoff=0.0)
        raise ConfigError(
            f"there is no benchmark {name!r}; the nearest is {close[0]!r}, of {', '.join(known())}. One of your own is "
            "given as path/to/file.toml"
        )
    return Benchmark(name=path.stem, file=load(path, BenchmarkFile))
