"""Weights & Biases. Project, key and mode are its own settings (WANDB_PROJECT, WANDB_API_KEY, WANDB_MODE ...)."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import wandb

from rocstar.record.folder import RunFolder, read_json


class WandbSink:
    """One W&B run for each run of ours, whatever is resumed."""

    def __init__(self, folder: RunFolder) -> None:
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rocstar"),
            id=run_id(folder),
            name=folder.name,
            resume="allow",
            config=read_json(folder.resolved),
            dir=str(folder.path / "tracking"),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def run_id(folder: RunFolder) -> str:
    """The same for a run wherever its folder is moved to."""
    identity = folder.identity
    return hashlib.sha256(f"{identity['name']} {identity['started']}".encode()).hexdigest()[:16]
