"""Trackers beside a run: metrics sent to TensorBoard, W&B, trackio or MLflow by a process that only reads the run's
folder, so it can neither slow the run nor fail it.

Process: `rocstar runs track RUN --to NAME --follow`, one for each tracker, started by the run's own. Its standard input
is a pipe that carries no data: when the run's process closes it or dies, no more steps will come. Its output goes to
`logs/track-NAME-1.txt`. A resumed run rewrites the steps after its checkpoint, with the same values; steps already sent
are skipped.

A new tracker is a function in SINKS. The user installs its library, which is loaded when the sink is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from rocstar.config.tree import flat
from rocstar.errors import ConfigError
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.journal import Tail, numbers_in

POLL_SECONDS = 1.0
LAST_SECONDS = 20.0  # for all trackers to send the last steps; then the run ends without them
PARAMETER_CHARACTERS = 500  # of a value, which MLflow refuses when longer


Log = Callable[[int, dict[str, float]], None]
"""Sends the numbers of one step, by name. Errors of the library pass through."""


def follow(folder: RunFolder, name: str, log: Log, wait: Callable[[float], bool]) -> int:
    """Send all existing steps, then new ones, until `wait` reports the end; returns the last step.

    wait: sleeps up to so many seconds, and returns whether the run continues. The last step sent is stored in
    `tracking/<name>.json`, so that a second start continues from there. Raises OSError."""
    place = state_file(folder, name)
    place.parent.mkdir(exist_ok=True)
    sent: int = read_json(place)["step"] if place.exists() else 0
    tail = Tail(folder.metrics)
    while True:
        going_on = wait(POLL_SECONDS)
        _, lines = tail.fresh()
        for row in map(json.loads, lines):
            if row["step"] > sent:
                sent = row.pop("step")
                log(sent, numbers_in(row))
                write_json(place, {"step": sent})  # now: a later row may fail, or block until the tracker is ended
        if not going_on:
            return sent


def state_file(folder: RunFolder, name: str) -> Path:
    """The file with the last step that a tracker sent."""
    return folder.path / "tracking" / f"{name}.json"


@contextmanager
def tracked(folder: RunFolder, names: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Follow a run with these trackers. Reports those that failed or were not done in time; never raises for them."""
    started = [(name, *_start(folder, name)) for name in names]
    try:
        yield
    finally:
        until = time.monotonic() + LAST_SECONDS
        for _, child, _ in started:
            assert child.stdin is not None
            child.stdin.close()
        for name, child, log in started:
            _end(name, child, log, until, tell)


def run_goes_on(pipe: IO[bytes]) -> Callable[[float], bool]:
    """For a tracker that a run started: waits so many seconds, or until the run's end of the pipe is closed."""

    def wait(seconds: float) -> bool:
        return not select.select([pipe], [], [], seconds)[0]

    return wait


def _start(folder: RunFolder, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    log = folder.next_log(f"track-{name}")
    command = ["-Pm", "rocstar", "--traceback", "runs", "track", str(folder.path), "--to", name, "--follow"]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,  # Ctrl-C ends the run, and the run ends its trackers
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    return child, log


def _end(name: str, child: subprocess.Popen[bytes], log: Path, until: float, tell: Callable[[str], None]) -> None:
    try:
        code = child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        rest = f"rocstar runs track {log.parents[1]} --to {name}"
        tell(f"{name} had not sent all steps in time; send the rest with: {rest}")
        return
    if code:
        tell(f"{name} failed, which does not affect the run; {log} says why")


@contextmanager
def tensorboard(folder: RunFolder) -> Iterator[Log]:
    """Event files in `tracking/tensorboard` of the run, which `tensorboard --logdir runs` finds: one file per start;
    TensorBoard joins them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder.path / "tracking" / "tensorboard"))

    def log(step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    yield log
    writer.close()


def wandb(folder: RunFolder) -> AbstractContextManager[Log]:
    """One W&B run for each of our runs, even if resumed. Project, key and mode are W&B's own settings (WANDB_PROJECT,
    WANDB_API_KEY, WANDB_MODE ...)."""
    identity = folder.identity
    name = f"{identity['name']} {identity['started']}"  # the same wherever the folder is moved to
    own = hashlib.sha256(name.encode()).hexdigest()[:16]
    return _as_wandb_has_it("wandb", folder, id=own, dir=str(folder.path / "tracking"))


def trackio(folder: RunFolder) -> AbstractContextManager[Log]:
    """One trackio run for each of our runs, even if resumed. Project and space are trackio's own settings (TRACKIO_DIR,
    TRACKIO_SPACE_ID ...)."""
    return _as_wandb_has_it("trackio", folder, embed=False)


@contextmanager
def _as_wandb_has_it(name: str, folder: RunFolder, **own: Any) -> Iterator[Log]:
    library, project = import_module(name), os.environ.get(f"{name.upper()}_PROJECT", "rocstar")
    library.init(project=project, name=folder.name, config=read_json(folder.resolved), resume="allow", **own)
    yield lambda step, metrics: library.log(metrics, step=step)
    library.finish()


@contextmanager
def mlflow(folder: RunFolder) -> Iterator[Log]:
    """One MLflow run for each of our runs: its id is stored beside the last step. Server and experiment are MLflow's
    own settings (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)."""
    library = import_module("mlflow")
    id_file = state_file(folder, "mlflow").with_suffix(".id")
    if id_file.exists():
        library.start_run(run_id=id_file.read_text())
    else:
        run = library.start_run(run_name=folder.name)
        settings = flat(read_json(folder.resolved))
        library.log_params({name: str(value)[:PARAMETER_CHARACTERS] for name, value in settings})
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(run.info.run_id)
    client, identity = library.tracking.MlflowClient(), id_file.read_text()

    def log(step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        numbers = [library.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        client.log_batch(identity, numbers)

    yield log
    library.end_run()


SINKS: Mapping[str, Callable[[RunFolder], AbstractContextManager[Log]]] = {
    sink.__name__: sink for sink in (tensorboard, wandb, trackio, mlflow)
}
"""Name of a tracker, equal to its library's -> the function that opens it; closing waits until all is delivered."""


def refuse_absent(names: Sequence[str]) -> None:
    """Raises ConfigError for the first tracker that is unknown or whose library is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"there is no tracker {name!r}; there are {', '.join(SINKS)}")
        if find_spec(name) is None:
            raise ConfigError(f"tracker {name} needs its library, which is not installed: pip install {name}")


def open_sink(name: str, folder: RunFolder) -> AbstractContextManager[Log]:
    """Raises ConfigError, and the library's own errors."""
    refuse_absent([name])
    return SINKS[name](folder)
