"""A daemon driven frame by frame, without the client: what leaves it is seen as it leaves."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, DaemonInfo, DaemonSettings, Isolation, Limits, Response, ServiceOutcome, Usage
from rocstar.sandbox.daemon import WORKDIRS, start_daemon, watch
from rocstar.sandbox.daemon.verdict import STARVED
from rocstar.sandbox.walls import cgroups
from rocstar.sandbox.walls.plans import PLANS
from rocstar.sandbox.wire import Frame, FrameKind

STARVED_TRIES = 10  # a bound: nobody asks a machine without end that gives a program no CPU
WAIT_SECONDS = 60.0  # a bound on what would otherwise be forever
LIMITS = Limits(wall_seconds=20.0, cpu_seconds=10.0)

needs_empty_folder = pytest.mark.skipif(
    os.path.realpath(sys.prefix).startswith("/tmp/"),
    reason="the interpreter lies below /tmp, so its folder stands in every working directory",
)


class Refused(Exception):
    """What the daemon said instead of hello."""


class Daemon:
    """A running daemon. Raises Refused where it does not serve."""

    def __init__(self, folder: str = "/tmp", **settings: Any) -> None:
        self.workdirs = f"{folder}/{WORKDIRS}{os.getpid()}-{os.urandom(6).hex()}"
        values = DaemonSettings(**{"slots": 2, "preload": (), "min_isolation": Isolation.L1} | settings)
        self.socket, self.process = start_daemon(values, self.workdirs)
        self.socket.settimeout(WAIT_SECONDS)
        self.reader = wire.FrameReader()
        self.frames: list[Frame] = []
        self.early: dict[int, Frame] = {}
        self.number = 0
        self.sessions: set[str] = set()
        """Names of all that have had a call."""
        try:
            first = self.next_frame()
            if first.kind is FrameKind.REFUSED:
                raise Refused(wire.decode_text(first.body))
        except BaseException:
            self.close()
            raise
        self.info: DaemonInfo = wire.decode_info(first.body)

    def next_frame(self) -> Frame:
        """Raises EOFError when the daemon has closed the connection."""
        while not self.frames:
            data = self.socket.recv(2**18)
            if not data:
                raise EOFError
            self.frames += self.reader.feed(data)
        return self.frames.pop(0)

    def send(self, kind: FrameKind, body: bytes = b"", number: int = 0) -> None:
        self.socket.sendall(wire.pack(kind, number, body))

    def submit(self, code: str, **fields: Any) -> int:
        """The number of a new call. `limits` as given, fields of it as keywords replace those of LIMITS."""
        limits = {name: fields.pop(name) for name in Limits.__struct_fields__ if name in fields}
        self.sessions |= {fields["session"]} if fields.get("session") else set()
        call = Call(**{"id": f"{self.number + 1}", "code": code, "limits": structs.replace(LIMITS, **limits)} | fields)
        return self.submit_body(wire.encode(call))

    def submit_body(self, body: bytes) -> int:
        self.number += 1
        self.send(FrameKind.CALL, body, self.number)
        return self.number

    def frame(self, number: int) -> Frame:
        """The one that answers this call."""
        while number not in self.early:
            frame = self.next_frame()
            if frame.kind is not FrameKind.USAGE:
                assert frame.number not in self.early, "answered twice"
                self.early[frame.number] = frame
        return self.early.pop(number)

    def answer(self, number: int) -> Response:
        frame = self.frame(number)
        assert frame.kind is FrameKind.RESPONSE, frame
        return wire.decode_response(frame.body)

    def run(self, code: str, **fields: Any) -> Response:
        """Asks again, as a client does, what is starved: that says nothing of the program."""
        for _ in range(STARVED_TRIES):
            if not is_starved(response := self.answer(self.submit(code, **fields))):
                break
        return response

    def cell(self, session: str, number: int, code: str, **fields: Any) -> Response:
        return self.run(code, session=session, cell=number, **fields)

    def end(self, session: str) -> None:
        self.send(FrameKind.CLOSE, wire.encode(session))

    def end_sessions(self) -> None:
        """All of them, with their processes."""
        for name in self.sessions:
            self.end(name)
        self.sessions.clear()
        assert eventually(lambda: self.usage().sessions == 0 and not self.programs())

    def usage(self) -> Usage:
        """Asked for by a ping."""
        self.send(FrameKind.PING)
        while (frame := self.next_frame()).kind is not FrameKind.USAGE:
            self.early[frame.number] = frame
        return wire.decode_usage(frame.body)

    def begin(self, code: str = "", **fields: Any) -> int:
        """The number of a call whose program has done this, and sleeps."""
        name = f"begun-{self.number + 1}"
        number = self.submit(
            f"{code}\nimport ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}')\ntime.sleep(60)", **fields
        )
        assert eventually(lambda: name in map(name_of, self.below()))
        return number

    def cancel(self, number: int) -> Response:
        self.send(FrameKind.CANCEL, number=number)
        return self.answer(number)

    def below(self) -> list[psutil.Process]:
        """All that lives below the daemon."""
        found = self.zygotes()
        for process in found:  # it grows under way
            found += children(process)
        return [process for process in found if not ended(process)]

    def zygotes(self, depth: int = 1) -> list[psutil.Process]:
        """Below the daemon come its zygotes, a keeper per slot, the slot, and its program."""
        row = [psutil.Process(self.process.pid)]
        for _ in range(depth):
            row = [child for process in row for child in children(process)]
        return row

    def keepers(self) -> list[psutil.Process]:
        return self.zygotes(2)

    def slots(self) -> list[psutil.Process]:
        return self.zygotes(3)

    def programs(self) -> list[psutil.Process]:
        """First processes of programs."""
        return self.zygotes(4)

    def close(self) -> None:
        self.socket.close()
        self.process.wait(WAIT_SECONDS)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def daemon_of(plan: str, folder: str = "/tmp", **settings: Any) -> Iterator[Daemon]:
    """A daemon whose slots are isolated so; skips the test where that is not to be had."""
    number = [each.name for each in PLANS].index(plan)
    try:
        started = Daemon(folder, skip_plans=number, **settings)
    except Refused as error:
        if "can be started here" not in str(error):
            raise
        pytest.skip(f"{plan} is not to be had here: {error}")
    with started:
        if started.info.isolation != PLANS[number].level:
            pytest.skip(f"{plan} is not to be had here, only {started.info.isolation}")
        yield started


@contextmanager
def group_of(controller: str, **limits: str) -> Iterator[Path]:
    """A control group with these limits."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cgroups, "CONTROLLERS", cgroups.CONTROLLERS | {controller})
        groups = cgroups.found()
    if controller not in groups.folders:
        groups.close()
        pytest.skip(f"no control group of {controller} can be made here")
    folder = groups.folders[controller] / "crowded"
    folder.mkdir()
    for name, limit in limits.items():
        with_dot = folder / name.replace("_", ".", 1)
        if with_dot.exists():
            with_dot.write_text(limit)
    yield folder
    groups.close()


