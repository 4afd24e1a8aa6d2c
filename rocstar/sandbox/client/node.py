"""The client's side of one daemon: connects, reads, writes, watches and ends it. `dispatch` decides what to send.

Plain sockets and the loop's readers and writers, not asyncio streams: a connection outlives the event loop that uses
it, and is created without one. Two kinds: a child process of ours, and a WebSocket.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rocstar.sandbox import wire
from rocstar.sandbox.call import DaemonInfo, DaemonSettings, Isolation, Limits, SandboxDown, Usage
from rocstar.sandbox.check import of_limits
from rocstar.sandbox.client.dispatch import NodeFacts
from rocstar.sandbox.daemon import WORKDIRS, start_daemon
from rocstar.sandbox.walls import folders
from rocstar.sandbox.wire import Frame, FrameKind, FrameReader

START_SECONDS = 120.0  # until a child's hello: preloading can be slow on a cold, shared file system
CLOSE_SECONDS = 5.0
READ_BYTES = 2**18
MESSAGE_BYTES = 2**20  # servers refuse WebSocket messages of more than 16 MiB; a frame may span several
REMOTE_TRIES = 12  # with the pauses between them, about half a minute
TICKS = 10  # unanswered pings before a node is given up
IDLE_TICKS = 4  # pings with the answer "no calls" from a node that holds one of ours; a gateway's answer is a tick old


Token = str | Callable[[], str]
"""A token, or a function that returns the current one for each connection."""


class Connection:
    """A non-blocking socket, and the wrapping of frames on it: none on a Unix socket."""

    greeting = b""
    """The first bytes to send."""
    end = "it ended the connection"
    """What is known when the other end closes it."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.setblocking(False)

    def wrap(self, frames: bytes) -> bytes:
        """Frames as bytes for the socket."""
        return frames

    def unwrap(self, data: bytes) -> tuple[bytes, bytes]:
        """The frames' bytes in `data`, and bytes to reply at once. Raises ValueError and SandboxDown."""
        return data, b""

    def close(self, seconds: float) -> None:
        """seconds: how long to wait until the other end exits, if it is a child of ours."""
        self.socket.close()


class ChildConnection(Connection):
    """Also starts the daemon, which ends when the connection closes or this process ends. Raises OSError."""

    end = "it died"

    def __init__(self, settings: DaemonSettings) -> None:
        self._workdirs = f"{tempfile.gettempdir()}/{WORKDIRS}{os.getpid()}-{os.urandom(6).hex()}"
        connected, self.process = start_daemon(settings, self._workdirs)
        super().__init__(connected)

    def close(self, seconds: float) -> None:
        super().close(seconds)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(OSError):  # gone already unless the daemon was killed; the next daemon's start retries
            folders.remove(self._workdirs)


class WebSocketConnection(Connection):
    """The frames' bytes as binary messages of a WebSocket. Raises OSError."""

    def __init__(self, family: int, address: Any, uri: Any, token: Token) -> None:
        from websockets.client import ClientProtocol

        super().__init__(socket.socket(family))
        try:
            with suppress(BlockingIOError):  # a refusal is read from the socket later
                self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise
        self._protocol = ClientProtocol(uri, max_size=wire.MAX_FRAME_BYTES + wire.HEADER.size)
        request = self._protocol.connect()
        if secret := token() if callable(token) else token:
            request.headers["Authorization"] = f"Bearer {secret}"
        self._protocol.send_request(request)
        self.greeting = self.wrap(b"")

    def wrap(self, frames: bytes) -> bytes:
        from websockets.exceptions import InvalidState

        with suppress(InvalidState):  # the other end is closing: frames are dropped, and the reader sees the end
            for start in range(0, len(frames), MESSAGE_BYTES):
                self._protocol.send_binary(frames[start : start + MESSAGE_BYTES])
        return b"".join(self._protocol.data_to_send())

    def unwrap(self, data: bytes) -> tuple[bytes, bytes]:
        from websockets.frames import DATA_OPCODES
        from websockets.frames import Frame as Message

        self._protocol.receive_data(data)
        events = self._protocol.events_received()
        if (refused := self._protocol.handshake_exc) is not None:
            raise SandboxDown(f"no sandbox answers ({refused}); is its token given, `token=` or ROCSTAR_SANDBOX_TOKEN?")
        messages = [event for event in events if isinstance(event, Message) and event.opcode in DATA_OPCODES]
        return b"".join(message.data for message in messages), self.wrap(b"")


