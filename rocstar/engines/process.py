"""An engine in a process of its own, which can be killed and started again.

Frames go over a socket pair, each 4 bytes of length and a MessagePack value. Weights do not: the child reads them from
a folder. The child ends with its parent, however the parent ends (`support/child.py`).

    parent -> child   OpenEngine first of all, then Generate, Abort, CloseSession, TakeWeights, Sleep
    child -> parent   one EngineAnswer for each OpenEngine, Generate, TakeWeights and Sleep; LoadReport when the load
                      changes

Below are the frames, the parent's side and the child's. Not here: when an engine is healthy or is started
again (rollout/fleet.py); which engine the child opens (`opened` of torch_engine.py).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import DecodeError, Struct, msgpack
from msgspec.structs import replace as with_fields

from rocstar.engines.base import NOTHING, with_earlier
from rocstar.errors import ConfigError, EngineUnavailable, RocstarError
from rocstar.protocols import Engine, NewestWeights, SleepingEngine
from rocstar.support.child import child_command, child_environment
from rocstar.support.processes import how_ended
from rocstar.types import Completion, EngineLoad, Sampling, Weights

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 2**20  # ten million token ids; anything longer is not a frame
START_SECONDS = 600.0  # to import torch and read a model of many gigabytes from a slow disk
END_SECONDS = 2.0  # for a process that has closed its socket to end
REPORT_SECONDS = 0.1  # between two reports of the engine's load; a scheduler needs no finer grain


class EngineSettings(Struct, frozen=True, kw_only=True):
    """Settings of the engine in the child."""

    folder: str
    """Hugging Face model folder."""
    version: int = 0
    """Policy version of the weights there."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    gpus: tuple[str, ...] = ()
    """GPUs that the engine sees, as CUDA_VISIBLE_DEVICES names them; none: all that this process sees."""
    dtype: str = "float32"
    rows: int
    positions: int
    kv_tokens: int | None = None
    vocab_size: int
    threads: int = 1
    """Threads that it computes with on a CPU."""


class OpenEngine(Struct, frozen=True, tag=True):
    number: int
    settings: EngineSettings


class Generate(Struct, frozen=True, tag=True):
    number: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    session_id: str


class Abort(Struct, frozen=True, tag=True):
    number: int
    """Number of the Generate to cancel."""


class CloseSession(Struct, frozen=True, tag=True):
    session_id: str


class TakeWeights(Struct, frozen=True, tag=True):
    number: int
    version: int
    folder: str


class Sleep(Struct, frozen=True, tag=True):
    number: int


class EngineAnswer(Struct, frozen=True, tag=True):
    number: int
    completion: Completion | None = None
    error: str | None = None
    """A sentence if it failed."""
    is_config: bool = False
    """The error is a ConfigError."""


class LoadReport(Struct, frozen=True, tag=True):
    load: EngineLoad


ToChild = OpenEngine | Generate | Abort | CloseSession | TakeWeights | Sleep
FromChild = EngineAnswer | LoadReport
encode = msgpack.Encoder().encode
decode_to_child = msgpack.Decoder(ToChild).decode
decode_from_child = msgpack.Decoder(FromChild).decode


def pack(message: ToChild | FromChild) -> bytes:
    """A frame's bytes."""
    body = encode(message)
    return HEADER.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError when the other end has closed, ValueError for an invalid frame."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


