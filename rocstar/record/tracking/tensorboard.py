"""TensorBoard: event files in `tracking/tensorboard` of the run, which `tensorboard --logdir runs` finds."""

from __future__ import annotations

import time

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rocstar.record.folder import RunFolder


class TensorBoardSink:
    """A file of its own for each start; TensorBoard joins them."""

    def __init__(self, folder: RunFolder) -> None:
        self._writer = EventFileWriter(str(folder.path / "tracking" / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()
