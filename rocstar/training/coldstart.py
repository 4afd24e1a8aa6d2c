"""What a run opens with: demonstrations as token rows, a tokenizer, a model.

A model that starts from random weights gets a tokenizer trained on its own demonstrations; it is saved beside every
checkpoint, because a tokenizer trained again from a changed generator would silently give other ids. Rows are kept in
the run folder, so a resumed run learns from the very same ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rocstar.config import Recipe, Stage
from rocstar.data.messages import load_demonstrations
from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.rows import encode_demonstration
from rocstar.dialogue.template import template_named
from rocstar.errors import ConfigError
from rocstar.learning.policy import Policy, load_model, random_model
from rocstar.runs.sftrows import read_rows, write_rows
from rocstar.sandbox.client import SandboxClient
from rocstar.training.assemble import make_feedback, make_tool, shape_of
from rocstar.training.tasks import Task
from rocstar.types import Demonstration, SftRow, seed_for

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
    demonstrations = await _demonstrations(stages[0], recipe, task, sandbox) if stages else []
    policy = _policy(recipe, task, demonstrations, sandbox)
    if stages:
        write_rows(rows_file(run), _encoded(recipe, policy.codec, demonstrations, sandbox))
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


async def _demonstrations(stage: Stage, recipe: Recipe, task: Task, sandbox: SandboxClient) -> list[Demonstration]:
    if stage.sft.rows_file:
        return load_demonstrations(Path(stage.sft.rows_file), stage.rollout.tool_name)
    count = sum(s.steps * s.sft.batch_rows for s in recipe.stage if s.kind == "sft")
    tool = make_tool(sandbox, stage.sandbox, stage.rollout.tool_name)
    return await task.demonstrations(count, tool.run)


def _policy(recipe: Recipe, task: Task, demonstrations: Sequence[Demonstration], sandbox: SandboxClient) -> Policy:
    model = recipe.model
    if model.path:
        return Policy(load_model(model.path), Codec.load(model.path), recipe.rollout.template)
    if not demonstrations:
        raise ConfigError(
            "a model of random weights needs an sft stage to get its tokenizer from; set model.path or add one"
        )
    template = template_named(recipe.rollout.template)
    codec = train_bpe(
        _texts(recipe, demonstrations[:TOKENIZER_ROWS], sandbox),
        vocab_size=model.vocab_size,
        markers=template.markers,
        word_merges=model.word_merges,
        atoms=(*task.atoms, *fixed_phrases(template, recipe.rollout.tool_name)),
    )
    weights = random_model(shape_of(model, codec.vocab_size), seed_for(recipe.run.seed, "weights"))
    return Policy(weights, codec, recipe.rollout.template)


def _texts(recipe: Recipe, demonstrations: Sequence[Demonstration], sandbox: SandboxClient) -> Iterator[str]:
    """Each demonstration as one text, as the model would see it."""
    template, feedback = template_named(recipe.rollout.template), make_feedback(recipe.rollout)
    specs = [make_tool(sandbox, recipe.sandbox, recipe.rollout.tool_name).spec]
    for demo in demonstrations:
        parts = [template.opening(demo.problem.question, specs)]
        for turn in demo.turns:
            parts += [turn.text, template.stop]
            parts += [template.reply([feedback(result) for result in turn.results])] if turn.results else []
        yield "".join(parts)


def _encoded(
    recipe: Recipe, codec: Codec, demonstrations: Sequence[Demonstration], sandbox: SandboxClient
) -> list[SftRow]:
    template, feedback = template_named(recipe.rollout.template), make_feedback(recipe.rollout)
    specs = [make_tool(sandbox, recipe.sandbox, recipe.rollout.tool_name).spec]
    rows = [
        encode_demonstration(demo, codec=codec, template=template, tools=specs, feedback=feedback)
        for demo in demonstrations
    ]
    longest = max(len(row.token_ids) for row in rows)
    if not recipe.model.path and longest > recipe.model.max_positions:
        raise ConfigError(
            f"the longest demonstration has {longest} tokens, model.max_positions is {recipe.model.max_positions}; "
            "raise it"
        )
    return rows
