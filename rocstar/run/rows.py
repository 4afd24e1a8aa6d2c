"""Demonstrations of a task or a file as token rows, laid out as a rollout would. They are kept in the run folder, so
that a resumed run learns from the same ones. Loads no torch.

Demonstrations of a task and rows from a file take one path: both are conversations (`rocstar.data.sft`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from rocstar.config.sections import SftStage, Stage
from rocstar.data.sft.format import Chat, Role
from rocstar.data.sft.render import Piece, encoded, pieces
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import Template
from rocstar.errors import ConfigError, DataError
from rocstar.protocols import ToolSpec
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import read_table, write_parquet
from rocstar.support.screen import plural
from rocstar.types import SftRow, Status, ToolResult, seed_for

Layout = Sequence[Piece]
"""A conversation in pieces, before tokenization."""


def layouts_of(shown: Iterable[Chat], template: Template, specs: Sequence[ToolSpec]) -> list[Layout]:
    """Demonstrations of an SFT stage. specs: the tools of the run. Raises DataError for one that the template
    refuses."""
    # A row that brings its own tools (`[]` for none) is a plain chat, whatever the recipe's template: its system text
    # and preamble mention problems and boxes, which would be wrong there.
    layouts: list[Layout] = []
    for one in shown:
        try:
            laid = pieces(one, template, specs) if one.tools is None else pieces(one, template.chat(), one.tools)
            layouts.append(list(laid))
        except ConfigError as refusal:
            begins = one.messages[0].content[:60]
            raise DataError(f"demonstration {len(layouts) + 1}, {begins!r}: {refusal}") from None
    return layouts


def rows_of_layouts(stage: str, layouts: Sequence[Layout], codec: Codec, template: Template, most: int) -> list[SftRow]:
    """Layouts as tokens. Raises ConfigError where a row is longer than the `most` tokens that the model holds."""
    rows = [encoded(layout, codec, template.reserved) for layout in layouts]
    longest = max((len(row.token_ids) for row in rows), default=0)
    if longest > most:
        raise ConfigError(
            f"stage {stage}: the longest row has {longest} tokens and the model holds {most}; leave such rows out, or "
            "raise model.max_positions of a model from random weights"
        )
    return rows


def load_sft_rows(run: Path, stage: str) -> list[SftRow]:
    """The rows that `write_sft_rows` wrote when the run opened. Raises DataError if the file is missing or invalid."""
    import pyarrow

    path = RunFolder(run).sft_rows(stage)
    try:
        table = read_table(path).to_pydict()
        pairs = zip(table["token_ids"], table["loss_mask"], strict=True)
    except (OSError, KeyError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path} does not hold the run's SFT rows ({error}); start a new run") from None
    return [SftRow(token_ids=tuple(ids), loss_mask=tuple(mask)) for ids, mask in pairs]


def write_sft_rows(path: Path, rows: Sequence[SftRow]) -> None:
    """Columns token_ids (list of int32) and loss_mask (list of bool), rows in the order of their source. Raises
    OSError."""
    import pyarrow

    path.parent.mkdir(exist_ok=True)
    kinds = {"token_ids": pyarrow.int32(), "loss_mask": pyarrow.bool_()}
    schema = pyarrow.schema([(name, pyarrow.list_(kind)) for name, kind in kinds.items()])
    columns = {name: [getattr(row, name) for row in rows] for name in kinds}
    write_parquet(path, pyarrow.Table.from_pydict(columns, schema))


def with_steps(stages: Sequence[Stage], rows: Mapping[str, int]) -> tuple[list[Stage], list[str]]:
    """The stages with epochs converted to steps, and a description of these. rows: numbers by SFT stage, where known.
    The last step is filled from the next epoch, so no row is used less often than requested. Raises ConfigError for a
    warm-up that is longer."""
    notes, counted = [], list[Stage]()
    for stage in stages:
        if isinstance(stage, SftStage) and stage.epochs and stage.name in rows:
            there, batch = rows[stage.name], stage.sft.batch_rows
            steps = ceil(stage.epochs * there / min(batch, there))
            notes.append(
                f"stage {stage.name}: epochs {stage.epochs:g} of {plural(there, 'row')}, {batch} a step, are "
                f"{plural(steps, 'step')}"
            )
            if stage.sft.warmup_steps > steps:
                raise ConfigError(
                    f"{notes[-1]}, fewer than its sft.warmup_steps {stage.sft.warmup_steps}; lower that or raise epochs"
                )
            stage = stage.model_copy(update={"steps": steps, "epochs": 0})
        counted.append(stage)
    return counted, notes


def rows_of_step(rows: Sequence[SftRow], step: int, count: int, seed: int) -> list[SftRow]:
    """`count` rows for one step (0 is the first); all of them if there are fewer. Epochs follow one another, each with
    every row once, in an order that follows from (seed, epoch); a step may take the end of one and the beginning of the
    next. Source: ours; the paper says 3 epochs and no order."""
    count = min(count, len(rows))
    epoch, place = divmod(step * count, len(rows))
    order = _order(len(rows), seed, epoch)[place : place + count]
    if len(order) < count:
        order += _order(len(rows), seed, epoch + 1)[: count - len(order)]
    return [rows[i] for i in order]


def _order(rows: int, seed: int, epoch: int) -> list[int]:
    """All rows, shuffled by numpy's frozen generator: every step needs it, and it takes a tenth of the time of Python's
    own."""
    import numpy

    order: list[int] = numpy.random.RandomState(seed_for(seed, "epoch", epoch) % 2**32).permutation(rows).tolist()
    return order


def as_shown(conversation: Chat, feedback: Callable[[ToolResult], str]) -> Chat:
    """A demonstration of the run's own task with tool results formatted and cut as in a rollout; a row that brings its
    own tools is unchanged."""
    if conversation.tools is not None:
        return conversation
    messages = (
        replace(message, content=feedback(ToolResult(call_id="", status=Status.OK, stdout=message.content)))
        if message.role is Role.TOOL
        else message
        for message in conversation.messages
    )
    return replace(conversation, messages=tuple(messages))
