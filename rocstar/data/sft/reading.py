"""Rows of a file, one at a time: JSONL or one JSON list, plain or gzip, or parquet. A line that cannot be read is given
as a Refused in its place; a file that cannot be read ends everything."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from rocstar.data.sft.refusal import Reason, Refused
from rocstar.errors import DataError


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, row) from 1; the number is the line, the item of a JSON list, or the row of a parquet file. Raises
    DataError."""
    try:
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; check the path") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of the file as it is on disk. Raises DataError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with _opened(path) as lines:
        first = lines.read(1)
        lines.seek(0)
        if first == b"[" and ".jsonl" not in path.suffixes:
            yield from _items(path, lines.read())
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _row(line)


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return Refused(Reason.NOT_JSON, "line", f"is not JSON: {error}")


def _items(path: Path, content: bytes) -> Iterator[tuple[int, Any]]:
    try:
        listed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not one JSON list: {error}") from None
    yield from enumerate(listed, 1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a parquet file ({str(error).splitlines()[0]})") from None
