"""Scripted replacements for parts of a trainer's environment: an engine and a tool service at addresses, and a reward
function. Each injects the faults of kit.py.

The model asks for a program and answers with what it printed; every attempt then earns 1. So any other reward comes
from a fault, and a prompt with the call but without its output shows the model a fault as a tool result.

    engine    /v1/chat/completions (OpenAI) for any trainer; vLLM's endpoints for rocstar
    tools     /run_code (SandboxFusion) for any trainer; an MCP server; frames of rocstar's own sandbox, in a WebSocket
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.calls import render_call
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_named
from rocstar.sandbox import call, wire
from rocstar.sandbox.wire import FrameKind

QUESTION = "What is 6 times 7063? ({})"
PROGRAM = "print(6 * 7063)"
CELLS = ("n = 6", "print(n * 7063)")
"""The same in a notebook, whose second cell needs the first."""
PRINTED = "42378"
RIGHT = f"<answer>\\boxed{{{PRINTED}}}</answer>"
WRONG = "<answer>\\boxed{0}</answer>"
"""The model's answer to anything but PRINTED, and the text of every corrupted answer of an engine."""
OTHERS = "777"
"""The output of another call."""
AWAY_SECONDS = 0.5  # of a service that refuses connections
LATE_SECONDS = 6.0  # longer than the patience of rocstar's own path
TEMPLATE = template_named("compact")
BREAKS = {"dies": 0, "reset": 0, "half-answer": 0.5}
"""The part of an answer that comes before the connection breaks."""
HTML = "<html><body>502 Bad Gateway</body></html>"
COMPLETIONS = ("/v1/chat/completions", "/inference/v1/generate")
WORK = (*COMPLETIONS, "/run_code", "tools/call")
"""Requests that may be corrupted, by path or by the method of a remote procedure call."""
METRICS = """\
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="1048576",num_gpu_blocks="65536"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:num_requests_running{engine="0"} 1.0
vllm:generation_tokens_total{engine="0"} 0.0
vllm:num_preemptions_total{engine="0"} 0.0
"""
WORKER = {"vocab_size": 4096, "max_tokens": 4096, "dtype": "float32", "logprobs_mode": "processed_logprobs"}
RAN = {"status": "Finished", "return_code": 0, "execution_time": 0.0, "stdout": f"{PRINTED}\n", "stderr": ""}
MCP = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "m", "version": "1"}}
TOOL = {"name": "python", "inputSchema": {"type": "object", "properties": {"code": {"type": "string"}}}}
ANSWERS: Mapping[str, Any] = {
    "/metrics": METRICS,
    "/weight_info": {"weight_version": "0"},
    "rocstar_open": {"results": [{**WORKER, "rows": 65, "scheduling": "priority", "name": ""}]},
    "/run_code": {"status": "Success", "message": "", "run_result": RAN},
    "initialize": MCP,
    "tools/list": {"tools": [TOOL]},
}
"""Answers to all other requests of vLLM, SandboxFusion and an MCP server, by the same names."""


def reply_to(prompt: str, programs: Sequence[str]) -> str:
    """The model's next text: the next of `programs`, or its answer to the output of the last of them."""
    for code in programs:
        if code not in prompt:
            return render_call("python", {"code": code})
    return RIGHT if not programs or PRINTED in prompt.rpartition(programs[-1])[2] else WRONG


@cache
def codec() -> Codec:
    """A codec for the script's words."""
    texts = [text_of(TEMPLATE.opening(QUESTION, ())), reply_to("", [PROGRAM]), RIGHT]
    return train_bpe(texts, vocab_size=300, markers=TEMPLATE.markers, word_merges=False)


