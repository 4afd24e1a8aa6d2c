"""A folder in which everything is in order: a recipe, its files, a model, a run. Each clumsy start spoils one thing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.files import jsonl
from tests.record.examples import run
from tests.tiny_run import RECIPE, workplace

Spoil = Callable[[Path], Any]

BAD = ("bad.toml",)
TINY = ("tiny.toml",)
PRETRAINED = ("pretrained.toml",)
OF_RL = RECIPE[: RECIPE.index("[sft]")] + RECIPE[RECIPE.index("[rollout]") :]  # [sft] alone is refused
RL_ONLY = OF_RL[: OF_RL.index("[[stage]]")] + OF_RL[OF_RL.index('[[stage]]\nname = "stage1"') :]


def make(folder: Path, model: Path) -> Path:
    """`tiny.toml` starts from random weights, `pretrained.toml` from `model/`, `runs/sound` is a run without a
    checkpoint. `model` is copied."""
    place = workplace(folder)
    (place / "model").mkdir()
    for file in model.iterdir():
        (place / "model" / file.name).write_bytes(file.read_bytes())
    (place / "pretrained.toml").write_text('extends = "tiny.toml"\n[model]\npath = "model"\n')
    (place / "pool.toml").write_text('data = "."\nout = "pool"\n[[source]]\nname = "mine"\npath = "train.jsonl"\n')
    (place / "mix.toml").write_text('[[source]]\nname = "mine"\nlayout = "messages"\nfiles = ["rows.jsonl"]\n')
    run(place / "runs", "sound")
    return place


def text(name: str, content: str | bytes) -> Spoil:
    """Write a file."""

    def spoil(place: Path) -> None:
        raw = content if isinstance(content, bytes) else content.encode()
        (place / name).write_bytes(raw)

    return spoil


def recipe(more: str) -> Spoil:
    """`bad.toml`, which extends the sound one."""
    return text("bad.toml", f'extends = "tiny.toml"\n{more}')


def replaced(old: str, new: str) -> Spoil:
    """`bad.toml` is the sound recipe with one change."""
    assert old in RECIPE
    return text("bad.toml", RECIPE.replace(old, new))


def rows(name: str, *lines: dict[str, Any]) -> Spoil:
    return lambda place: jsonl(place / name, *lines)


def folder(name: str) -> Spoil:
    """A folder in place of a file, or a new one."""

    def spoil(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).mkdir(parents=True)

    return spoil


def without(name: str) -> Spoil:
    return lambda place: (place / name).unlink()


def model_config(**changes: Any) -> Spoil:
    """Other facts in the model's config.json; None leaves one out."""

    def spoil(place: Path) -> None:
        path = place / "model" / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return spoil


def cut(size: int) -> Spoil:
    """The model's weights end after so many bytes."""
    return lambda place: os.truncate(place / "model" / "model.safetensors", size)


def in_integers() -> Spoil:
    """The header of the model's weights names integers of the size that they have."""

    def spoil(place: Path) -> None:
        path = place / "model" / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))

    return spoil


def sharded() -> Spoil:
    """The model's weights are an index beside a shard that is not there."""

    def spoil(place: Path) -> None:
        (place / "model" / "model.safetensors").rename(place / "model" / "model-2.safetensors")
        index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
        (place / "model" / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    name: str
    command: str
    """As it is typed after `rocstar`."""
    words: str
    """Parts of the sentence, with ` ... ` between them."""
    spoil: Spoil


def given(command: str, words: str) -> Start:
    """What is typed is wrong."""
    return Start(name=command, command=command, words=words, spoil=lambda place: None)


def spoilt(name: str, command: str, words: str, spoil: Spoil) -> Start:
    """A file is wrong."""
    return Start(name=name, command=command, words=words, spoil=spoil)