def is_starved(response: Response) -> bool:
    """Whether the machine gave it hardly any CPU: then it is to be asked again."""
    return response.outcome is ServiceOutcome.INTERNAL and response.message.endswith(STARVED)


def children(process: psutil.Process) -> list[psutil.Process]:
    """As the kernel lists them, where it does: psutil looks through all processes of the machine."""
    found = []
    with suppress(psutil.NoSuchProcess):
        if not watch.can_see(process.pid):
            return process.children()
        for pid in watch.children(process.pid):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def name_of(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def ended(process: psutil.Process) -> bool:
    """Dead, whether or not somebody has collected it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def runs(pid: int) -> bool:
    """Whether it lives; its number may be nobody's."""
    return psutil.pid_exists(pid) and not ended(psutil.Process(pid))


def eventually(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> bool:
    """Whether it comes true; the time is a bound on a wait, not a measurement."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def unread(daemon: Daemon) -> Iterable[Frame]:
    """What has arrived and was not asked for, but for reports of usage."""
    daemon.socket.setblocking(False)
    try:
        while True:
            daemon.frames += daemon.reader.feed(daemon.socket.recv(2**18))
    except (TimeoutError, BlockingIOError):
        return [*daemon.early.values(), *(frame for frame in daemon.frames if frame.kind is not FrameKind.USAGE)]
    finally:
        daemon.socket.settimeout(WAIT_SECONDS)
