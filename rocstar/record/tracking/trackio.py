"""trackio: local first; project and space are trackio's own settings (TRACKIO_DIR, TRACKIO_SPACE_ID ...)."""

from __future__ import annotations

import os
from typing import Any

import trackio

from rocstar.record.folder import RunFolder, read_json


class TrackioSink:
    """One trackio run for each run of ours, whatever is resumed."""

    def __init__(self, folder: RunFolder) -> None:
        project = os.environ.get("TRACKIO_PROJECT", "rocstar")
        self._run: Any = trackio.init(
            project=project, name=folder.name, config=read_json(folder.resolved), resume="allow", embed=False
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        trackio.log(metrics, step=step)

    def close(self) -> None:
        trackio.finish()
