"""A zygote and its slots as the daemon uses them, without a daemon: one call at a time, blocking."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rocstar.sandbox import launch
from rocstar.sandbox.daemon import watch
from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import Ended, Program
from rocstar.sandbox.walls import cgroups

SECONDS = 60.0  # a bound on waits, not a measurement
FIELDS: dict[str, Any] = {"stdin": "", "files": {}, "fetch": (), "seed": 1, "cpu_seconds": 20.0, "memory_bytes": 2**30}


class Outcome(NamedTuple):
    ended: Ended
    stdout: str
    stderr: str


class Slot:
    """Our end of a slot's channel."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(SECONDS)
        hello, attached, _, _ = socket.recv_fds(connection, 65536, 1)
        self.hello: dict[str, Any] = json.loads(hello or b'{"problem": "it died"}')
        for listener in attached:
            threading.Thread(target=permit_forks, args=[listener], daemon=True).start()

    def begin(self, code: str, **fields: Any) -> tuple[socket.socket, int, int]:
        """Start a program: control, stdout, stderr."""
        program = Program(code=code, output_bytes=2**16, processes=16, **FIELDS | fields)
        ours, theirs = socket.socketpair()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        socket.send_fds(self.connection, [channel.RUN], [out_end, err_end, theirs.fileno()])
        for fd in (out_end, err_end):
            os.close(fd)
        theirs.close()
        with suppress(BrokenPipeError, ConnectionResetError):  # it was stale
            ours.sendall(channel.pack(program))
        return ours, out, err

    def ended(self) -> Ended:
        return channel.parse_ended(self.connection.recv(channel.ENDED.size))

    def code(self, code: str, **fields: Any) -> Outcome:
        """Run a program that prints no more than a pipe holds; what it reports is thrown away."""
        control, out, err = self.begin(code, **fields)
        with control, open(out) as stdout, open(err) as stderr:
            return Outcome(self.ended(), stdout.read(), stderr.read())

    def is_closed(self) -> bool:
        """Whether the slot has ended; waits for it."""
        return self.connection.recv(1) == b""


def permit_forks(listener: int) -> None:
    """All, until the slot has ended."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while waiting.poll()[0][1] & select.POLLIN:
        question = bytearray(watch.QUESTION.size)
        with suppress(OSError):  # it has been killed
            fcntl.ioctl(listener, watch.RECEIVE, question)
            fcntl.ioctl(listener, watch.SEND, watch.ANSWER.pack(*watch.QUESTION.unpack(question), 0, watch.CONTINUE))
    os.close(listener)


class Zygote:
    """Our end of a zygote's command socket."""

    def __init__(self, workdirs: str, preload: tuple[str, ...] = ()) -> None:
        self.workdirs = workdirs
        settings = {"preload": list(preload), "workdirs": workdirs}
        self.commands, self.process = launch.start("rocstar.sandbox.slot.zygote", settings, socket.SOCK_SEQPACKET)
        self.commands.settimeout(SECONDS)
        self.hello: dict[str, Any] = json.loads(self.commands.recv(65536))
        self.slots: list[Slot] = []

    def spawn(self, plan: int) -> Slot:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = json.dumps({"spawn": len(self.slots), "plan": plan}).encode()
        with theirs:
            socket.send_fds(self.commands, [command], [theirs.fileno()])
        self.slots.append(Slot(ours))
        return self.slots[-1]

    def close(self) -> None:
        for slot in self.slots:
            slot.connection.close()
        self.commands.close()
        self.process.wait(SECONDS)


@contextmanager
def zygote(**settings: Any) -> Iterator[Zygote]:
    with tempfile.TemporaryDirectory(prefix="rocstar-test-") as folder:
        os.chmod(folder, 0o711)
        started = Zygote(str(Path(folder, "work")), **settings)
        try:
            yield started
        finally:
            started.close()


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
