"""A server that answers what the vLLM engine asks of it, without a model, and fails where a test says how.

What it writes is always token 1 with the log-probability -1; a weights folder is believed unread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

VOCAB = 8
Fault = Callable[[asyncio.StreamWriter], Awaitable[None]]
METRICS = """\
vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="1040",num_gpu_blocks="65"}} 1.0
vllm:kv_cache_usage_perc{{engine="0"}} {used}
vllm:num_requests_running{{engine="0"}} {running}
vllm:generation_tokens_total{{engine="0"}} {produced}
vllm:num_preemptions_total{{engine="0"}} 0.0
"""


class StandIn:
    """Use as `async with StandIn() as server`; `server.faults[path]` is what happens to requests for that path."""

    def __init__(self, **facts: Any) -> None:
        said = {"vocab_size": VOCAB, "max_tokens": 64, "dtype": "float32", "logprobs_mode": "processed_logprobs"}
        self.facts: dict[str, Any] = {**said, "rows": 17, "scheduling": "priority", **facts}
        self.faults: dict[str, Fault] = {}
        self.asked: list[tuple[int, str, dict[str, Any]]] = []
        """Number of the connection, path, body."""
        self.free = asyncio.Event()
        """Completions wait while it is unset."""
        self.free.set()
        self.heeds_aborts = True
        self.used, self.produced = "0.0", 0
        """What /metrics says."""
        self._version, self._connections = "0", 0
        self.asleep: set[str] = set()
        """What it has no memory for."""
        self._decoding: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> StandIn:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        """As if it were killed: connections that are open break."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]

    async def asked_for(self, path: str, times: int = 1) -> None:
        while self.paths().count(path) < times:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self._connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(self._connections, reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            sizes = [line.split(":")[1] for line in head if line.lower().startswith("content-length:")]
            content = await reader.readexactly(int(sizes[0]) if sizes else 0)
            path, _, query = head[0].split(" ")[1].partition("?")
            body = json.loads(content or b"{}") | ({"query": query} if query else {})
            self.asked.append((number, path, body))
            if path in self.faults:
                await self.faults[path](writer)
                return
            found = await self._answer(path, body)
            await send(writer, 404 if found is None else 200, found if isinstance(found, str) else json.dumps(found))

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/sleep":
            self.asleep = {"weights", "kv_cache"}
            return {"status": "sleeping", "level": 2}
        if path == "/wake_up":
            self.asleep.discard(body["query"].partition("=")[2])
            return {"status": "sleeping" if self.asleep else "awake"}
        assert not self.asleep or path not in ("/inference/v1/generate", "/resume"), "vLLM would compute with nothing"
        if path == "/collective_rpc":
            assert body["method"] != "rocstar_load" or "weights" not in self.asleep
            facts = {"name": (body["args"] or [""])[-1], **self.facts}
            return {"results": [facts if body["method"] == "rocstar_open" else {}]}
        if path == "/metrics":
            return METRICS.format(used=self.used, running=len(self._decoding), produced=self.produced)
        if path == "/update_weight_version":
            self._version = body["new_version"]
        if path == "/abort_requests" and self.heeds_aborts:
            for name in body["request_ids"]:
                if name in self._decoding:
                    self._decoding[name].set()
        if path == "/inference/v1/generate":
            return await self._complete(body)
        known = ("/pause", "/resume", "/abort_requests", "/update_weight_version", "/reset_prefix_cache")
        return {"success": True} if path in known else {"weight_version": self._version} if "info" in path else None

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        name, aborted = f"generate-tokens-{body['request_id']}", asyncio.Event()
        self._decoding[name] = aborted
        ends = [asyncio.create_task(event.wait()) for event in (self.free, aborted)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._decoding[name]
            for end in ends:
                end.cancel()
        tokens = 1 if aborted.is_set() else body["sampling_params"]["max_tokens"]
        self.produced += tokens
        choice = {
            "finish_reason": "abort" if aborted.is_set() else "length",
            "token_ids": [1] * tokens,
            "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}] * tokens},
            "weight_versions": [{"version": self._version, "start": 0, "end": tokens}],
        }
        scored = [None, *({token: {"logprob": -1.0}} for token in body["token_ids"][1:])]
        return {"choices": [choice], "usage": {}, "prompt_logprobs": scored}


async def send(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    content = body.encode()
    writer.write(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)
    await writer.drain()


# -- faults ----------------------------------------------------------------------------------------------------------


async def no_answer(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def broken(writer: asyncio.StreamWriter) -> None:
    """The connection is reset, as by kill -9."""
    writer.transport.abort()


async def cut_short(writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [')
    await writer.drain()


async def drop_by_drop(writer: asyncio.StreamWriter) -> None:
    """An answer that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b" " * (1 << 20))
        await writer.drain()


async def no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()


async def server_error(writer: asyncio.StreamWriter) -> None:
    await send(writer, 500, "EngineDeadError:\n  the engine core died")


def says(body: str, status: int = 200) -> Fault:
    async def say(writer: asyncio.StreamWriter) -> None:
        await send(writer, status, body)

    return say
