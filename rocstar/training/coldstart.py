"""What a run opens with: demonstrations as token rows, a tokenizer, a model.

Demonstrations of the run's own task and rows from a file take one path: both are conversations (`rocstar.data.sft`).
A model that starts from random weights gets a tokenizer trained on its own demonstrations; it is saved beside every
checkpoint, because a tokenizer trained again from a changed generator would silently give other ids. Rows are kept in
the run folder, so a resumed run learns from the very same ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rocstar.config import Recipe, Stage
from rocstar.data.sft.format import Conversation, Role
from rocstar.data.sft.loading import load_conversations
from rocstar.data.sft.render import Piece, encoded, from_demonstration, pieces
from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import CHAT
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError
from rocstar.learning.policy import Policy, load_model, random_model
from rocstar.runs.sftrows import read_rows, write_rows
from rocstar.sandbox.client import SandboxClient
from rocstar.training.assemble import make_feedback, make_tool, shape_of, tool_spec
from rocstar.training.tasks import Task
from rocstar.types import SftRow, Status, ToolResult, seed_for

TOKENIZER_ROWS = 3000  # demonstrations a tokenizer is trained on; more change nothing that matters


def rows_file(run: Path) -> Path:
    return run / "sft_rows.parquet"


def opened_policy(recipe: Recipe, checkpoint: Path) -> Policy:
    """The policy of a checkpoint."""
    model = checkpoint / "model"
    return Policy(load_model(model), Codec.load(model), recipe.rollout.template)


async def opening(recipe: Recipe, task: Task, sandbox: SandboxClient, run: Path) -> Policy:
    """A fresh run's policy; writes the SFT rows if the recipe has an SFT stage. Raises ConfigError, DataError."""
    stages = [stage for stage in recipe.stage if stage.kind == "sft"]
    conversations = await _conversations(stages[0], recipe, task, sandbox) if stages else []
    layouts = [_pieces(recipe, conversation, sandbox) for conversation in conversations]
    policy = _policy(recipe, task, layouts)
    if stages:
        write_rows(rows_file(run), _rows(recipe, policy.codec, layouts))
    return policy


def load_sft_rows(run: Path) -> list[SftRow]:
    """The rows `opening` wrote. Raises DataError."""
    return read_rows(rows_file(run))


def rows_of_step(rows: Sequence[SftRow], step: int, count: int, seed: int) -> list[SftRow]:
    """`count` rows for one step (0 is the first): all rows once in their order, then epochs in seeded orders."""
    per_epoch = max(1, len(rows) // count)
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(rows)))
    if epoch:
        random.Random(seed_for(seed, "epoch", epoch)).shuffle(order)
    return [rows[i] for i in order[place * count : (place + 1) * count]]


async def _conversations(stage: Stage, recipe: Recipe, task: Task, sandbox: SandboxClient) -> list[Conversation]:
    feedback = make_feedback(recipe.rollout)
    if stage.sft.rows_file:
        loaded = load_conversations(Path(stage.sft.rows_file), stage.rollout.tool_name)
        return [_as_shown(conversation, feedback) for conversation in loaded]
    count = sum(s.steps * s.sft.batch_rows for s in recipe.stage if s.kind == "sft")
    tool = make_tool(sandbox, stage.sandbox, stage.rollout.tool_name)
    return [from_demonstration(demo, feedback) for demo in await task.demonstrations(count, tool.run)]


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


def _pieces(recipe: Recipe, conversation: Conversation, sandbox: SandboxClient) -> list[Piece]:
    """A row that brings its own tools (`[]` for none) is a plain chat, whatever the recipe's template: its system text
    and preamble speak of problems and boxes, which would be wrong there."""
    if conversation.tools is not None:
        return list(pieces(conversation, CHAT, conversation.tools))
    own = tool_spec(sandbox, recipe.sandbox, recipe.rollout.tool_name)
    return list(pieces(conversation, template_named(recipe.rollout.template), [own]))


def _policy(recipe: Recipe, task: Task, layouts: Sequence[Sequence[Piece]]) -> Policy:
    model = recipe.model
    if model.path:
        return Policy(load_model(model.path), Codec.load(model.path), recipe.rollout.template)
    if not layouts:
        raise ConfigError(
            "a model of random weights needs an sft stage to get its tokenizer from; set model.path or add one"
        )
    template = template_named(recipe.rollout.template)
    codec = train_bpe(
        ("".join(piece.text for piece in layout) for layout in layouts[:TOKENIZER_ROWS]),
        vocab_size=model.vocab_size,
        markers=template.markers,
        word_merges=model.word_merges,
        atoms=(*task.atoms, *fixed_phrases(template, recipe.rollout.tool_name)),
    )
    weights = random_model(shape_of(model, codec.vocab_size), seed_for(recipe.run.seed, "weights"))
    return Policy(weights, codec, recipe.rollout.template)


def _rows(recipe: Recipe, codec: Codec, layouts: Sequence[Sequence[Piece]]) -> list[SftRow]:
    rows = [encoded(layout, codec, CHAT.reserved) for layout in layouts]
    longest = max(len(row.token_ids) for row in rows)
    if not recipe.model.path and longest > recipe.model.max_positions:
        raise ConfigError(
            f"the longest demonstration has {longest} tokens, model.max_positions is {recipe.model.max_positions}; "
            "raise it"
        )
    return rows
