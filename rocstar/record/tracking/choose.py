"""Trackers by name. Each is a library of its own, which a person installs, and is loaded when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.record.tracking.follow import Sink

SINKS = {"tensorboard": "TensorBoardSink", "wandb": "WandbSink", "trackio": "TrackioSink", "mlflow": "MlflowSink"}
"""Name of a tracker, of its library and of its module here -> its class."""


def refuse_absent(names: Sequence[str]) -> None:
    """Raises ConfigError for the first tracker that is unknown or whose library is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"there is no tracker {name!r}; there are {', '.join(SINKS)}")
        if find_spec(name) is None:
            raise ConfigError(f"tracker {name} needs its library, which is not installed: pip install {name}")


def open_sink(name: str, folder: RunFolder) -> Sink:
    """Raises ConfigError, and what the library raises where it can't begin."""
    refuse_absent([name])
    sink: Sink = getattr(import_module(f"rocstar.record.tracking.{name}"), SINKS[name])(folder)
    return sink
