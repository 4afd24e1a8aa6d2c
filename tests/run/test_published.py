"""Weights for engines in other processes: where they lie, how many are kept, and who cleans up after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rocstar.config.sections import ModelSection
from rocstar.dialogue.templates import template_named
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy
from rocstar.run import published
from rocstar.run.published import PublishedWeights
from tests.engines.models import qwen
from tests.forks import once_it_speaks
from tests.tiny_run import PYTHON


class Codec:
    """As much of one as a policy reads."""

    vocab_size = 61


def policy(seed: int = 0) -> Policy:
    nothing: Any = None
    codec: Any = Codec()
    return Policy(qwen(seed), codec, nothing)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_published_weights_are_a_model_folder_in_memory(tmp_path: Path, memory: Path) -> None:
    made, kept = policy(), PublishedWeights(tmp_path / "disk", memory)
    made.version = 7
    weights = kept.publish(made)
    assert weights.version == 7 and weights.folder is not None and memory in Path(weights.folder).parents
    loaded = AutoModelForCausalLM.from_pretrained(weights.folder)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in qwen(0).state_dict().items())
    assert "lm_head.weight" not in load_file(f"{weights.folder}/model.safetensors"), "tied tensors stand there once"
    assert not (tmp_path / "disk").exists()
    kept.close()
    assert not list(memory.iterdir())


def test_the_newest_two_versions_are_kept(tmp_path: Path, memory: Path) -> None:
    made, kept = policy(), PublishedWeights(tmp_path / "disk", memory)
    folders = [Path(kept.publish(made).folder or "") for _ in range(4)]
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    kept.close()
    assert not any(folder.exists() for folder in folders)


def test_engines_start_on_a_whole_model_and_get_adapters_alone_after_that(tmp_path: Path, memory: Path) -> None:
    pytest.importorskip("peft")
    qwen(0).save_pretrained(tmp_path / "base")
    codec: Any = Codec()
    adapts, template = ModelSection(lora_rank=2), template_named("compact")
    made = Policy(load_model(tmp_path / "base"), codec, template, adapts)
    kept = PublishedWeights(tmp_path / "disk", memory, merged=False)
    first, second = ({file.name for file in Path(kept.publish(made).folder or "").iterdir()} for _ in range(2))
    kept.close()
    assert first == {"config.json", "model.safetensors"}
    assert second == {"config.json", "adapter_config.json", "adapter_model.safetensors"}


def test_what_memory_has_no_room_for_lies_on_the_disk(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "host_bytes", lambda: 1000)
    kept = PublishedWeights(tmp_path / "disk", memory)
    weights = kept.publish(policy())
    assert Path(weights.folder or "").parent == tmp_path / "disk"
    kept.close()
    assert not list((tmp_path / "disk").iterdir())
    monkeypatch.undo()
    kept = PublishedWeights(tmp_path / "disk", Path("/proc"))  # in which nobody may make a folder
    assert Path(kept.publish(policy()).folder or "").parent == tmp_path / "disk"
    kept.close()


HOLDER = """
import sys, time
from pathlib import Path
from rocstar.run.published import PublishedWeights
kept = PublishedWeights(Path(sys.argv[1]), Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_left_in_memory_is_removed_by_the_next_and_a_living_runs_is_not(
    tmp_path: Path, memory: Path
) -> None:
    other, said = once_it_speaks(PYTHON, "-c", HOLDER, str(memory), folder=tmp_path)
    assert said == "held\n"
    (folder,) = memory.iterdir()
    PublishedWeights(tmp_path / "disk", memory).close()
    assert folder.is_dir()
    other.kill()
    other.join()
    PublishedWeights(tmp_path / "disk", memory).close()
    assert not list(memory.iterdir())
