"""What the service's tests share: starting one, a plain client, and a scripted sandbox."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rocstar.sandbox.call import Call, DaemonInfo, Isolation, ProgramOutcome, Response, Usage
from tests.sandbox.driver import eventually

START = """
import json, sys
from pathlib import Path
from rocstar.sandbox.service import serve
from rocstar.sandbox.settings import Settings
given = json.loads(sys.argv[1])
given["token_file"] = Path(given["token_file"]) if "token_file" in given else None
settings = Settings(**given)
sys.exit(serve(settings, lambda sentence: print(sentence, file=sys.stderr, flush=True)))
"""
SMALL: Mapping[str, Any] = {"port": 0, "preload": "", "slots": 2}


class RunningService:
    """A service in a process of its own. Raises RuntimeError with its own words when it does not come up."""

    def __init__(self, first: str = "", **settings: Any) -> None:
        """first: code that the process runs before."""
        given = json.dumps({**SMALL, **settings})
        self.process = subprocess.Popen(
            [sys.executable, "-c", first + START, given], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr is not None
        said = self.process.stderr.readline() + self.process.stderr.readline()  # that it starts, and where it listens
        found = re.search(r"http://\S+", said)
        if found is None:
            raise RuntimeError(said + self.process.communicate()[1])
        self.url = found[0]

    def stop(self) -> int:
        """Drain it; its exit code."""
        self.process.terminate()
        code = self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def running(**settings: Any) -> Iterator[str]:
    """The URL of a service for the time being."""
    service = RunningService(**settings)
    try:
        yield service.url
    finally:
        service.stop()


class Http:
    """Requests to one service, `http://host:port` or with `/token/T` behind; each returns (status, decoded body)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, method: str, path: str, body: bytes | None, **headers: str) -> tuple[int, Any, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data=body, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, decoded(reply.read()), reply.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, decoded(error.read()), error.headers

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.send("GET", path, None, **headers)[:2]

    def post(self, path: str, message: Any, **headers: str) -> tuple[int, Any]:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self.send("POST", path, body, **headers)[:2]

    def run(self, code: str, **fields: Any) -> Any:
        status, response = self.post("/v1/run", {"code": code, **fields})
        assert status == 200, response
        return response

    def status(self, name: str) -> Any:
        return self.get("/v1/status")[1][name]

    def waits(self, single: str, many: str) -> tuple[float, float]:
        """Seconds that a call of one token waited beside forty of another, and the longest that one of those did."""

        def run(token: str, seconds: float) -> float:
            message = {"code": f"import time; time.sleep({seconds})"}
            return float(self.post("/v1/run", message, Authorization=f"Bearer {token}")[1]["queue_seconds"])

        with ThreadPoolExecutor(40) as pool:
            crowd = [pool.submit(run, many, 0.2) for _ in range(40)]
            assert eventually(lambda: self.get("/v1/status", Authorization=f"Bearer {many}")[1]["queue"] > 20)
            return run(single, 0), max(each.result() for each in crowd)

    def answers(self) -> bool:
        try:
            return self.get("/ping") == (200, "pong")
        except OSError:
            return False

    def connect(self) -> socket.socket:
        host, port = self.url.split("/")[2].split(":")
        return socket.create_connection((host, int(port)), 30)

    @contextmanager
    def under_way(self, path: str, message: Any, running: int = 1) -> Iterator[socket.socket]:
        """A request whose programs run while the context is open, and whose caller hangs up at its end."""
        with self.connect() as connection:
            body = json.dumps(message).encode()
            whole = "/" + "/".join([*self.url.split("/")[3:], path[1:]])
            head = f"POST {whole} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert eventually(lambda: self.status("running") == running)
            yield connection


SLEEPER: dict[str, Any] = {"code": "import time; time.sleep(300)", "limits": {"wall_seconds": 400}}


def batch_of(*codes: str) -> dict[str, Any]:
    """A batch of code-judge, of programs with the service's own limits."""
    return {"type": "batch", "submissions": [{"type": "python", "solution": code} for code in codes]}


def decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


class ScriptedClient:
    """In place of a SandboxClient: keeps every call until a test lets it go."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots
        self.calls: dict[str, asyncio.Future[Response]] = {}
        self.patience: dict[str, float] = {}
        self.cancelled: list[str] = []

    async def run(self, call: Call, *, waits: bool = False) -> Response:
        self.calls[call.id] = asyncio.get_running_loop().create_future()
        self.patience[call.id] = call.patience_seconds
        try:
            return await self.calls[call.id]
        except asyncio.CancelledError:
            self.cancelled.append(call.id)
            raise

    def answer(self, name: str, **fields: Any) -> None:
        self.calls.pop(name).set_result(Response(id=name, outcome=ProgramOutcome.OK, **fields))

    def info(self) -> DaemonInfo:
        return DaemonInfo(isolation=Isolation.L1, slots=self.slots)

    def usage(self) -> Usage:
        return Usage()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)