def child(settings: DaemonSettings) -> partial[Node]:
    """A daemon of our own, but for the arguments that all nodes of a client share."""
    return partial(Node, "the sandbox daemon", partial(ChildConnection, settings), tries=1, start_seconds=START_SECONDS)


def service_at(address: str, token: Token, least: Isolation) -> partial[Node]:
    """The same for `http://host:port`; the host's name is resolved once, here. Raises SandboxDown for another form, and
    for an unknown name."""
    from websockets.uri import parse_uri  # first, because websockets may not be installed

    parts = parts_of(address)
    try:
        family, _, _, _, found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SandboxDown(f"{address!r} is no address of a sandbox ({error})") from error
    uri = parse_uri(f"ws://{parts.netloc}/v1/frames")
    return partial(Node, address, partial(WebSocketConnection, family, found, uri, token), least=least)


def parts_of(address: str) -> SplitResult:
    """Of `http://host:port`. Raises SandboxDown for another form."""
    try:
        parts = urlsplit(address)
        wrong = parts.scheme != "http" or not parts.hostname or parts.port == 0
        if wrong or parts.path.strip("/") or parts.query or parts.username:
            raise ValueError("write http://host:port")
    except ValueError as error:
        raise SandboxDown(f"{address!r} is no address of a sandbox ({error})") from error
    return parts


def unfit(address: str, limits: Limits) -> str:
    """Why no call with these limits can be made at this address (empty: a daemon of our own), else empty."""
    try:
        if address:
            parts_of(address)
    except SandboxDown as error:
        return str(error)
    return of_limits(limits)


