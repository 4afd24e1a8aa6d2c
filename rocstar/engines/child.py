"""The other end of `process.py`: an engine in a process of its own does what the frames of its parent say, and ends
when the parent closes the connection or dies. Not here: which engine it is (torch_child.py)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rocstar.engines.process import (
    Abort,
    Answer,
    CloseSession,
    EngineSettings,
    Facts,
    FromChild,
    Generate,
    Open,
    TakeWeights,
    decode_to_child,
    pack,
    read_frame,
)
from rocstar.errors import ConfigError, RocstarError
from rocstar.protocols import Engine
from rocstar.types import Completion, EngineLoad, Weights

PR_SET_PDEATHSIG = 1
FACTS_SECONDS = 0.1  # between two looks at what the engine holds; a scheduler acts on no finer grain
Opening = Callable[[EngineSettings], Awaitable[Engine]]
"""Makes the engine. Raises ConfigError, EngineUnavailable."""


def run(opening: Opening, arguments: Sequence[str]) -> int:
    """Life of the process; `arguments` are the descriptor of its connection. Returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["ROCSTAR_PARENT"]):
        return 1
    with suppress(EOFError, ConnectionError):  # the parent is gone, or has closed us
        asyncio.run(serve(socket.socket(fileno=int(arguments[0])), opening))
    return 0


async def serve(connection: socket.socket, opening: Opening) -> None:
    """Until the parent closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: FromChild) -> None:
        writer.write(pack(message))

    first = decode_to_child(await read_frame(reader))
    assert isinstance(first, Open)
    try:
        engine = await opening(first.settings)
    except Exception as error:  # the parent says it
        send(failed(first.number, error))
        await writer.drain()
        return
    child = Child(engine, send)
    child.tell_facts()
    send(Answer(first.number))
    child.start(child.tell_facts_always())
    while True:
        await child.obey(decode_to_child(await read_frame(reader)))


class Child:
    """One engine and the connection to who asks for it."""

    def __init__(self, engine: Engine, send: Callable[[FromChild], None]) -> None:
        self._engine, self._send = engine, send
        self._said: EngineLoad | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def tell_facts(self) -> None:
        load = self._engine.load()
        if load != self._said:
            self._said = load
            self._send(Facts(load, time.process_time()))

    async def tell_facts_always(self) -> None:
        while True:
            await asyncio.sleep(FACTS_SECONDS)
            self.tell_facts()

    async def obey(self, message: object) -> None:
        """Begin what a message asks for."""
        if isinstance(message, Generate):
            self.start(self._answered(message.number, partial(self._generate, message)))
        elif isinstance(message, Abort):
            await self._engine.abort(str(message.number))
        elif isinstance(message, CloseSession):
            await self._engine.close_session(message.session_id)
        elif isinstance(message, TakeWeights):
            weights = Weights(version=message.version, folder=message.folder)
            self.start(self._answered(message.number, partial(self._engine.load_weights, weights)))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, message: Generate) -> Completion:
        return await self._engine.generate(
            message.token_ids, message.sampling, request_id=str(message.number), session_id=message.session_id
        )

    async def _answered(self, number: int, work: Callable[[], Awaitable[Completion | None]]) -> None:
        """The facts go first: whoever has the answer has them too."""
        try:
            answer = Answer(number, completion=await work())
        except Exception as error:  # the parent must hear of a bug too, or waits for ever
            answer = failed(number, error)
        self.tell_facts()
        self._send(answer)


def failed(number: int, error: Exception) -> Answer:
    sentence = str(error) if isinstance(error, RocstarError) else repr(error)
    return Answer(number, error=sentence, is_config=isinstance(error, ConfigError))
