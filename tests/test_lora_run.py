"""Whole runs that train adapters: killed and resumed, asked, and refused before they start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_run import COLD_STEPS, Command, begun, killed_run, last_checkpoint, metrics, workplace

pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow
SETTINGS = (
    *("model.lora_rank=4", "sft.adamw_learning_rate=1e-2", "learning.learning_rate=1e-3"),
    *("stage.stage1.steps=3", "stage.stage3.steps=0", "evaluate.problems=0"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return begun(tmp_path_factory.getbasetemp())


def test_a_run_of_adapters_is_killed_resumed_and_asked(
    base: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = workplace(tmp_path / "whole")
    command = ("train", "tiny.toml", *base, *SETTINGS)
    ended = Command.start(whole, *command).wait()
    assert ended.code == 0, ended.told
    killed = killed_run(tmp_path / "killed", COLD_STEPS + 1, *command)
    resumed = Command.start(killed, "train", "--resume", "tiny").wait()
    assert resumed.code == 0, resumed.told
    assert metrics(killed) == metrics(whole)
    ends = [last_checkpoint(folder) / "model" for folder in (whole, killed)]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert ends[0].joinpath(file).read_bytes() == ends[1].joinpath(file).read_bytes()
    # On a busy machine a step is too short for a checkpoint of its own (run.checkpoint_cost).
    *_, adapter_alone, last = sorted(int(each.name[5:]) for each in ends[0].parents[1].glob("step=*"))
    assert COLD_STEPS < adapter_alone < last == COLD_STEPS + 3
    assert not (ends[0].parents[1] / f"step={adapter_alone:06d}" / "model" / "model.safetensors").exists()
    assert (ends[0] / "model.safetensors").exists()
    said = Command.start(whole, "eval", f"tiny@{adapter_alone}", "--data", "test.jsonl", "--json").wait()
    assert said.code == 0 and json.loads(said.out)["problems"] == 2, said.told


def test_a_base_that_was_replaced_before_the_first_checkpoint_is_noticed(base: tuple[str, ...], tmp_path: Path) -> None:
    """The run has evaluated the old one already (`before`); it is killed as it begins to learn."""
    folder = workplace(tmp_path / "w")
    model = shutil.copytree(base[0].removeprefix("model.path="), folder / "model")
    alone = ("stage.cold.steps=0", "stage.stage1.steps=1", "stage.stage3.steps=0", "model.lora_rank=4")
    ended = Command.start(folder, "train", "tiny.toml", f"model.path={model}", *base[2:], *alone).wait()
    assert ended.code == 0, ended.told
    run = folder / "runs" / "tiny"
    (run / "summary.json").unlink(), shutil.rmtree(run / "checkpoints" / "step=000001")
    weights, text = model / "model.safetensors", model / "tokenizer_config.json"
    for file, part in ((weights, "weights"), (text, "tokenizer and config")):
        kept = file.read_bytes()
        file.write_bytes(kept[:-1] + b" " if file is text else kept[:-4] + b"\0\0\0\0")
        refused = Command.start(folder, "train", "--resume", "tiny").wait()
        assert refused.code == 2 and f"({part} of model.path)" in refused.told, refused.told
        file.write_bytes(kept)
