"""Hugging Face datasets as sources, offline: folders of plain files, and folders that `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

import pytest

from rocstar.data.pool.build import build_pool
from rocstar.data.pool.config import PoolConfig
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from tests.files import jsonl

ROWS = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(5)]
CARD = """---
configs:
- config_name: easy
  data_files:
  - split: train
    path: easy.jsonl
- config_name: hard
  data_files:
  - split: test
    path: hard.jsonl
---
"""


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without network, with caches of the test's own; imported only here, because it takes seconds."""
    datasets = pytest.importorskip("datasets", reason="needs the datasets library")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return datasets


def published(folder: Path) -> Path:
    """A dataset of two configs as it lies on the hub, without a script."""
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    jsonl(folder / "easy.jsonl", *ROWS)
    jsonl(folder / "hard.jsonl", ROWS[0])
    return folder


def test_a_split_of_a_config_is_streamed_row_by_row(tmp_path: Path) -> None:
    folder = published(tmp_path / "set")
    assert list(read_rows(f"hf:{folder}:easy@train")) == list(enumerate(ROWS, start=1))
    assert list(read_rows(f"hf:{folder}:hard@test")) == [(1, ROWS[0])]
    assert not list((tmp_path / "cache").rglob("*.arrow"))  # nothing was copied to disk first


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (":easy@dev", r"Bad split: dev\. Available splits: \['train'\]"),
        ("@train", "available configs: .'easy', 'hard'."),
        (":none@train", "none"),
    ],
)
def test_a_config_or_split_that_is_not_there_is_one_sentence(tmp_path: Path, config: str, told: str) -> None:
    folder = published(tmp_path / "set")
    with pytest.raises(DataError, match=told) as caught:
        list(read_rows(f"hf:{folder}{config}"))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["hf:nobody/nothing@train", "hf:/no/such/folder@train"])
def test_a_dataset_that_cannot_be_found_is_named(name: str) -> None:
    with pytest.raises(DataError, match="cannot be read") as caught:
        list(read_rows(name))
    assert str(caught.value).startswith(name)


def test_a_saved_dataset_is_read_and_one_of_several_splits_is_asked_for(datasets: Any, tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    assert list(read_rows(tmp_path / "one")) == list(enumerate(ROWS, start=1))
    assert list(read_rows(tmp_path / "both" / "test")) == list(enumerate(ROWS, start=1))
    with pytest.raises(DataError, match="one of train, test"):
        list(read_rows(tmp_path / "both"))
    (tmp_path / "one" / "state.json").unlink()
    with pytest.raises(DataError, match="not a whole saved dataset"):
        list(read_rows(tmp_path / "one"))


def test_a_pool_is_built_from_a_dataset(tmp_path: Path) -> None:
    folder = published(tmp_path / "set")
    source = {"name": "s", "path": f"hf:{folder}:easy@train"}
    config = PoolConfig.model_validate({"data": "/nowhere", "out": str(tmp_path / "out"), "source": [source]})
    sheet = build_pool(config, lambda gold, response: (True, "scripted"), lambda sentence: None)
    assert sheet.total("kept") == len(ROWS)
    assert sheet.inputs[0]["sha256"] is None