class ProcessEngine:
    """Engine whose arithmetic is in a child process, `main` of MODULE (`support/child.py`).

    Nothing runs before the first `restart`. When the process ends, waiting calls raise EngineUnavailable with how it
    ended; so do all calls before the next `restart`."""

    def __init__(self, settings: EngineSettings, *, module: str = "rocstar.engines.torch_engine") -> None:
        self._settings = settings
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = 0
        self._asked: dict[int, asyncio.Future[EngineAnswer]] = {}
        self._generating = 0
        self._ended = "has not been started"
        self._load = self._earlier = NOTHING

    @property
    def pid(self) -> int | None:
        """None while no process runs."""
        return self._process.pid if self._process and self._writer else None

    def whereabouts(self) -> dict[str, str | int]:
        return {"pid": self.pid} if self.pid else {}

    async def restart(self, newest: NewestWeights | None) -> None:
        """End the process and start one; until then calls fail. Raises EngineUnavailable, ConfigError."""
        await self.close()
        self._earlier = self.load()
        self._load = NOTHING
        try:
            await self._spawn()
        except OSError as error:
            raise EngineUnavailable(f"no process could be started for the engine: {error.strerror or error}") from error
        settings, weights = self._settings, newest() if newest else None
        if weights is not None and weights.folder is not None:
            settings = with_fields(settings, folder=weights.folder, version=weights.version)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._call(OpenEngine(self._next(), settings))
        except TimeoutError:
            await self.close()
            raise EngineUnavailable(f"the engine process did not start within {START_SECONDS:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        number = self._next()
        self._generating += 1
        try:
            answer = await self._call(Generate(number, tuple(token_ids), sampling, session_id))
        except asyncio.CancelledError:
            self._send(Abort(number))
            raise
        finally:
            self._generating -= 1
        if answer.completion is None:
            raise EngineUnavailable("the engine process answered without a completion")
        return answer.completion

    def load(self) -> EngineLoad:
        """As the process last reported; counters persist over restarts."""
        load = with_earlier(self._load, self._earlier)
        return replace(load, waiting=max(0, self._generating - load.running))

    async def load_weights(self, weights: Weights) -> None:
        if weights.folder is None:
            raise EngineUnavailable(f"weights {weights.version} are in no folder that another process could read")
        await self._call(TakeWeights(self._next(), weights.version, weights.folder))

    async def sleep(self) -> None:
        if self._writer is None:
            return
        try:
            await self._call(Sleep(self._next()))
        except BaseException:
            await self.close()
            raise

    async def close_session(self, session_id: str) -> None:
        self._send(CloseSession(session_id))

    async def close(self) -> None:
        """Kill the process and wait for its end. Harmless when there is none."""
        if self._process is None or self._reading is None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._reading
        self._process = self._reading = None
        self._ended = "was closed"

    # -- the process --------------------------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *child_command(self._module, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=child_environment({"OMP_NUM_THREADS": "1", **visible(self._settings.gpus)}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._process))

    async def _read(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        """Consumes the child's frames; resolves waiting calls; ends with the process."""
        try:
            while True:
                self._hear(decode_from_child(await read_frame(reader)))
        except (EOFError, OSError):
            self._ended = how_ended(await _ending(process))
        except (ValueError, DecodeError) as error:
            process.kill()
            self._ended = f"sent an invalid message ({error})"
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        for waiter in self._asked.values():
            if not waiter.done():
                waiter.set_exception(self._gone())

    def _hear(self, message: FromChild) -> None:
        if isinstance(message, LoadReport):
            self._load = message.load
            return
        waiter = self._asked.get(message.number)
        if waiter is None or waiter.done():
            return
        if message.error is None:
            waiter.set_result(message)
        else:
            waiter.set_exception((ConfigError if message.is_config else EngineUnavailable)(message.error))

    async def _call(self, message: OpenEngine | Generate | TakeWeights | Sleep) -> EngineAnswer:
        if self._writer is None:
            raise self._gone()
        waiter: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
        self._asked[message.number] = waiter
        self._send(message)
        try:
            return await waiter
        finally:
            del self._asked[message.number]

    def _send(self, message: ToChild) -> None:
        """Never waits: data that a stopped process does not read stays in our memory, a turn's tokens at most."""
        if self._writer is not None:
            self._writer.write(pack(message))

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _gone(self) -> EngineUnavailable:
        return EngineUnavailable(f"the engine process {self._ended}")


def visible(gpus: Sequence[str]) -> dict[str, str]:
    """The environment variable that restricts a process to these GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


async def _ending(process: asyncio.subprocess.Process) -> int:
    """Its exit code; a process that has disconnected but still runs is killed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            return await process.wait()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


# -- the child's side --------------------------------------------------------------------------------------------------

Opening = Callable[[EngineSettings], Awaitable[Engine]]
"""Makes the engine. Raises ConfigError, EngineUnavailable."""


def run(opening: Opening, arguments: Sequence[str]) -> int:
    """`main` of the process; `arguments` are the descriptor of its connection. Returns its exit code."""
    with suppress(EOFError, ConnectionError):  # the parent has ended, or closed the connection
        asyncio.run(serve(socket.socket(fileno=int(arguments[0])), opening))
    return 0


async def serve(connection: socket.socket, opening: Opening) -> None:
    """Until the parent closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: FromChild) -> None:
        writer.write(pack(message))

    first = decode_to_child(await read_frame(reader))
    assert isinstance(first, OpenEngine)
    try:
        engine = await opening(first.settings)
    except Exception as error:  # the parent reports it
        send(failed(first.number, error))
        await writer.drain()
        return
    child = EngineChild(engine, send)
    child.report()
    send(EngineAnswer(first.number))
    child.start(child.report_always())
    while True:
        await child.obey(decode_to_child(await read_frame(reader)))


class EngineChild:
    """One engine and the connection to its parent."""

    def __init__(self, engine: Engine, send: Callable[[FromChild], None]) -> None:
        self._engine, self._send = engine, send
        self._said: EngineLoad | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._generating: dict[int, asyncio.Task[None]] = {}

    def report(self) -> None:
        load = self._engine.load()
        if load != self._said:
            self._said = load
            self._send(LoadReport(load))

    async def report_always(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self.report()

    async def obey(self, message: object) -> None:
        """Start the work that a message requests."""
        if isinstance(message, Generate):
            named = {"request_id": str(message.number), "session_id": message.session_id}
            work = partial(self._engine.generate, message.token_ids, message.sampling, **named)
            task = self.start(self._answered(message.number, work))
            self._generating[message.number] = task
            task.add_done_callback(lambda _: self._generating.pop(message.number))
        elif isinstance(message, Abort):
            if message.number in self._generating:
                self._generating[message.number].cancel()
        elif isinstance(message, CloseSession):
            await self._engine.close_session(message.session_id)
        elif isinstance(message, TakeWeights):
            weights = Weights(version=message.version, folder=message.folder)
            self.start(self._answered(message.number, partial(self._engine.load_weights, weights)))
        elif isinstance(message, Sleep):
            assert isinstance(self._engine, SleepingEngine)
            self.start(self._answered(message.number, self._engine.sleep))

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answered(self, number: int, work: Callable[[], Awaitable[Completion | None]]) -> None:
        """Send the load before the answer, so that the parent knows it when it gets the answer."""
        try:
            answer = EngineAnswer(number, completion=await work())
        except Exception as error:  # the parent must learn of a bug too, or waits without end
            answer = failed(number, error)
        self.report()
        self._send(answer)


def failed(number: int, error: Exception) -> EngineAnswer:
    sentence = str(error) if isinstance(error, RocstarError) else repr(error)
    return EngineAnswer(number, error=sentence, is_config=isinstance(error, ConfigError))
