"""A built file is what a run's sft stage learns from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rocstar.config.recipe import recipe_of
from rocstar.record.folder import RunFolder
from rocstar.run.material import read_material
from rocstar.run.opening import opening
from rocstar.run.rows import load_sft_rows
from tests.data_sft.support import WEATHER, built, calls, result, says, user
from tests.files import jsonl


@pytest.mark.parametrize("template", ["compact", "paper"])
async def test_a_run_learns_the_rows_of_a_build_as_plain_chats_with_their_own_tools(
    tmp_path: Path, template: str
) -> None:
    long_result = "rain " * 99
    row = {"messages": [user("Paris?"), calls(), result(long_result), says("It rains.")], "tools": [WEATHER]}
    source = {"name": "a", "layout": "messages", "files": [str(jsonl(tmp_path / "in.jsonl", row))]}

    await asyncio.to_thread(built, tmp_path / "out", source)
    size = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "intermediate_size": 32, "vocab_size": 300}
    base = {"model": {**size, "max_positions": 3000}, "rollout": {"template": template}, "evaluate": {"problems": 0}}
    cold = {"name": "cold", "kind": "sft", "steps": 1, "sft": {"rows_file": str(tmp_path / "out" / "rows.jsonl")}}
    _, codec = opening(read_material(recipe_of(base, [cold])), RunFolder(tmp_path))
    (learned_row,) = load_sft_rows(tmp_path, "cold")
    text = codec.decode(learned_row.token_ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools") and '"get_weather"' in text
    assert long_result in text and "boxed" not in text and "<reason>" not in text
    marked = zip(learned_row.token_ids, learned_row.loss_mask, strict=True)
    assert codec.decode([token for token, on in marked if on]) == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
        "It rains.<|im_end|>"
    )
