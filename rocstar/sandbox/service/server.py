"""uvicorn with further bounds, our signal handling, and a drain that loses no call.

Not here: the size of a body (`app`), and the sandbox behind it (`serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rocstar.sandbox import container
from rocstar.sandbox.service.app import Application
from rocstar.sandbox.service.core import LOG, SMALL_BYTES, BadRequest, Hold, Service, encode
from rocstar.sandbox.service.native import MESSAGE_BYTES
from rocstar.sandbox.settings import Settings

if TYPE_CHECKING:
    from rocstar.sandbox.client import SandboxClient

MAX_HEADER_BYTES = 16 * 1024
SPARE_DESCRIPTORS = 256  # for the daemons, files, and connections on their way out
BACKLOG = 4096  # connections that the kernel queues while the service is busy
KEEP_ALIVE_SECONDS = 65  # longer than the 60 s after which proxies close an idle connection
LINGER_SECONDS = 0.5  # after SIGTERM, in which calls that are already on their way are still accepted
UNREAD_SECONDS = 1.0  # in which a caller that is still sending can read the refusal
DRAIN_POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0  # between two readings of a caller's unread bytes


class Server(uvicorn.Server):
    def __init__(self, settings: Settings, client: SandboxClient, listener: socket.socket) -> None:
        self.service = Service(settings, client)
        config = uvicorn.Config(
            Application(self.service),
            http=BoundedProtocol,
            ws="websockets-sansio",
            ws_max_size=MESSAGE_BYTES,  # the size of clients' messages: an incomplete one is not counted in the budget
            ws_ping_timeout=None,  # a caller in a long optimizer step reads nothing; TCP detects dead connections
            ws_per_message_deflate=False,
            loop="uvloop",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_level="error",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(settings.drain_seconds) or 1,
        )
        super().__init__(config)
        self.settings = settings
        self.listener = listener

    def serve_until_stopped(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        container.open_files()  # a connection is one
        for number in (signal.SIGTERM, signal.SIGINT):  # before the loop runs, where an exception could be lost
            signal.signal(number, self.stop)
        self.run([self.listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self, *_: object) -> None:
        """Shut down; the second call does not wait for running calls."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.service.client.attach()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve new connections for LINGER_SECONDS, with one answer each; then uvicorn waits for pending calls."""
        self.service.draining = True
        LOG.warning("rocstar: stopping; pending calls have up to %g s", self.settings.drain_seconds)
        self.server_state.default_headers = [(b"connection", b"close")]
        await asyncio.sleep(LINGER_SECONDS)
        for _ in range(int(self.settings.drain_seconds / DRAIN_POLL_SECONDS)):
            # closing a frame connection before an answer is sent would leave a gateway waiting for it
            if self.force_exit or not any(frames.calls or frames.unsent for frames in self.service.connections):
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await super().shutdown(sockets)


def listen(settings: Settings) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)


def refusal(status: str, sentence: str) -> bytes:
    """A complete response, for a connection without a request."""
    body = encode({"error": sentence})
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


