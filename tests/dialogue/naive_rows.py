"""The slow, obvious twin of `rocstar.data.sft.render`: token rows laid out piece by piece exactly as a rollout lays out
its trajectory.

Worked example with one tool call (P prompt, A assistant, S stop marker, R reply):

    token_ids  P0 P1 P2 A0 A1 S  R0 R1 A2 S
    loss_mask   0  0  0  1  1 1   0  0  1 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import Template
from rocstar.protocols import TextCodec, ToolSpec
from rocstar.types import Demonstration, SftRow, ToolResult


def encode_demonstration(
    demo: Demonstration,
    *,
    codec: TextCodec,
    template: Template,
    tools: Sequence[ToolSpec],
    feedback: Callable[[ToolResult], str],
) -> SftRow:
    """One row: opening, then for each turn its text with the stop marker (learned) and the tool reply (not learned).
    Each piece is encoded on its own, because that is where a rollout's pieces meet."""
    token_ids = codec.encode(text_of(template.opening(demo.problem.question, tools)))
    loss_mask = [False] * len(token_ids)
    for turn in demo.turns:
        written = codec.encode(turn.text) + codec.encode(template.stop)
        shown = text_of(template.reply([feedback(result) for result in turn.results])) if turn.results else ""
        reply = codec.encode(shown)
        token_ids += written + reply
        loss_mask += [True] * len(written) + [False] * len(reply)
    return SftRow(token_ids=tuple(token_ids), loss_mask=tuple(loss_mask))
