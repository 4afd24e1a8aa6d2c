"""A daemon driven frame by frame, without the client: what leaves it is seen as it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import psutil
from msgspec import structs

from rocstar.sandbox import launch, wire
from rocstar.sandbox.call import Call, DaemonInfo, DaemonSettings, Limits, Response, Usage
from rocstar.sandbox.wire import Frame, Kind

WAIT_SECONDS = 60.0  # a bound on what would otherwise be for ever
LIMITS = Limits(wall_seconds=20.0, cpu_seconds=10.0)


class Refused(Exception):
    """What the daemon said instead of hello."""


class Daemon:
    """A running daemon. Raises Refused where it does not serve."""

    def __init__(self, **settings: Any) -> None:
        self.workdirs = f"/tmp/{launch.WORKDIRS}{os.getpid()}-{os.urandom(6).hex()}"
        values = DaemonSettings(**{"slots": 2, "preload": ()} | settings)
        self.socket, self.process = launch.start_daemon(values, self.workdirs)
        self.socket.settimeout(WAIT_SECONDS)
        self.reader = wire.FrameReader()
        self.frames: list[Frame] = []
        self.usages: list[Usage] = []
        self.early: dict[int, Frame] = {}
        self.number = 0
        try:
            first = self.next_frame()
            if first.kind is Kind.REFUSED:
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

    def send(self, kind: Kind, body: bytes = b"", number: int = 0) -> None:
        self.socket.sendall(wire.pack(kind, number, body))

    def submit(self, code: str, **fields: Any) -> int:
        """The number of a new call. `limits` as given, fields of it as keywords replace those of LIMITS."""
        limits = {name: fields.pop(name) for name in Limits.__struct_fields__ if name in fields}
        call = Call(**{"id": f"{self.number + 1}", "code": code, "limits": structs.replace(LIMITS, **limits)} | fields)
        return self.submit_body(wire.encode(call))

    def submit_body(self, body: bytes) -> int:
        self.number += 1
        self.send(Kind.CALL, body, self.number)
        return self.number

    def frame(self, number: int) -> Frame:
        """The one that answers this call."""
        while number not in self.early:
            frame = self.next_frame()
            if frame.kind is Kind.USAGE:
                self.usages.append(wire.decode_usage(frame.body))
            else:
                assert frame.number not in self.early, "answered twice"
                self.early[frame.number] = frame
        return self.early.pop(number)

    def answer(self, number: int) -> Response:
        frame = self.frame(number)
        assert frame.kind is Kind.RESPONSE, frame
        return wire.decode_response(frame.body)

    def run(self, code: str, **fields: Any) -> Response:
        return self.answer(self.submit(code, **fields))

    def cell(self, session: str, number: int, code: str, **fields: Any) -> Response:
        return self.run(code, session=session, cell=number, **fields)

    def usage(self) -> Usage:
        """Asked for by a ping."""
        self.send(Kind.PING)
        while (frame := self.next_frame()).kind is not Kind.USAGE:
            self.early[frame.number] = frame
        return wire.decode_usage(frame.body)

    def below(self) -> list[psutil.Process]:
        """All that lives below the daemon."""
        every = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in every if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        self.socket.close()
        self.process.wait(WAIT_SECONDS)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def unread(daemon: Daemon) -> Iterable[Frame]:
    """What has arrived and was not asked for, but for reports of usage."""
    daemon.socket.setblocking(False)
    try:
        while True:
            daemon.frames += daemon.reader.feed(daemon.socket.recv(2**18))
    except (TimeoutError, BlockingIOError):
        return [*daemon.early.values(), *(frame for frame in daemon.frames if frame.kind is not Kind.USAGE)]
    finally:
        daemon.socket.settimeout(WAIT_SECONDS)
