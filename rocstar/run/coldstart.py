"""What a run opens with: a tokenizer, a model, and the rows to imitate, kept in the run folder so that a resumed run
learns from the very same ones.

A model that starts from random weights gets a tokenizer trained on the demonstrations of its first stage; it is saved
beside every checkpoint, because a tokenizer trained again from a changed generator would silently give other ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.config.sections import SftStage
from rocstar.dialogue.codec import Codec
from rocstar.errors import DataError
from rocstar.learning.models import load_model, random_model
from rocstar.record.atomic import write_atomic
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import read_table
from rocstar.run.material import Material, fresh_codec, layouts_at_first
from rocstar.run.rows import Layout, rows_of_layouts
from rocstar.types import SftRow, seed_for


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


def reopened(checkpoint: Path, material: Material, run: Path) -> Opened:
    """The same for a run that goes on; writes the rows of SFT stages that it was given since. Raises ConfigError,
    DataError."""
    made = opened(checkpoint)
    _write_stages(_layouts(material), made, material, run)
    return made


def opening(material: Material, run: Path) -> Opened:
    """A fresh run's model; writes the rows of each SFT stage. Raises ConfigError, DataError."""
    layouts = _layouts(material)
    made = _model(material, next(iter(layouts.values()), ()))
    _write_stages(layouts, made, material, run)
    return made


def _layouts(material: Material) -> dict[str, Sequence[Layout]]:
    """By the SFT stages whose rows are to be made."""
    stages = (stage for stage in material.recipe.stage if isinstance(stage, SftStage))
    return {stage.name: layouts_at_first(material, stage) for stage in stages if stage.name in material.layouts}


def _write_stages(layouts: Mapping[str, Sequence[Layout]], made: Opened, material: Material, run: Path) -> None:
    positions = int(made.model.config.max_position_embeddings)
    for name, shown in layouts.items():
        file = RunFolder(run).sft_rows(name)
        file.parent.mkdir(exist_ok=True)
        _write_rows(file, rows_of_layouts(name, shown, made.codec, material.template, positions))


def load_sft_rows(run: Path, stage: str) -> list[SftRow]:
    """The rows `opening` wrote. Raises DataError when the file is missing or something else."""
    import pyarrow

    path = RunFolder(run).sft_rows(stage)
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
