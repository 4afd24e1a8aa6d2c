"""The demonstrations a run learns from, as token rows in one parquet file: what was imitated can be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rocstar.errors import DataError
from rocstar.runs.atomic import write_atomic
from rocstar.runs.rollouts import read_table
from rocstar.types import SftRow


def write_rows(path: Path, rows: Sequence[SftRow]) -> None:
    """Columns token_ids (list of int32) and loss_mask (list of bool), rows in training order. Raises OSError."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        [("token_ids", pyarrow.list_(pyarrow.int32())), ("loss_mask", pyarrow.list_(pyarrow.bool_()))]
    )
    columns = [[row.token_ids for row in rows], [row.loss_mask for row in rows]]
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(table, buffer, compression="zstd")
    write_atomic(path, buffer.getvalue().to_pybytes())


def read_rows(path: Path) -> list[SftRow]:
    """Raises DataError when the file is missing or something else."""
    import pyarrow

    try:
        table = read_table(path).to_pydict()
        pairs = zip(table["token_ids"], table["loss_mask"], strict=True)
    except (OSError, KeyError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path} does not hold the run's SFT rows ({error}); start the run anew") from None
    return [SftRow(token_ids=tuple(ids), loss_mask=tuple(mask)) for ids, mask in pairs]