FULL = refusal("503 Service Unavailable\r\nretry-after: 1", "too many connections are open; come again in 1 s")
TOO_SLOW = refusal("408 Request Timeout", "the request did not arrive in time")
TOO_LARGE = refusal("431 Request Header Fields Too Large", f"the headers are longer than {MAX_HEADER_BYTES} bytes")
NO_HTTP = refusal("400 Bad Request", "this is no HTTP/1.1 request")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on headers, on the time until a request has arrived, and on connections. Cancels
    the task of a request whose caller disconnects."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.header_bytes: int | None = 0
        """Header bytes of the arriving request; None while its body arrives."""
        self.arriving: asyncio.TimerHandle | None = None
        """Ends a request that arrives too slowly."""
        self.unread = Hold(self.app.service.budget, transport.abort)
        self.leaving = self.ended = False
        """leaving: the next answer on this connection is the last; ended: the last one has been sent."""
        self.unanswered: deque[RequestResponseCycle] = deque()
        """The first is being served; a caller may send further requests meanwhile."""
        left = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - len(self.connections)
        if left < SPARE_DESCRIPTORS // 2:
            transport.abort()
        elif left < SPARE_DESCRIPTORS:
            self.end(FULL)
        else:
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)

    def end(self, answer: bytes) -> None:
        """Answer and close, for any request."""
        if not self.ended and not self.transport.is_closing():
            self.app.metrics.statuses[answer[9:12].decode()] += 1
            self.transport.write(answer)
            self.close_unread()

    def close_unread(self) -> None:
        """Close when the caller does, or soon: closing a socket with unread bytes resets it and loses the answer."""
        self.ended = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(UNREAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.arrived()
        self.unread.end()
        for cycle in self.unanswered:  # uvicorn notifies only the last
            cycle.disconnected = True
        if self.unanswered and (task := (scope := self.unanswered[0].scope).get("task")) is not None:
            scope["left"] = True  # type: ignore[typeddict-unknown-key]
            task.cancel()  # type: ignore[attr-defined]

    def arrived(self) -> None:
        self.whole = True
        if self.arriving is not None:
            self.arriving.cancel()
            self.arriving = None

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        self.whole, self.data_bytes = False, len(data)
        if self.header_bytes is not None:
            self.header_bytes += len(data)
        super().data_received(data)
        if self.header_bytes is not None and self.header_bytes > MAX_HEADER_BYTES:
            self.end(TOO_LARGE)
        elif not self.whole and self.arriving is None:
            seconds = self.app.service.settings.request_seconds
            self.arriving = self.loop.call_later(seconds, self.end, TOO_SLOW)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.header_bytes is not None:  # those after a body are not kept, so that nobody fills memory with them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        most, self.header_bytes = (self.header_bytes or 0) + self.data_bytes, None
        if (
            most > MAX_HEADER_BYTES
            and sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES
        ):
            self.end(TOO_LARGE)
            raise ValueError("the headers are too long")  # the parser stops here
        super().on_headers_complete()
        if self.leaving:
            self.cycle.keep_alive = False
        self.scope["too_slow"] = partial(self.end, TOO_SLOW)  # type: ignore[typeddict-unknown-key]
        self.scope["answer"] = partial(self.answer, self.cycle)  # type: ignore[typeddict-unknown-key]
        self.unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        self.arrived()
        self.header_bytes = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self.arrived()
        self.app_state = {**self.app_state, "abort": self.transport.abort}  # in its scope
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self.end(NO_HTTP)

    def answer(
        self, cycle: RequestResponseCycle, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Write a complete response at once. The cycle's `send` writes twice and validates again, which takes a tenth
        of a call's time. Raises RuntimeError when a response has begun."""
        if cycle.response_started:
            raise RuntimeError("a response failed after it had begun")
        self.unanswered.popleft()
        lines = [*cycle.default_headers, *headers]
        if (b"connection", b"close") in lines:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append((b"connection", b"close"))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.disconnected:
            head = b"".join([STATUS_LINE[status], *(b"%b: %b\r\n" % line for line in lines), b"\r\n"])
            body = b"" if cycle.scope["method"] == "HEAD" else body
            self.transport.writelines([head, body] if len(body) > SMALL_BYTES else [head + body])
            if not self.unread.size:
                self.look()
            if not cycle.keep_alive and cycle.more_body:
                self.close_unread()
            elif not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()

    def look(self) -> None:
        """Count the bytes that the caller has not read, repeatedly while there are any."""
        if self.unread.over or not ((size := self.transport.get_write_buffer_size()) or self.unread.size):
            return
        try:
            self.unread.resize(size, moved=size != self.unread.size)
            self.loop.call_later(LOOK_SECONDS, self.look)
        except BadRequest:
            self.transport.abort()

    def shutdown(self) -> None:
        """Called by uvicorn's drain. A connection that looks idle may contain an unread request."""
        self.leaving = True
        descriptor: int = self.transport.get_extra_info("socket").fileno()
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as twin:
            if twin.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        super().shutdown()
