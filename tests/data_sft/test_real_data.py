"""The published set: every row is built or refused, and built rows read back under both templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rocstar.data.sft.format import conversation_of
from rocstar.data.sft.render import pieces
from rocstar.dialogue.calls import HERMES
from rocstar.dialogue.template import CHAT, PAPER
from tests.data_sft.support import built, lines, real


def test_a_published_set_is_built_and_reads_back(tmp_path: Path) -> None:
    file = str(real("glaive_toolcall", "en_demo.jsonl.gz"))
    source: dict[str, Any] = {"name": "sharegpt", "layout": "sharegpt", "files": [file]}
    (counted,) = built(tmp_path / "out", source)["sources"]
    assert counted["built"] + sum(counted["refused"].values()) == counted["rows_read"]
    assert counted["built"] > 0.8 * counted["rows_read"] and counted["calls_validated"] > 100
    for row in lines(tmp_path / "out" / "rows.jsonl"):
        conversation = conversation_of(row)
        meant = [call for message in conversation.messages for call in message.calls]
        for template in (PAPER, CHAT):
            learned = [
                piece.text for piece in pieces(conversation, template, conversation.tools or ()) if piece.learned
            ]
            found = [call for text in learned for call in HERMES.parse(text)]
            assert [(call.tool, call.arguments) for call in found] == meant
