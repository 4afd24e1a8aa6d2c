"""Stream the rows of a data file: JSONL, a JSON list, CSV or parquet, plain or gzip, or a Hugging Face dataset.

A row is any value in the file, with its number counted from 1: the line of a text file, else the position of the row.
`problems.py` and `sft/` interpret the columns. Only one row, or one block of a parquet file, is held in memory.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from rocstar.errors import ConfigError, DataError, first_line

KINDS = (".jsonl", ".json", ".csv", ".parquet")
HUB = re.compile(r"hf:(?P<name>[^:@]+)(?::(?P<config>[^@]+))?@(?P<split>.+)")
MAX_CELL_CHARS = 1 << 27  # the csv module's own limit, 128 KiB, is less than one long solution
MAX_LINE_BYTES = 1 << 28  # of JSON lines and CSV; a small .gz may unpack to one line larger than the memory
PARQUET_ROWS = 1024  # rows of a parquet file that are held at once


def read_rows(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """(number, row) pairs of a file, of a folder written by `save_to_disk`, or of `hf:NAME[:CONFIG]@SPLIT`. columns: of
    a parquet file, those to read where it has them; None: all.

    Raises DataError for the first row that cannot be read, naming file and line. Source: ours."""
    for number, row in rows_and_faults(path, columns):
        if isinstance(row, DataError):
            raise row
        yield number, row


def rows_and_faults(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """As `read_rows`, but an unreadable row is replaced by its DataError.

    Raises DataError if the whole file cannot be read."""
    if str(path).startswith("hf:"):
        return enumerate(_hub_rows(str(path)), start=1)
    file = Path(path)
    if (file / "dataset_info.json").is_file() or (file / "dataset_dict.json").is_file():
        return enumerate(_saved_rows(file), start=1)
    kind = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    if kind not in KINDS:
        raise DataError(
            f"{file} is not a kind of file we read; use {', '.join(KINDS)}, plain or with .gz, or a "
            "folder of datasets' save_to_disk."
        )
    if kind == ".parquet":
        return _parquet_rows(file, columns)
    return {".csv": _csv_rows, ".json": _json_list, ".jsonl": _json_lines}[kind](file)


def fingerprint(path: str | Path) -> tuple[str | None, int | None]:
    """(sha256 in hex, size in bytes) of a file, None each if it is not one file. Raises DataError."""
    file = Path(path)
    if str(path).startswith("hf:") or file.is_dir():
        return None, None
    with _opened(file) as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
        return digest, raw.tell()


def refuse_missing(paths: Iterable[str | Path]) -> None:
    """Raises DataError for the first path that does not exist; `hf:NAME@SPLIT` is not looked up."""
    for path in paths:
        if not str(path).startswith("hf:") and not Path(path).exists():
            raise DataError(_missing(Path(path)))


def _missing(path: Path) -> str:
    """Paths in a recipe are relative to the current folder, not to the recipe."""
    return f"{path} does not exist{'' if path.is_absolute() else f' in {Path.cwd()}'}; check the path."


def output_folder(path: Path, setting: str) -> Path:
    """Make the folder that a build writes into. `setting` names it in the message. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{setting}{path} cannot be a folder to write into ({error.strerror}); choose another"
        ) from None
    return path


