"""What the service's tests share: a plain client, and a scripted sandbox for the tests of the queue."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rocstar.sandbox.service.admission import Admission, Policy
from rocstar.sandbox.service.ledger import Ledger
from rocstar.sandbox.wire import ProgramOutcome, Request, Response


class Http:
    """Requests to one service; each returns (status, decoded body, headers)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data=body, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, decoded(reply.read()), reply.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, decoded(error.read()), error.headers

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.send("GET", path, **headers)[:2]

    def post(self, path: str, message: Any, **headers: str) -> tuple[int, Any]:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self.send("POST", path, body, **headers)[:2]

    def run(self, code: str, **fields: Any) -> Any:
        status, response = self.post("/v1/run", {"code": code, **fields})
        assert status == 200, response
        return response

    def socket(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), 30)


class Notebook:
    """A session of the service."""

    def __init__(self, http: Http, name: str) -> None:
        self.http = http
        self.name = name
        self.path = f"/v1/sessions/{name}"

    @classmethod
    def open(cls, http: Http, **fields: Any) -> Notebook:
        status, state = http.post("/v1/sessions", fields)
        assert status == 201, state
        return cls(http, state["session"])

    def run(self, code: str, **fields: Any) -> Any:
        status, response = self.http.post(f"{self.path}/cells", {"code": code, **fields})
        assert status == 200, response
        return response

    def branch(self) -> Notebook:
        status, state = self.http.post(f"{self.path}/branch", b"")
        assert status == 201, state
        return Notebook(self.http, state["session"])

    def close(self) -> int:
        return self.http.send("DELETE", self.path)[0]


@contextmanager
def running_cell(notebook: Notebook, code: str = "import time; time.sleep(300)") -> Iterator[None]:
    """A cell that runs while the context is open, and whose caller hangs up at its end."""
    http = notebook.http
    with http.socket() as connection:
        body = json.dumps({"code": code}).encode()
        head = f"POST {notebook.path}/cells HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 1)
        yield


def decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it comes true; the time is a bound on a wait, not a measurement."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class ScriptedSandbox:
    """Keeps every call until a test lets it go."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.calls: dict[str, asyncio.Future[Response]] = {}
        self.cancelled: list[str] = []

    async def run(self, request: Request) -> Response:
        self.started.append(request.id)
        self.calls[request.id] = asyncio.get_running_loop().create_future()
        try:
            return await self.calls[request.id]
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise

    def answer(self, name: str) -> None:
        self.calls[name].set_result(Response(id=name, outcome=ProgramOutcome.OK))


def admission(sandbox: ScriptedSandbox, **policy: Any) -> Admission:
    values = {"slots": 4, "runnable": 2, "young_seconds": 1000.0, "max_queue": 10, **policy}
    return Admission(sandbox, Policy(**values), Ledger(1).row(0))


def request(name: str) -> Request:
    return Request(id=name, code="")


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


def checkout(variable: str, what: str) -> Path:
    """A checkout of somebody else's client, named by the environment; the test is skipped without one."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"set {variable} to a checkout of {what} to run its own client against the service")
    return Path(folder)
