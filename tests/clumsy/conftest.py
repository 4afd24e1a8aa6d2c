"""The model of the workplace, and what must not happen: a start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clumsy.workplace import make
from tests.evaluation.conftest import model_folder

__all__ = ["model_folder"]


class Started(Exception):
    """What was wrong was not found before something started."""


def started(*_: Any, **__: Any) -> Any:
    raise Started


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return make(tmp_path_factory.mktemp("sound") / "w", model_folder)


@pytest.fixture
def place(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, for a test to spoil."""
    monkeypatch.setattr("rocstar.cli.main.launch", started)
    monkeypatch.setattr("rocstar.evaluation.command.opened_machines", started)
    monkeypatch.setattr("rocstar.evaluation.subject.started_sandbox", started)
    place = tmp_path / "w"
    shutil.copytree(sound, place)
    monkeypatch.chdir(place)
    return place