def _opened(file: Path) -> io.BufferedReader:
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise DataError(f"{file} is a pipe or a device, which can be read only once; give a file.")
        return file.open("rb")
    except FileNotFoundError:
        raise DataError(_missing(file)) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a text file with their ends, unpacked; longer ones in parts of MAX_LINE_BYTES."""
    with _opened(file) as raw:
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if file.suffix == ".gz" else raw
        try:
            yield from iter(partial(stream.readline, MAX_LINE_BYTES), b"")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{file} is not a whole gzip file ({error}); fetch it again or drop the .gz.") from error
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}.") from error


def _decoded(file: Path, line: int, written: bytes) -> str:
    if len(written) == MAX_LINE_BYTES:
        raise DataError(f"{file}, line {line}: longer than {MAX_LINE_BYTES >> 20} MiB; write one row a line.")
    try:
        return written.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8.") from error


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    for line, written in enumerate(_lines(file), start=1):
        try:
            text = _decoded(file, line, written)
            if text.strip():
                yield line, _DECODER.decode(text)
        except DataError as fault:
            yield line, fault
        except json.JSONDecodeError as error:
            yield line, _caused(f"{file}, line {line}, column {error.colno}: not JSON ({error.msg}).", error)
        except (RecursionError, ValueError) as error:  # nested too deep; an integer of thousands of digits; a key twice
            yield line, _caused(f"{file}, line {line}: not readable as JSON ({error}).", error)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for two values of one key, of which Python takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_fields)


def _caused(sentence: str, cause: Exception) -> DataError:
    fault = DataError(sentence)
    fault.__cause__ = cause
    return fault


def _json_list(file: Path) -> Iterator[tuple[int, Any]]:
    """One JSON list, or lines of JSON if the first character is no bracket."""
    begun = (line.removeprefix(codecs.BOM_UTF8).strip() for line in _lines(file))
    if not next(filter(None, begun), b"").startswith(b"["):
        yield from _json_lines(file)
        return
    try:
        listed = json.loads(b"".join(_lines(file)), object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as one JSON list: {error}") from None
    yield from enumerate(listed, start=1)


def _csv_rows(file: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(max(MAX_CELL_CHARS, csv.field_size_limit()))
    reader = csv.reader((_decoded(file, n, raw) for n, raw in enumerate(_lines(file), start=1)), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if header is None:
                header = cells
                if len(cells) == 1 and (found := re.search("[;\t|]", cells[0])):
                    problem = f"cells are separated by {found[0]!r}; write the file with commas."
                    raise DataError(f"{file}, line 1: {problem}")
                _refuse_twice(header, f"{file}, line 1")
            elif len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                problem = f"{len(cells)} cells where the header has {len(header)}; quote cells that hold commas."
                yield reader.line_num, DataError(f"{file}, line {reader.line_num}: {problem}")
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not CSV ({error}).") from error


def _refuse_twice(columns: Sequence[str], where: str) -> None:
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise DataError(f"{where}: several columns are called {twice!r}; rename all but one.")


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet as parquet

    with _opened(file) as raw:
        # Parquet is read from its end, so a compressed file must be unpacked completely first.
        stream = io.BytesIO(b"".join(_lines(file))) if file.suffix == ".gz" else raw
        try:
            opened = parquet.ParquetFile(stream)
            _refuse_twice(opened.schema_arrow.names, f"{file}")
            batches = opened.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file} is not a parquet file ({first_line(error)}).") from error
        except (ValueError, OverflowError) as error:  # text that is no UTF-8, a date beyond Python's
            raise DataError(f"{file} holds what Python cannot ({error}); write its columns as text.") from error


def _hub_rows(name: str) -> Iterator[Any]:
    found = HUB.fullmatch(name)
    if found is None:
        raise DataError(f"{name} is not of the form hf:NAME@SPLIT or hf:NAME:CONFIG@SPLIT.")
    import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    try:
        yield from datasets.load_dataset(found["name"], found["config"], split=found["split"], streaming=True)
    except _faults(datasets) as error:
        raise DataError(f"{name} cannot be read ({_first_sentence(error)}); check name, config and split.") from error


def _saved_rows(folder: Path) -> Iterator[Any]:
    import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    try:
        saved = datasets.load_from_disk(str(folder))
    except _faults(datasets) as error:
        raise DataError(f"{folder} is not a whole saved dataset ({_first_sentence(error)}); save it again.") from error
    if hasattr(saved, "keys"):
        raise DataError(f"{folder} holds several splits; give the folder of one of {', '.join(saved.keys())}.")
    yield from saved


def _faults(datasets: Any) -> tuple[type[Exception], ...]:
    """Errors of the library: not found, no network, no such split, a bad row, a dataset of scripts."""
    return OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError


def _first_sentence(error: Exception) -> str:
    """The first sentence of the library's message, without its usage examples."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2]).rstrip(".") or type(error).__name__
