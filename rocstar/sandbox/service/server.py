"""uvicorn with our bounds, our signals, and a drain that loses nothing. Not here: the sandbox behind it (`worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Generator
from typing import Any, Protocol

import uvicorn

from rocstar.sandbox.service.app import App
from rocstar.sandbox.service.http import Service
from rocstar.sandbox.service.listeners import Listeners
from rocstar.sandbox.service.protocol import bounded

LINGER_SECONDS = 0.5  # after SIGTERM: calls that were sent before the caller could know are still taken
BACKLOG = 4096  # connections the kernel holds for us while we are busy
TICK_SECONDS = 0.5


class Costs(Protocol):
    """What the server wants to know of the sandbox."""

    def cpu_seconds(self) -> float: ...


class Server(uvicorn.Server):
    """Made with a listening socket to serve and a pipe whose end means the end."""

    def __init__(self, service: Service, client: Costs) -> None:
        settings = service.settings
        protocol, self.keeper = bounded(settings.request_seconds)
        config = uvicorn.Config(
            App(service),
            http=protocol,
            loop="uvloop",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_level="error",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(settings.keep_alive_seconds),
            timeout_graceful_shutdown=int(settings.drain_seconds),
        )
        super().__init__(config)
        self.service = service
        self.client = client

    def run_until_told(self, listeners: Listeners, number: int, lifeline: int) -> None:
        """Serve what comes to this worker's listeners until SIGTERM or the end of `lifeline`."""
        self.lifeline = lifeline
        self.private = listeners.private[number] if listeners.private else None
        self.run([listeners.public[number]])

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ctrl-C reaches the supervisor too, which then sends SIGTERM."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_reader(self.lifeline, self.drain)
        yield

    def drain(self) -> None:
        asyncio.get_running_loop().remove_reader(self.lifeline)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.private is not None:
            self.servers.append(await asyncio.get_running_loop().create_unix_server(self.protocol, sock=self.private))
        self.service.row["ready"] = 1.0
        self.ticker = asyncio.create_task(self.tick())

    def protocol(self) -> asyncio.Protocol:
        """As uvicorn makes them for the sockets it is given, which it takes for TCP."""
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state={})
        return made

    async def tick(self) -> None:
        """Every half second: close connections that dawdle, and note what only this process knows."""
        row = self.service.row
        while True:
            self.keeper.sweep(asyncio.get_running_loop().time())
            row["connections"] = len(self.server_state.connections)
            row["cpu_seconds"] = time.process_time() + self.client.cpu_seconds()
            await asyncio.sleep(TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections that come now are still served, each with its last answer; then uvicorn waits for the rest."""
        self.service.row["ready"] = 0.0
        self.server_state.default_headers = [(b"connection", b"close")]
        await asyncio.sleep(LINGER_SECONDS)
        await super().shutdown(sockets)
        self.ticker.cancel()
