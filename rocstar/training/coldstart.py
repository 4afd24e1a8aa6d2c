"""What a run opens with: demonstrations as token rows, a tokenizer, a model.

Demonstrations of a task and rows from a file take one path: both are conversations (`rocstar.data.sft`). A model that
starts from random weights gets a tokenizer trained on the demonstrations of its first stage; it is saved beside every
checkpoint, because a tokenizer trained again from a changed generator would silently give other ids. Rows are kept in
the run folder, so a resumed run learns from the very same ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocstar.config import ModelSection, SftStage
from rocstar.data.sft.format import Conversation, Role
from rocstar.data.sft.render import Piece, encoded, from_demonstration, pieces
from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import Template
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError
from rocstar.learning.models import Shape, load_model, random_model
from rocstar.parts import make_feedback, tools_of
from rocstar.protocols import ToolSpec
from rocstar.runs.sftrows import read_rows, write_rows
from rocstar.sandbox.client import SandboxClient
from rocstar.training.material import Material, task_of
from rocstar.training.tasks import require_demonstrations
from rocstar.types import SftRow, Status, ToolResult, seed_for

TOKENIZER_ROWS = 3000  # demonstrations a tokenizer is trained on; more change nothing that matters


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
    recipe = material.recipe
    stages = [stage for stage in recipe.stage if isinstance(stage, SftStage)]
    layouts = {stage.name: _layouts(material, stage) for stage in stages}
    made = _model(material, layouts[stages[0].name] if stages else ())
    for name, pieces_of in layouts.items():
        rows = [encoded(layout, made.codec, material.template.reserved) for layout in pieces_of]
        _refuse_long(name, rows, int(made.model.config.max_position_embeddings))
        rows_file(run, name).parent.mkdir(exist_ok=True)
        write_rows(rows_file(run, name), rows)
    return made


def load_sft_rows(run: Path, stage: str) -> list[SftRow]:
    """The rows `opening` wrote. Raises DataError."""
    return read_rows(rows_file(run, stage))


def rows_of_step(rows: Sequence[SftRow], step: int, count: int, seed: int) -> list[SftRow]:
    """`count` rows for one step (0 is the first): all rows once in their order, then epochs in seeded orders."""
    per_epoch = max(1, len(rows) // count)
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(rows)))
    if epoch:
        random.Random(seed_for(seed, "epoch", epoch)).shuffle(order)
    return [rows[i] for i in order[place * count : (place + 1) * count]]


def _layouts(material: Material, stage: SftStage) -> list[list[Piece]]:
    recipe = material.recipe
    feedback = make_feedback(recipe.rollout)
    specs = tools_of(recipe, SandboxClient(slots=1, preload=())).specs  # never started: nothing is run
    if stage.name in material.conversations:
        shown = [_as_shown(conversation, feedback) for conversation in material.conversations[stage.name]]
    else:
        task = require_demonstrations(task_of(recipe, stage), stage.name)
        made = task.demonstrations(stage.steps * stage.sft.batch_rows)
        shown = [from_demonstration(demo, feedback) for demo in made]
    return [_pieces(material.template, conversation, specs) for conversation in shown]


def _as_shown(conversation: Conversation, feedback: Callable[[ToolResult], str]) -> Conversation:
    """A demonstration of the run's own task shows tool results as a rollout would, cut where it would cut them; a row
    that brings its own tools is shown as it is."""
    if conversation.tools is not None:
        return conversation
    messages = (
        replace(message, content=feedback(ToolResult(call_id="", status=Status.OK, stdout=message.content)))
        if message.role is Role.TOOL
        else message
        for message in conversation.messages
    )
    return replace(conversation, messages=tuple(messages))


def _pieces(template: Template, conversation: Conversation, own: Sequence[ToolSpec]) -> list[Piece]:
    """A row that brings its own tools (`[]` for none) is a plain chat, whatever the recipe's template: its system text
    and preamble speak of problems and boxes, which would be wrong there."""
    if conversation.tools is not None:
        return list(pieces(conversation, template.chat(), conversation.tools))
    return list(pieces(conversation, template, own))


def _model(material: Material, layouts: Sequence[Sequence[Piece]]) -> Opened:
    recipe = material.recipe
    if material.pretrained:
        return Opened(model=load_model(material.pretrained.facts.folder), codec=material.pretrained.codec)
    template = template_named(recipe.rollout.template)
    codec = train_bpe(
        ("".join(piece.text for piece in layout) for layout in layouts[:TOKENIZER_ROWS]),
        vocab_size=recipe.model.vocab_size,
        markers=template.markers,
        word_merges=recipe.model.word_merges,
        atoms=(*material.task.atoms, *fixed_phrases(template, recipe.rollout.tool_name)),
    )
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


def _refuse_long(stage: str, rows: Sequence[SftRow], positions: int) -> None:
    longest = max(len(row.token_ids) for row in rows)
    if longest > positions:
        raise ConfigError(
            f"stage {stage}: the longest row has {longest} tokens and the model holds {positions}; leave such rows "
            "out, or raise model.max_positions of a model from random weights"
        )
