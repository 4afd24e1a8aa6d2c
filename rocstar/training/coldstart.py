"""What a run opens with: a tokenizer, a model, and the rows to imitate, kept in the run folder so that a resumed run
learns from the very same ones.

A model that starts from random weights gets a tokenizer trained on the demonstrations of its first stage; it is saved
beside every checkpoint, because a tokenizer trained again from a changed generator would silently give other ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.config import SftStage
from rocstar.dialogue.codec import Codec
from rocstar.errors import DataError
from rocstar.learning.models import load_model, random_model
from rocstar.runs.atomic import write_atomic
from rocstar.runs.rollouts import read_table
from rocstar.training.material import Material, fresh_codec, layouts_at_first
from rocstar.training.rows import Layout, rows_of_layouts
from rocstar.types import SftRow, seed_for


def rows_file(run: Path, stage: str) -> Path:
    return run / "sft_rows" / f"{stage}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model in memory and the tokenizer that goes with it."""

    model: Any
    """A transformers causal LM, fp32, on the CPU."""
    codec: Codec


def opened(checkpoint: Path) -> Opened:
    """The model of a checkpoint, as exported; its exact weights are in the learner's state."""
    folder = checkpoint / "model"
    return Opened(model=load_model(folder), codec=Codec.load(folder))


def opening(material: Material, run: Path) -> Opened:
    """A fresh run's model; writes the rows of each SFT stage. Raises ConfigError, DataError."""
    layouts = {
        stage.name: layouts_at_first(material, stage) for stage in material.recipe.stage if isinstance(stage, SftStage)
    }
    made = _model(material, next(iter(layouts.values()), ()))
    positions = int(made.model.config.max_position_embeddings)
    for name, shown in layouts.items():
        rows = rows_of_layouts(name, shown, made.codec, material.template, positions)
        rows_file(run, name).parent.mkdir(exist_ok=True)
        _write_rows(rows_file(run, name), rows)
    return made


def load_sft_rows(run: Path, stage: str) -> list[SftRow]:
    """The rows `opening` wrote. Raises DataError when the file is missing or something else."""
    import pyarrow

    path = rows_file(run, stage)
    try:
        table = read_table(path).to_pydict()
        pairs = zip(table["token_ids"], table["loss_mask"], strict=True)
    except (OSError, KeyError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path} does not hold the run's SFT rows ({error}); start the run anew") from None
    return [SftRow(token_ids=tuple(ids), loss_mask=tuple(mask)) for ids, mask in pairs]


def _write_rows(path: Path, rows: Sequence[SftRow]) -> None:
    """Columns token_ids (list of int32) and loss_mask (list of bool), rows as their source has them. Raises OSError."""
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


def _model(material: Material, layouts: Sequence[Layout]) -> Opened:
    recipe = material.recipe
    if material.pretrained:
        return Opened(model=load_model(material.pretrained.facts.folder), codec=material.pretrained.codec)
    codec = fresh_codec(material, layouts)
    shape = recipe.model.model_copy(update={"vocab_size": codec.vocab_size})
    return Opened(model=random_model(shape, seed_for(recipe.run.seed, "weights")), codec=codec)
