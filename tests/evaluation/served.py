"""An OpenAI-compatible chat endpoint in a thread, which says what a script tells it and counts what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Raw:
    """An answer that is sent as it stands; without a status the connection is closed and nothing is sent."""

    status: int
    content: bytes = b"{}"


Said = Mapping[str, Any] | int | Raw
"""An assistant message, or the status of a refusal."""
Script = Callable[[Mapping[str, Any]], Said]
"""The body of a request -> what is said."""


class Endpoint:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[Mapping[str, Any]] = []
        """Of all requests, in their order."""
        self.keys: set[str | None] = set()
        self.url = ""

    @property
    def prompts(self) -> list[str]:
        """First user message of each request that opens a conversation."""
        opened = (
            body["messages"] for body in self.bodies if all(m["role"] in ("system", "user") for m in body["messages"])
        )
        return [next(m["content"] for m in messages if m["role"] == "user") for messages in opened]


def text(content: str, *, finish: str | None = "stop", tokens: int | None = None) -> Mapping[str, Any]:
    return {"content": content, "finish": finish, "tokens": tokens}


def call(name: str, arguments: str, content: str = "") -> Mapping[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": content, "tool_calls": [{"id": "abc", "type": "function", "function": function}]}


@contextmanager
def served(script: Script, refusal: str = "no") -> Iterator[Endpoint]:
    """refusal: what is said with a status."""
    endpoint = Endpoint(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            endpoint.bodies.append(body)
            endpoint.keys.add(self.headers.get("authorization"))
            said = endpoint.script(body)
            if isinstance(said, int):
                said = Raw(said, json.dumps({"error": {"message": refusal}}).encode())
            elif not isinstance(said, Raw):
                said = Raw(200, json.dumps(answer(body["messages"], said)).encode())
            self.close_connection = not said.status
            if said.status:
                self.send(said.status, said.content)

        def send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(messages: Sequence[Mapping[str, Any]], said: Mapping[str, Any]) -> dict[str, Any]:
    """Words are its tokens: of all messages, and of what is said."""
    message = {key: said[key] for key in ("content", "tool_calls") if key in said}
    written = said.get("tokens") or len(str(said["content"]).split()) + 5 * len(said.get("tool_calls", ()))
    read = sum(len(str(one["content"]).split()) + 5 * len(one.get("tool_calls") or ()) for one in messages)
    usage = {"prompt_tokens": read, "completion_tokens": written}
    finish = said.get("finish", "stop")
    more = {key: said[key] for key in ("rocstar", "model") if key in said}
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": usage, **more}