class Node(NodeFacts):
    """A daemon, connected or not.

    Long-lived: reads the socket, passes answers to `on_frames` and reports its own end to `on_end`. `send` writes once
    per turn of the event loop; the rest is written when a full socket accepts bytes again."""

    def __init__(
        self,
        label: str,
        connect: Callable[[], Connection],
        silent_seconds: float,
        on_frames: Callable[[Node, list[Frame]], None],
        on_end: Callable[[Node, str], None],
        *,
        tries: int = REMOTE_TRIES,
        least: Isolation = Isolation.L1,
        start_seconds: float | None = None,
    ) -> None:
        """label, tries: see NodeFacts. connect: does not wait; raises OSError. on_frames: called with HELLO once `info`
        is known, RESPONSE and LOST; on_end: called with the reason. least: the weakest accepted level; a child of ours
        checks this itself. start_seconds: silence before its hello that is a failure; None: `silent_seconds`."""
        super().__init__(label=label, tries=tries)
        self.info: DaemonInfo | None = None
        self.usage = Usage()
        self.cpu_seconds = 0.0
        """CPU that the daemon and its descendants used while we were connected, seconds."""
        self.connection: Connection | None = None
        self._connect, self._least, self._on_frames, self._on_end = connect, least, on_frames, on_end
        self._start_seconds, self._silent_seconds = start_seconds or silent_seconds, silent_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Connect; HELLO or `on_end` follows."""
        self._reader, self._silent_ticks, self._fault = FrameReader(), 0, ""
        self._oldest, self._idle_ticks = -1, 0  # the number of the oldest call held; -1: none
        self._frames, self._out, self._flushing = bytearray(), bytearray(), False  # to be sent: frames, then bytes
        try:
            self.connection = self._connect()
        except OSError as error:
            self._on_end(self, f"{self.label} could not be reached or started ({error.strerror or error})")
            return
        self._counted = 0.0 if isinstance(self.connection, ChildConnection) else math.inf
        self._out += self.connection.greeting
        if loop is not None:
            self.attach(loop)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read and write in this loop."""
        self._loop = loop
        if self.connection is not None:
            loop.add_reader(self.connection.socket.fileno(), self._on_readable)
            self._flush()

    def detach(self) -> None:
        loop, self._loop, self._flushing = self._loop, None, False
        if loop is not None and self.connection is not None and not loop.is_closed():
            loop.remove_reader(self.connection.socket.fileno())
            loop.remove_writer(self.connection.socket.fileno())

    def await_hello(self) -> None:
        """Without an event loop: wait until the daemon is up or has failed."""
        deadline = time.monotonic() + self._start_seconds
        while self.opening and self.connection is not None:
            poll = select.poll()
            poll.register(self.connection.socket, select.POLLIN | (0 if self._push() else select.POLLOUT))
            if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._on_readable()
            else:
                self.close(f"{self.label} did not start within {self._start_seconds:g} seconds", 0.0)

    def send(self, kind: FrameKind, number: int = 0, body: bytes = b"") -> None:
        """Queue a frame after the unsent ones."""
        self._frames += wire.pack(kind, number, body)
        if not self._flushing and self._loop is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def tick(self) -> None:
        """A tenth of `silent_seconds` has passed. Ticks are counted and no clock is read: a caller whose own loop was
        blocked for minutes has one tick overdue, not a hundred. Silence is ignored while no call is pending. A node
        that still answers pings but has lost a call is given up as well."""
        patience = self._start_seconds if self.opening else self._silent_seconds
        if self.connection is None or not (self.held or self.opening):
            self._silent_ticks = 0
        elif self._silent_ticks * self._silent_seconds / TICKS >= patience:
            self.close(f"{self.label} gave no sign of life for {patience:g} seconds and was given up", 0.0)
        elif self._idle_ticks >= IDLE_TICKS:
            self.close(f"{self.label} lost a call that it holds, has nothing to do and was given up", 0.0)
        else:
            oldest, has_answered = next(iter(self.held), -1), not self._silent_ticks
            idle = has_answered and 0 <= oldest == self._oldest and not (self.usage.running or self.usage.waiting)
            self._oldest, self._idle_ticks = oldest, self._idle_ticks + 1 if idle else 0
            self._silent_ticks += 1
            if self.up:
                self.send(FrameKind.PING)

    def close(self, reason: str = "", seconds: float = CLOSE_SECONDS) -> None:
        """End the connection, and with it a child of ours, which is killed after `seconds`; with a reason, report the
        end to `on_end`. May be called twice."""
        self.detach()
        if self.connection is not None:
            self.connection.close(seconds)
            self.connection = None
        if reason:
            self._on_end(self, reason)

    def state(self) -> dict[str, object]:
        """The state of the node for the status page."""
        state = "up" if self.up else "starting" if self.opening else "down"
        isolation = self.info.isolation if self.up and self.info else ""
        facts = {"node": self.label, "state": state, "isolation": isolation, "slots": self.slots if self.up else 0}
        return facts | {"under_way": len(self.held), "starts": self.starts, "problem": self.problem}

    def _on_readable(self) -> None:
        if self.connection is None:
            return
        try:
            data = self.connection.socket.recv(READ_BYTES)
            if not data:
                raise SandboxDown(self._fault or self.connection.end)
            stream, reply = self.connection.unwrap(data)
            self._out += reply
            self._silent_ticks = 0
            self._on_frames(self, [frame for frame in self._reader.feed(stream) if not self._is_for_us(frame)])
            if self._out:
                self._flush()
        except BlockingIOError:
            return
        except (OSError, SandboxDown) as error:
            self.close(f"{self.label} {'was lost' if self.up else 'does not serve'}: {error}")
        except (ValueError, RecursionError):
            self.close(f"{self.label} sent bytes that cannot be read and was given up", 0.0)

    def _is_for_us(self, frame: Frame) -> bool:
        """Whether only this class needs the frame. Raises ValueError; SandboxDown on refusal or too weak isolation."""
        if frame.kind is FrameKind.HELLO:
            self.info = wire.decode_info(frame.body)
            if self.info.isolation < self._least:
                problem = f"it offers isolation {self.info.isolation} and min_isolation asks for {self._least}"
                raise SandboxDown(f"{problem}; lower min_isolation, or use another")
        elif frame.kind is FrameKind.REFUSED:
            raise SandboxDown(wire.decode_text(frame.body))
        elif frame.kind is FrameKind.USAGE:
            self.usage = wire.decode_usage(frame.body)
            cpu = self.usage.cpu_seconds  # a remote daemon's CPU before our connection is not counted
            self.cpu_seconds += max(0.0, cpu - self._counted)
            self._counted = cpu if self._counted == math.inf else max(cpu, self._counted)
        return frame.kind is FrameKind.USAGE

    def _flush(self) -> None:
        self._flushing = False
        if self.connection is not None and self._loop is not None:
            descriptor = self.connection.socket.fileno()
            if self._push():
                self._loop.remove_writer(descriptor)
            else:
                self._loop.add_writer(descriptor, self._flush)

    def _push(self) -> bool:
        """Write as much as the socket accepts; True: nothing is left. Bytes for a dead peer are dropped."""
        if self.connection is None:
            return True
        if self._frames:
            self._out += self.connection.wrap(bytes(self._frames))
            self._frames.clear()
        try:
            del self._out[: self.connection.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._out.clear()
            self._fault = str(error)
        return not self._out
