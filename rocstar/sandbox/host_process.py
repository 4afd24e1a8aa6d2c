"""One host process as its client sees it: started, read from, written to, seen out. What is said is the client's."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from rocstar.sandbox import launcher, wire
from rocstar.sandbox.outbox import Outbox
from rocstar.sandbox.wire import SandboxDown

START_SECONDS = 120.0  # preloading can be slow on a cold, shared file system
CLOSE_SECONDS = 5.0
READ_BYTES = 2**18
UNREADABLE = (AttributeError, KeyError, RecursionError, TypeError, ValueError)  # raised by reading what is no message


class HostProcess:
    """A running host and the not blocking socket to it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start it; its first frame tells whether it serves. Raises SandboxDown."""
        self.workdirs = f"{tempfile.gettempdir()}/{launcher.WORKDIRS}{os.getpid()}-{os.urandom(6).hex()}"
        try:
            self.socket, self.process = launcher.start_host({**settings, "workdirs": self.workdirs})
        except OSError as error:
            raise SandboxDown(f"the sandbox host could not be started ({error})") from error
        self.outbox = Outbox(self.socket)
        self._reader = wire.FrameReader()

    def first_messages(self) -> Iterable[dict[str, Any]]:
        """Wait for what it says first, without an event loop. Raises SandboxDown when it says nothing."""
        messages: list[dict[str, Any]] = []
        self.socket.settimeout(START_SECONDS)
        while not messages:
            try:
                data = self.socket.recv(READ_BYTES)
            except TimeoutError:
                raise SandboxDown(f"the sandbox host did not start within {START_SECONDS} seconds") from None
            if not data:
                raise SandboxDown(f"the sandbox host died while starting, exit code {self.process.wait()}")
            messages += self._reader.feed(data)
        self.socket.setblocking(False)
        return messages

    def send(self, frame: bytes) -> None:
        self.outbox.send(frame)

    def messages(self) -> Iterable[dict[str, Any]] | None:
        """What has arrived; None when the host is gone. Going through it raises ValueError at what is no frame."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return ()
        except OSError:
            data = b""
        return self._reader.feed(data) if data else None

    def end(self) -> None:
        """Close the connection, which ends a host that is well; any other is killed."""
        self.socket.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.workdirs, ignore_errors=True)  # there only where slots got no file system of their own


def complaint(frame: bytes) -> str:
    """Why it cannot be sent, empty when it can: one that is too long would end the host for all who share it."""
    if len(frame) <= wire.MAX_FRAME_BYTES:
        return ""
    told = f"the call takes {len(frame)} bytes on its way to the sandbox, with what its session remembers"
    return f"{told}, and at most {wire.MAX_FRAME_BYTES} are taken; send less"
