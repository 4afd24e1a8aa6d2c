"""The model of the workplace, and what must not happen: a start."""

from __future__ import annotations

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


@pytest.fixture
def place(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("rocstar.cli.launch.run", started)
    monkeypatch.setattr("rocstar.evaluation.command.opened_machines", started)
    monkeypatch.setattr("rocstar.serving.agent.started_sandbox", started)
    made = make(tmp_path / "w", model_folder)
    monkeypatch.chdir(made)
    return made