class FaultyServer:
    """An engine and a tool service in one; use as `async with`. The fault happens in its first request for work; a
    standstill lasts from then on."""

    def __init__(self, misdeed: str, programs: Sequence[str]) -> None:
        """programs: the model asks for these, one a turn, and then answers."""
        self.url, self._misdeed, self._programs = "", misdeed, programs
        self._notebooks: dict[str, list[str]] = {}
        """Cells that have run, by session."""
        self._label = "0"  # of its weights
        self.asked = self.shown = 0
        """Requests for work so far, and prompts that held something else in place of the last program's output."""
        http = Route("/{path:path}", self._http, methods=["GET", "POST"])
        app = Starlette(routes=[WebSocketRoute("/v1/frames", self._frames), http])
        # Closing an idle client's connection would be a fault that was not injected.
        self._config = uvicorn.Config(app, lifespan="off", log_level="critical", timeout_keep_alive=3600)
        self._state, self._port = ServerState(), 0

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._end()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)  # one that refuses starts it once more
        self._end()

    async def _start(self) -> None:
        connected = partial(HttpToolsProtocol, self._config, self._state, {})
        self._server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def _end(self) -> None:
        """At once, as if it were killed."""
        self._server.close()
        for connection in self._state.connections:
            connection.transport.abort()

    async def _strikes(self, cell: int = 1) -> str:
        """The fault of this request for work; part of it has happened when this returns. cell: its place in a notebook;
        only a second one has something to lose."""
        self.asked += 1
        if (misdeed := self._misdeed) == "reset" and cell == 1:
            return ""
        self._misdeed = misdeed if misdeed == "stands-still" else ""
        if misdeed == "gone":
            self._end()
        if misdeed == "refuses":
            self._end()
            await asyncio.sleep(AWAY_SECONDS)
            await self._start()
        if misdeed == "late":
            await asyncio.sleep(LATE_SECONDS)
        return misdeed

    async def _http(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        name = body.get("method", request.url.path)
        misdeed = await self._strikes() if name in WORK else ""
        if misdeed in ("hangs", "stands-still"):
            await request.receive()  # returns when the client has disconnected
        found = HTML if misdeed == "not-json" else self._answer(name, body, misdeed)
        body = (found if isinstance(found, str) else json.dumps(found)).encode()
        whole = {"content-length": str(len(body))}  # if less is sent, uvicorn then breaks the connection
        return Response(_before_break(body, misdeed), headers=whole, media_type="application/json")

    async def _frames(self, socket: WebSocket) -> None:
        """Act as a daemon of rocstar's own sandbox."""
        frames = wire.FrameReader()
        await socket.accept()
        info = call.DaemonInfo(isolation=call.Isolation.L3, slots=4)
        await socket.send_bytes(wire.pack(FrameKind.HELLO, body=wire.encode(info)))
        async for data in socket.iter_bytes():
            for frame in frames.feed(data):
                if frame.kind is FrameKind.PING:
                    await socket.send_bytes(wire.pack(FrameKind.USAGE, body=wire.encode(call.Usage())))
                elif frame.kind is FrameKind.CALL:
                    program = wire.decode_call(frame.body)
                    misdeed = await self._strikes(program.cell)
                    if misdeed != "hangs":
                        answer = self._ran(program, frame.number, misdeed)
                        await socket.send_bytes(_before_break(answer, misdeed))
                    if misdeed in BREAKS:
                        return

    def _ran(self, program: call.Call, number: int, misdeed: str) -> bytes:
        """Frames of a daemon that has run a program, or a cell of a notebook."""
        if misdeed == "reset":
            self._notebooks.clear()
        if program.cell > 1 and program.session not in self._notebooks:
            return wire.pack(FrameKind.LOST, number)
        cells = self._notebooks.setdefault(program.session, [])
        cells.append(program.code)
        printed = PRINTED if PROGRAM in cells or cells[0] == CELLS[0] else "NameError"
        outputs = {"other-call": [OTHERS], "twice": [printed, OTHERS]}.get(misdeed, [printed])
        id = "another" if misdeed == "other-call" else program.id
        responses = [call.Response(id=id, outcome=call.ProgramOutcome.OK, stdout=f"{output}\n") for output in outputs]
        if misdeed == "killed":
            responses = [call.fault(id, "the worker was killed")]
        return b"".join(wire.pack(FrameKind.RESPONSE, number, wire.encode(one)) for one in responses)

    def _answer(self, name: str, body: Any, misdeed: str) -> Any:
        """A text, or a value to be written as JSON."""
        if name not in COMPLETIONS:
            self._label = body.get("new_version", self._label)
            found = ANSWERS.get(name, {"success": True})
            return {"jsonrpc": "2.0", "id": body.get("id"), "result": found} if "jsonrpc" in body else found
        words = WRONG
        if misdeed in ("", "late"):
            words = reply_to(_prompt(body), self._programs)
            self.shown += words == WRONG
        return _completion(words, body, misdeed, self._label)


def _before_break(body: bytes, misdeed: str) -> bytes:
    """The part of the body sent before the connection breaks, if it does."""
    return body[: int(len(body) * BREAKS.get(misdeed, 1))]


def _prompt(body: Any) -> str:
    if "token_ids" in body:
        return codec().decode(body["token_ids"])
    return "\n".join(str(m.get("content") or "") + str(m.get("tool_calls") or "") for m in body["messages"])


def _completion(words: str, body: Any, misdeed: str, label: str) -> dict[str, Any]:
    """In the form of both OpenAI's API and vLLM's token API; each reader finds its own fields."""
    sampling = body.get("sampling_params", {})
    whole = [*codec().encode(words), *sampling.get("stop_token_ids", ())[:1]]
    allowed = whole[: sampling.get("max_tokens")]
    times = 1000 if misdeed == "too-many-tokens" else 1
    half = "\ud800" if misdeed == "half-surrogate" else ""
    logprob = -0.5
    if misdeed == "nan-logprobs":
        logprob = -9999.0 if sampling else float("nan")  # vLLM writes this for one that is not a number
    token_fields = {"token": "", "logprob": logprob, "bytes": None, "top_logprobs": list[str]()}
    ids = allowed * times
    choice = {
        "index": 0,
        "finish_reason": half or ("stop" if allowed == whole else "length"),
        "message": {"role": "assistant", "content": words * times + half},
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": one, **token_fields} for one in ids]},
        "weight_versions": [{"version": "7" if misdeed == "wrong-version" else label, "start": 0, "end": len(ids)}],
    }
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": len(ids) + 1}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def reward_of(misdeed: str) -> Callable[..., list[float]]:
    """A reward function in TRL's signature that earns 1 for the right answer. misdeed: it raises,
    hangs or gives nan, once."""
    left = iter([misdeed])

    def reward(completions: list[str], **columns: Any) -> list[float]:
        strikes = next(left, "")
        if strikes == "raises":
            raise ConnectionError("the judge cannot be reached")
        if strikes == "hangs":
            threading.Event().wait()
        found = [float(RIGHT in text) for text in completions]
        return [float("nan"), *found[1:]] if strikes == "nan" else found

    return reward


def always(completions: list[str], **columns: Any) -> list[float]:
    """The reward of a model that has learnt nothing."""
    return [1.0] * len(completions)
