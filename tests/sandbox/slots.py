"""A zygote and its slots as the daemon uses them, without a daemon: one call at a time, blocking."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rocstar.sandbox import launch
from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import Cell, Ended, Fetch, Notebook, Program

SECONDS = 60.0  # a bound on waits, not a measurement


class Outcome(NamedTuple):
    ended: Ended
    stdout: str
    stderr: str
    head: dict[str, Any]
    tail: bytes

    @property
    def value(self) -> str | None:
        return self.tail[: self.head["value"]].decode() if "value" in self.head else None

    @property
    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(self.ended.wait_status)

    @property
    def files(self) -> dict[str, bytes]:
        found, at = {}, self.head.get("value", 0)
        for path, size in self.head.get("files", ()):
            found[path] = self.tail[at : at + size]
            at += size
        return found


class Reader(threading.Thread):
    """Reads a descriptor to its end, and closes it."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self.fd = fd
        self.data = b""
        self.start()

    def run(self) -> None:
        with open(self.fd, "rb", buffering=0) as file, suppress(ConnectionResetError):
            while data := file.read(2**20):
                self.data += data

    def text(self) -> str:
        self.join(SECONDS)
        return self.data.decode("utf-8", "replace")


def program(code: str, **fields: Any) -> Program:
    values: dict[str, Any] = {
        "stdin": "",
        "files": {},
        "seed": 1,
        "cpu_seconds": 20.0,
        "memory_bytes": 2**30,
        "output_bytes": 2**16,
    }
    return Program(code=code, **(values | {"processes": 16} | fields))


def parse_report(body: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, tail = body.partition(b"\n")
    return (json.loads(head) if head else {}), tail


class Slot:
    """Our end of a slot's channel."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(SECONDS)
        self.hello: dict[str, Any] = json.loads(connection.recv(65536) or b'{"problem": "it died"}')

    def begin(self, payload: Any, kind: bytes = channel.RUN) -> tuple[socket.socket, Reader, Reader]:
        """Send the byte and the payload: control, stdout, stderr."""
        ours, theirs = socket.socketpair()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        socket.send_fds(self.connection, [kind], [out_end, err_end, theirs.fileno()])
        for fd in (out_end, err_end):
            os.close(fd)
        theirs.close()
        with suppress(BrokenPipeError, ConnectionResetError):  # it was stale
            ours.sendall(channel.pack(payload))
        return ours, Reader(out), Reader(err)

    def ended(self) -> Ended:
        return channel.parse_ended(self.connection.recv(channel.ENDED.size))

    def run(self, payload: Any, kind: bytes = channel.RUN) -> Outcome:
        control, out, err = self.begin(payload, kind)
        with control:
            report = Reader(os.dup(control.fileno()))
            ended = self.ended()
            control.shutdown(socket.SHUT_RDWR)
            report.join(SECONDS)
        return Outcome(ended, out.text(), err.text(), *parse_report(report.data[channel.LENGTH.size :]))

    def code(self, code: str, **fields: Any) -> Outcome:
        return self.run(program(code, **fields))

    def fetch(self, *paths: str) -> dict[str, bytes]:
        return self.run(Fetch(list(paths))).files

    def is_closed(self) -> bool:
        """Whether the slot has ended; waits for it."""
        return self.connection.recv(1) == b""


class Zygote:
    """Our end of a zygote's command socket."""

    def __init__(self, workdirs: str, preload: tuple[str, ...] = (), compiled: bool = True) -> None:
        self.workdirs = workdirs
        settings = {"preload": list(preload), "workdirs": workdirs, "compiled": compiled}
        self.commands, self.process = launch.start("rocstar.sandbox.slot.zygote", settings, socket.SOCK_SEQPACKET)
        self.commands.settimeout(SECONDS)
        self.hello: dict[str, Any] = json.loads(self.commands.recv(65536))
        self.slots: list[Slot] = []

    def spawn(self, plan: int, **more: Any) -> Slot:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = {"spawn": len(self.slots), "plan": plan, "groups": [], "controllers": [], **more}
        with theirs:
            socket.send_fds(self.commands, [json.dumps(command).encode()], [theirs.fileno()])
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


class Session:
    """A notebook in a slot of its own."""

    def __init__(self, slot: Slot, **fields: Any) -> None:
        self.slot = slot
        values: dict[str, Any] = {"seed": 1, "memory_bytes": 2**30, "processes": 16} | fields
        self.control, self.out, self.err = slot.begin(Notebook(**values))
        self.number = 0

    def send(self, code: str, **fields: Any) -> None:
        self.number += 1
        values: dict[str, Any] = {"files": {}, "fetch": [], "cpu_seconds": 20.0, "output_bytes": 2**16} | fields
        self.control.sendall(channel.pack(Cell(number=self.number, code=code, **values)))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """A cell's report. Raises EOFError when the process has ended."""
        body = self.exactly(*channel.LENGTH.unpack(self.exactly(channel.LENGTH.size)))
        return parse_report(body)

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.control.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def cell(self, code: str, **fields: Any) -> Outcome:
        """Without output, which is known when the session is closed."""
        self.send(code, **fields)
        return Outcome(Ended(0, False, False, 0, 0, 0, 0, 0, True), "", "", *self.receive())

    def stop(self) -> None:
        os.kill(self.slot.hello["slot"], signal.SIGUSR1)

    def close(self) -> tuple[str, str]:
        """stdout and stderr of all cells."""
        self.control.close()
        self.slot.ended()
        return self.out.text(), self.err.text()


class Programs:
    """Runs programs one after another; a slot that has exited is replaced."""

    def __init__(self, source: Zygote) -> None:
        self.source = source
        self.plan = -1
        self.slot: Slot | None = None

    def ready(self) -> Slot:
        """A slot of the strongest plan that is to be had."""
        while self.slot is None:
            plan = max(self.plan, 0)
            slot = self.source.spawn(plan)
            self.slot, self.plan = (None, plan + 1) if slot.hello["problem"] else (slot, plan)
        return self.slot

    def run(self, code: str, *fetch: str, **fields: Any) -> Outcome:
        """`fetch`: files to read back, as the outcome's `files`."""
        outcome = self.ready().run(program(code, **fields), channel.RUN_AND_KEEP if fetch else channel.RUN)
        if outcome.ended.stale:
            self.slot = None
            return self.run(code, *fetch, **fields)
        if fetch:
            fetched = self.ready().run(Fetch(list(fetch)))
            outcome = outcome._replace(ended=fetched.ended, head=fetched.head, tail=fetched.tail)
        if not outcome.ended.reusable:
            self.slot = None
        return outcome


@contextmanager
def programs(**settings: Any) -> Iterator[Programs]:
    with zygote(**settings) as source:
        yield Programs(source)
