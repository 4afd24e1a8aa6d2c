"""Which demonstrations a step learns from, and what a run opens with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.config.recipe import recipe_of
from rocstar.errors import ConfigError
from rocstar.learning.policy import Policy
from rocstar.record.folder import RunFolder
from rocstar.run.checkpoints import opened
from rocstar.run.material import Material, read_material
from rocstar.run.opening import opening, slow_dtype
from rocstar.run.rows import load_sft_rows, rows_of_step
from rocstar.types import SftRow


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 3))
def test_every_epoch_shows_every_row_once_in_an_order_of_its_own(there: int, count: int, seed: int) -> None:
    """Also in the first epoch, and its last rows where they do not fill a step."""
    rows = [SftRow(token_ids=(n,), loss_mask=(True,)) for n in range(there)]
    shown = [row.token_ids[0] for step in range(4 * there) for row in rows_of_step(rows, step, count, seed)]
    assert len(shown) == 4 * there * min(count, there)
    epochs = [shown[begin : begin + there] for begin in range(0, 4 * there, there)]
    assert all(sorted(epoch) == list(range(there)) for epoch in epochs)
    if there > 8:  # an order comes twice once in 362,880 times
        assert list(range(there)) not in epochs and epochs[0] != epochs[1]
    assert (
        shown[:there]
        == [row.token_ids[0] for step in range(there) for row in rows_of_step(rows, step, count, seed)][:there]
    )


def test_a_file_of_one_kind_and_then_another_is_learnt_mixed() -> None:
    rows = [SftRow(token_ids=(n // 1000,), loss_mask=(True,)) for n in range(2000)]
    shares = [sum(row.token_ids[0] for row in rows_of_step(rows, step, 128, 0)) / 128 for step in range(15)]
    assert all(0.3 < share < 0.7 for share in shares)  # 0.5 give or take 0.044
    assert {id(row) for step in range(16) for row in rows_of_step(rows, step, 128, 0)} == set(map(id, rows))


def messages(path: Path) -> str:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": {"code": "print(1)"}}}]}
    rows = [
        [
            {"role": "user", "content": f"What is {n}?"},
            call,
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": f"<answer>\\boxed{{{n}}}</answer>"},
        ]
        for n in range(5)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def material(folder: Path, **model: Any) -> Material:
    """Of a recipe whose cold start comes from a file, with a small model."""
    size = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "intermediate_size": 32, "vocab_size": 300, **model}
    base = {"model": size, "rollout": {"template": "compact", "max_response_tokens": 15}, "evaluate": {"problems": 0}}
    cold = {"name": "cold", "kind": "sft", "steps": 1, "sft": {"rows_file": messages(folder / "rows.jsonl")}}
    return read_material(recipe_of(base, [cold]))


def test_a_run_opens_with_a_tokenizer_of_its_own_demonstrations(tmp_path: Path) -> None:
    made = material(tmp_path)
    model, codec = opening(made, RunFolder(tmp_path))
    rows = load_sft_rows(tmp_path, "cold")
    assert len(rows) == 5
    text = codec.decode(rows[3].token_ids)
    assert text.startswith("<|im_start|>user\nWhat is 3?<|im_end|>") and text.endswith("{3}</answer><|im_end|>")
    learned = codec.decode([t for t, m in zip(rows[3].token_ids, rows[3].loss_mask, strict=True) if m])
    assert "What is 3?" not in learned and "tool_response" not in learned and "print(1)" in learned
    Policy(model, codec, made.template).save(tmp_path / "model")
    assert opened(tmp_path)[1].encode(text) == list(rows[3].token_ids)


def test_demonstrations_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the longest row has \d+ tokens and the model holds 20"):
        opening(material(tmp_path, max_positions=20), RunFolder(tmp_path))


def test_each_sft_stage_learns_from_rows_of_its_own(tmp_path: Path) -> None:
    first = material(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "rows.jsonl").read_text().splitlines()[0] + "\n")
    stages = [stage.model_dump() for stage in first.recipe.stage]
    stages.append({**stages[0], "name": "second", "sft": {**stages[0]["sft"], "rows_file": str(other)}})
    base = first.recipe.model_dump(exclude={"stage"})
    opening(read_material(recipe_of(base, stages)), RunFolder(tmp_path))
    assert [len(load_sft_rows(tmp_path, name)) for name in ("cold", "second")] == [5, 1]


def test_bf16_on_a_cpu_without_its_products_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.run.opening.cpu_multiplies_bf16", lambda: False)
    assert 'set model.dtype to "float32"' in slow_dtype({"device": "cpu", "dtype": "bfloat16"})
    assert not slow_dtype({"device": "cpu", "dtype": "float32"}) + slow_dtype({"device": "cuda", "dtype": "bfloat16"})
    monkeypatch.setattr("rocstar.run.opening.cpu_multiplies_bf16", lambda: True)
    assert not slow_dtype({"device": "cpu", "dtype": "bfloat16"})
