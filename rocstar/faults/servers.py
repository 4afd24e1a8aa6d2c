"""Stand-ins at addresses: an engine and a tool service that do their work by a script and misbehave as told.

    engine   http   /v1/chat/completions (OpenAI) for any trainer; what rocstar asks of vLLM
    tools    http   /run_code (SandboxFusion) for any trainer
             unix   frames of rocstar's own sandbox daemons

Not here: which fault there is and what follows from it (kit.py)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from rocstar.faults.script import OTHERS, PRINTED, PROGRAM, WRONG, reply_to, was_told
from rocstar.protocols import TextCodec
from rocstar.sandbox import wire
from rocstar.sandbox.call import DaemonInfo, Isolation, ProgramOutcome, Response, Usage
from rocstar.sandbox.wire import FrameKind

AWAY_SECONDS = 0.5  # of a service that refuses
LATE_SECONDS = 3.0  # longer than the patience of rocstar's own path
METRICS = """\
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="1048576"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:num_requests_running{engine="0"} 1.0
vllm:generation_tokens_total{engine="0"} 0.0
vllm:num_preemptions_total{engine="0"} 0.0
"""
FACTS = {"max_tokens": 4096, "dtype": "float32", "logprobs_mode": "processed_logprobs", "rows": 65}
HTML = "<html><body>502 Bad Gateway</body></html>"


class FaultyServer:
    """Use as `async with`. It misbehaves in its first `times` requests for work; None: in all of them."""

    def __init__(self, misdeed: str, times: int | None = 1) -> None:
        self.url = ""
        self.asked = 0
        """Requests for work so far."""
        self._misdeed, self._times, self._place = misdeed, times, 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._place)
        self._place = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._place}"

    async def _listen_again(self) -> None:
        await asyncio.sleep(AWAY_SECONDS)
        await self._listen()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._converse(reader, writer)
        except asyncio.CancelledError:
            pass  # the stand-in ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, its answer, and the end of the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        sizes = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
        content = await reader.readexactly(int(sizes[0]) if sizes else 0)
        path, body = head[0].split(" ")[1].partition("?")[0], json.loads(content or b"{}")
        misdeed = self._next_misdeed() if self._is_work(path, body) else ""
        if await self._breaks(misdeed, writer):
            return
        answer = self._answer(path, body, misdeed)
        answer = answer if isinstance(answer, str) else json.dumps(answer)
        said = (HTML if misdeed == "not-json" else answer).encode()
        kept = said[: len(said) // 2] if misdeed == "half-answer" else said
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(said) + kept)
        await writer.drain()

    def _next_misdeed(self) -> str:
        self.asked += 1
        return self._misdeed if self._times is None or self.asked <= self._times else ""

    async def _breaks(self, misdeed: str, writer: asyncio.StreamWriter) -> bool:
        """Whether there will be no answer."""
        if misdeed in ("refuses", "gone"):
            self._server.close()
            for other in [task for task in self._tasks if task is not asyncio.current_task()]:
                other.cancel()
            if misdeed == "refuses":
                self._tasks.add(asyncio.create_task(self._listen_again()))
        if misdeed in ("refuses", "gone", "dies"):
            writer.transport.abort()
            return True
        if misdeed == "hangs":
            await asyncio.Event().wait()
        if misdeed == "late":
            await asyncio.sleep(LATE_SECONDS)
        return False

    def _is_work(self, path: str, body: Any) -> bool:
        raise NotImplementedError

    def _answer(self, path: str, body: Any, misdeed: str) -> Any:
        raise NotImplementedError


class FaultyEngine(FaultyServer):
    """A model that asks for `programs`, one a turn, and then answers."""

    def __init__(
        self,
        misdeed: str = "",
        times: int | None = 1,
        *,
        programs: tuple[str, ...] = (PROGRAM,),
        codec: TextCodec | None = None,
        after_program: Callable[[], None] = lambda: None,
    ) -> None:
        """codec: where it is asked for token ids. after_program: called when a prompt first holds a program."""
        super().__init__(misdeed, times)
        self.shown: list[str] = []
        """What the model was shown in place of its program's output."""
        self._programs, self._codec, self._after_program = programs, codec, after_program

    def _is_work(self, path: str, body: Any) -> bool:
        return path in ("/v1/chat/completions", "/inference/v1/generate")

    def _answer(self, path: str, body: Any, misdeed: str) -> Any:
        if not self._is_work(path, body):
            return METRICS if path == "/metrics" else self._managed(path, body)
        chat = path.startswith("/v1/chat")
        prompt = self._read(body, chat)
        words = self._words(prompt) if misdeed in ("", "late") else WRONG
        return self._chat(words, misdeed) if chat else self._tokens(words, body["sampling_params"], misdeed)

    def _read(self, body: Any, chat: bool) -> str:
        if not chat:
            assert self._codec
            return self._codec.decode(body["token_ids"])
        return "\n".join(str(m.get("content") or "") + str(m.get("tool_calls") or "") for m in body["messages"])

    def _words(self, prompt: str) -> str:
        if self._programs and self._programs[0] in prompt:
            after, self._after_program = self._after_program, lambda: None
            after()
        if all(code in prompt for code in self._programs) and not was_told(prompt, self._programs):
            self.shown.append(prompt.rpartition(self._programs[-1])[2].strip())
        return reply_to(prompt, self._programs)

    def _chat(self, words: str, misdeed: str) -> dict[str, Any]:
        logprob = float("nan") if misdeed == "nan-logprobs" else -0.5
        words = words + "\ud800" if misdeed == "half-surrogate" else words
        message = {"role": "assistant", "content": words * (5000 if misdeed == "too-many-tokens" else 1)}
        logprobs = {"content": [{"token": words, "logprob": logprob, "bytes": None, "top_logprobs": []}]}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

    def _tokens(self, words: str, asked: Any, misdeed: str) -> dict[str, Any]:
        assert self._codec
        ids = [*self._codec.encode(words), *asked["stop_token_ids"][:1]]
        finish = "stop" if len(ids) <= asked["max_tokens"] else "length"
        ids = ids[: asked["max_tokens"]]
        if misdeed == "too-many-tokens":
            ids += ids[:1] * asked["max_tokens"]
        logprob = -9999.0 if misdeed == "nan-logprobs" else -0.5  # vLLM writes this for one that is not a number
        choice = {
            "finish_reason": "\ud800" if misdeed == "half-surrogate" else finish,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": one, "logprob": logprob} for one in ids]},
            "weight_versions": [{"version": "7" if misdeed == "wrong-version" else "0", "start": 0, "end": len(ids)}],
        }
        return {"choices": [choice], "usage": {}}

    def _managed(self, path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            facts = {"vocab_size": body["args"][0], "scheduling": "priority", "name": "", **FACTS}
            return {"results": [facts if body["method"] == "rocstar_open" else {}]}
        return {"weight_version": "0"} if path == "/weight_info" else {"success": True}


class FaultyTools(FaultyServer):
    """A sandbox that knows PROGRAM."""

    def _is_work(self, path: str, body: Any) -> bool:
        return path == "/run_code"

    def _answer(self, path: str, body: Any, misdeed: str) -> Any:
        ran = {"status": "Finished", "return_code": 0, "execution_time": 0.0, "stderr": ""}
        output = OTHERS if misdeed == "other-call" else PRINTED
        return {"status": "Success", "message": "", "run_result": {**ran, "stdout": f"{output}\n"}}


class FaultyDaemon(FaultyTools):
    """The same as rocstar's client is told of it: frames over a Unix socket."""

    def __init__(self, misdeed: str, times: int | None, path: str) -> None:
        super().__init__(misdeed, times)
        self._path = path

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._path)
        self.url = f"unix:{self._path}"

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info, frames = DaemonInfo(isolation=Isolation.L3, slots=4), wire.FrameReader()
        writer.write(wire.pack(FrameKind.HELLO, body=wire.encode(info)))
        while data := await reader.read(1 << 16):
            for frame in frames.feed(data):
                if frame.kind is FrameKind.PING:
                    writer.write(wire.pack(FrameKind.USAGE, body=wire.encode(Usage())))
                elif frame.kind is FrameKind.CALL and await self._breaks_frames(frame, writer):
                    return

    async def _breaks_frames(self, frame: wire.Frame, writer: asyncio.StreamWriter) -> bool:
        """Answer a call. True: the connection is over."""
        misdeed, call = self._next_misdeed(), wire.decode_call(frame.body)
        if misdeed == "hangs":
            return False  # it goes on to answer pings
        if await self._breaks(misdeed, writer):
            return True
        right, wrong = (Response(id=call.id, outcome=ProgramOutcome.OK, stdout=f"{out}\n") for out in (PRINTED, OTHERS))
        if misdeed == "other-call":
            right = Response(id="another", outcome=ProgramOutcome.OK, stdout=wrong.stdout)
        said = wire.pack(FrameKind.RESPONSE, frame.number, wire.encode(right))
        if misdeed == "twice":
            said += wire.pack(FrameKind.RESPONSE, frame.number, wire.encode(wrong))
        if misdeed == "half-answer":
            said = said[: len(said) // 2]
        writer.write(said)
        await writer.drain()
        return misdeed == "half-answer"
