"""Lets nodes in: accepts connections and asks each for proof that it knows the token. Not here: what nodes then say."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rocstar.sandbox.router import auth
from rocstar.sandbox.router.address import listen, prompt
from rocstar.sandbox.router.link import MAX_FRAME_BYTES, Link

HANDSHAKE_SECONDS = 10.0
MAX_STRANGERS = 1024  # connections that have not shown proof; beyond it the oldest goes


class Gate:
    """Consumes connections, produces links whose other end has proven itself: `on_node(link, hello)`."""

    def __init__(self, address: str, token: str) -> None:
        """Listens from now on; whoever connects waits in the kernel until `attach`. Raises ValueError and OSError."""
        self.token = token
        self.on_node: Callable[[Link, Mapping[str, Any]], None] = lambda link, hello: None
        self.listener, self.address = listen(address)
        self.strangers: dict[Link, float] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        loop.add_reader(self.listener.fileno(), self.accept)

    def detach(self) -> None:
        """Those in the middle of their handshake come again."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self.listener.fileno())
        for link in self.strangers:
            link.close()
        self.strangers.clear()

    def close(self) -> None:
        self.listener.close()

    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        prompt(connection)
        self.challenge(connection)

    def challenge(self, connection: socket.socket) -> None:
        link = Link(connection)
        nonce = auth.new_nonce()
        link.on_message = partial(self.answered, link, nonce)
        link.on_end = partial(self.forget, link)
        self.strangers[link] = time.monotonic() + HANDSHAKE_SECONDS
        link.attach(self.loop)
        link.send({"kind": "challenge", "nonce": nonce})
        if len(self.strangers) > MAX_STRANGERS:
            oldest = next(iter(self.strangers))
            oldest.close()
            self.forget(oldest)

    def answered(self, link: Link, nonce: str, hello: Mapping[str, Any]) -> None:
        """Raises ValueError, which ends the link, on anything but a node's hello."""
        self.forget(link)
        if not isinstance(hello, dict) or not auth.is_proven(
            hello.get("proof"), self.token, auth.NODE, nonce, str(hello.get("name"))
        ):
            link.send({"kind": "refused", "message": "the node's token is not the router's"})
            raise ValueError("no proof")
        link.limit = MAX_FRAME_BYTES
        self.on_node(link, hello)

    def forget(self, link: Link) -> None:
        self.strangers.pop(link, None)

    def sweep(self, now: float) -> None:
        """Close connections that have not shown proof in time."""
        for link in [link for link, until in self.strangers.items() if now >= until]:
            link.close()
            self.forget(link)
