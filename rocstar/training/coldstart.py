"""What a run opens with: a tokenizer, a model, and the rows to imitate, kept in the run folder so that a resumed run
learns from the very same ones.

A model that starts from random weights gets a tokenizer trained on the demonstrations of its first stage; it is saved
beside every checkpoint, because a tokenizer trained again from a changed generator would silently give other ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.config import ModelSection, SftStage
from rocstar.dialogue.codec import Codec
from rocstar.learning.models import Shape, load_model, random_model
from rocstar.runs.sftrows import read_rows, write_rows
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
        write_rows(rows_file(run, name), rows)
    return made


def load_sft_rows(run: Path, stage: str) -> list[SftRow]:
    """The rows `opening` wrote. Raises DataError."""
    return read_rows(rows_file(run, stage))


def _model(material: Material, layouts: Sequence[Layout]) -> Opened:
    recipe = material.recipe
    if material.pretrained:
        return Opened(model=load_model(material.pretrained.facts.folder), codec=material.pretrained.codec)
    codec = fresh_codec(material, layouts)
    shape = _shape(recipe.model, codec.vocab_size)
    return Opened(model=random_model(shape, seed_for(recipe.run.seed, "weights")), codec=codec)


def _shape(model: ModelSection, vocab_size: int) -> Shape:
    return Shape(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        rope_theta=model.rope_theta,
        max_positions=model.max_positions,
    )
