"""Shared by all parts of the service: its settings, running calls for callers who may wait too long or disconnect, and
decoding requests within bounds.

Not here: HTTP (`app`, `server`), and the APIs (`native`, `dialects`).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec
from msgspec import structs

from rocstar.sandbox import container
from rocstar.sandbox.call import (
    MAX_OUTPUT_BYTES,
    OF_LIMITS,
    Call,
    DaemonSettings,
    Isolation,
    Limits,
    Outcome,
    Response,
    SandboxDown,
    ServiceOutcome,
    SessionLost,
    Usage,
    caller_named,
    fault,
)
from rocstar.sandbox.settings import ISOLATION, Settings, names

if TYPE_CHECKING:
    from rocstar.sandbox.client import SandboxClient
    from rocstar.sandbox.service.native import FrameConnection, HttpReply

LOG = logging.getLogger("rocstar.sandbox")
MAX_BODY_BYTES = 16 * 2**20  # decoding it takes at most 0.1 s, during which no other caller is served
BIG_BODY_BYTES = MEBIBYTE = 2**20
SMALL_BYTES = 2**16  # items up to this size are not counted, and always accepted
TOKEN_SECONDS = 1.0  # between two reads of the token file
STALLED_SECONDS = 5.0  # a connection without progress for this long is closed when others need its memory
HALF_PAIR = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB]..[^\\]{0,5}\Z")  # too near the end for the other half
MAX_PARTS = 1_500_000  # quotes and opening brackets in a body, which take up to 0.2 s to decode
DAEMON_BYTES, SLOT_BYTES = 100 * MEBIBYTE, 4 * MEBIBYTE  # at rest, measured: docs/sandbox-operating.md
SLOTS_PER_CORE = 4  # some programs sleep; more slots only lengthen the longest waiting times
MAX_RETRY_SECONDS = 60
OF_DAEMONS = ("daemons", "slots", "preload", "session_slots", "session_idle_seconds", "max_queue")


def daemon_of(settings: Settings) -> DaemonSettings:
    """Settings of each daemon, with its share of the slots, rounded up."""
    slots = settings.slots or max(1, round(SLOTS_PER_CORE * container.cpus()))
    return DaemonSettings(
        slots=-(-slots // settings.daemons),
        preload=names(settings.preload),
        min_isolation=Isolation(settings.min_isolation),
        session_slots=settings.session_slots,
        session_idle_seconds=settings.session_idle_seconds,
        max_queue=settings.max_queue,
    )


@cache
def default_limits(settings: Settings) -> Limits:
    """Limits of a call that names none."""
    wall, memory = settings.wall_seconds, settings.memory_mb * MEBIBYTE
    return Limits(wall_seconds=wall, cpu_seconds=wall, memory_bytes=memory)


def complaint(settings: Settings) -> str:
    """Why the service cannot be started with these settings; empty when it can."""
    if settings.nodes:
        nodes, usual = names(settings.nodes), Settings()
        if not 0 < len(nodes) == len({*nodes}):
            return f"--nodes {settings.nodes!r} must name services, each once; write http://host:port,http://other:port"
        for name in (name for name in OF_DAEMONS if getattr(settings, name) != getattr(usual, name)):
            return f"--{name.replace('_', '-')} is of services that run programs; with --nodes, give it to these"
    for name in ("daemons", "session_slots", "max_queue", "max_held_mb"):
        if getattr(settings, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}"
    for name in ("patience_seconds", "request_seconds", "session_idle_seconds", "drain_seconds"):
        if not 0 < getattr(settings, name) < math.inf:
            return f"--{name.replace('_', '-')} must be above 0, got {getattr(settings, name):g}"
    if settings.slots < 0 or 0 < settings.slots < settings.daemons:
        return f"--slots {settings.slots} must be at least --daemons {settings.daemons}, or 0 for four per core"
    resting = settings.daemons * DAEMON_BYTES + settings.slots * SLOT_BYTES
    if not settings.nodes and resting > (free := container.host_bytes()):
        of = f"--daemons {settings.daemons} and --slots {settings.slots}"
        return f"{of} take {resting / 1e9:.1f} GB at rest, and {free / 1e9:.1f} GB are free here; lower them"
    if not 0 <= settings.port < 2**16:
        return f"--port must be from 0 to 65535, got {settings.port}"
    if not is_token(settings.token):
        return "the token must be printable ASCII without blanks: it is sent in a header; choose another one"
    if not is_loopback(settings.host) and not settings.token and not settings.open_to_network:
        return (
            f"other machines reach {settings.host}, so anybody there could run programs: set ROCSTAR_SANDBOX_TOKEN or "
            "give --token-file FILE, or say --open-to-network if only friends can reach it"
        )
    if settings.min_isolation not in ISOLATION:
        return f"--min-isolation {settings.min_isolation} is none of {', '.join(ISOLATION)}; give one of them"
    if not settings.wall_seconds > 0 or not settings.memory_mb > 0:
        return "--wall-seconds and --memory-mb must be above 0"
    return over_limits(default_limits(settings), settings)


def over_limits(limits: Limits, settings: Settings) -> str:
    """Which limit is above what the operator allows; empty if none is."""
    for name, most, reason in (
        ("wall_seconds", settings.max_wall_seconds, "; the operator's --max-wall-seconds says so"),
        ("cpu_seconds", settings.max_wall_seconds, "; the operator's --max-wall-seconds says so"),
        ("memory_bytes", settings.max_memory_mb * MEBIBYTE, "; the operator's --max-memory-mb says so"),
        ("output_bytes", MAX_OUTPUT_BYTES, ""),
    ):
        if not getattr(limits, name) <= most:
            return f"{OF_LIMITS}{name} is at most {most:.15g} here, got {getattr(limits, name):.15g}{reason}"
    return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than `localhost` may resolve to any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class BadRequest(Exception):
    """A request that cannot be served: one sentence for a person, and its HTTP status."""

    def __init__(self, sentence: str, status: int = 400, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after = retry_after
        """Seconds after which to retry."""


class Budget:
    """Bytes that the service holds for all callers together."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self.holders: dict[Hold, None] = {}

    def make_room(self) -> bool:
        """Close holders without progress for STALLED_SECONDS, the most stalled first, until the rest fits; returns
        whether it does. Above twice the limit, the largest holders are closed even if they make progress."""
        since = time.monotonic() - STALLED_SECONDS
        stalled = sorted((held for held in self.holders if held.moved <= since), key=lambda held: held.moved)
        largest = sorted((held for held in self.holders if held.size > SMALL_BYTES), key=lambda held: -held.size)
        for most, holders in ((self.most, stalled), (2 * self.most, largest)):
            for held in holders:
                if self.size > most and held.close is not None:
                    held.close()
                    held.end()
        return self.size <= self.most


class Hold:
    """Bytes that the service holds for one caller; released at the end of the context."""

    def __init__(self, budget: Budget, close: Callable[[], object] | None = None) -> None:
        """close: ends a connection whose caller blocks progress; None if the caller waits for the service."""
        self.budget, self.close, self.size, self.moved, self.over = budget, close, 0, 0.0, False

    def resize(self, size: int, *, moved: bool = True, refused: bool = True) -> None:
        """moved: the caller sent or read something. refused: raise BadRequest if there is no room."""
        size = 0 if self.over else max(0, size)
        grown = size - self.size
        self.budget.size, self.size = self.budget.size + grown, size
        if moved or grown == size:  # it held nothing before
            self.moved = time.monotonic()
        if not size:
            self.budget.holders.pop(self, None)
            return
        self.budget.holders[self] = None
        is_over = size > SMALL_BYTES and grown > 0 and self.budget.size > self.budget.most
        if is_over and not self.budget.make_room() and refused:
            self.resize(size - grown, moved=False)
            raise BadRequest("callers hold all the memory set aside for large requests; try again in a second", 503, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.over = True
        if self.size:
            self.resize(0)


class CallerTokens:
    """The tokens that callers may use."""

    def __init__(self, settings: Settings) -> None:
        self.file, self.all, self.read_at, self.problem = settings.token_file, [settings.token], -math.inf, ""
        if self.file:
            with suppress(OSError, ValueError):  # `now` logs it
                self.all = read_tokens(self.file)

    def now(self) -> list[str]:
        if self.file and time.monotonic() > self.read_at + TOKEN_SECONDS:
            self.read_at = time.monotonic()
            try:
                found, problem = read_tokens(self.file), ""
            except (OSError, ValueError) as error:
                found, problem = self.all, f"the tokens stay as they were, for {self.file} cannot be read ({error})"
            if found != self.all:
                LOG.warning("rocstar: %d tokens are accepted now", len(found))
            elif problem != self.problem:
                LOG.warning("rocstar: %s", problem or f"{self.file} can be read again, its tokens are the same")
            self.all, self.problem = found, problem
        return self.all

    def first(self) -> str:
        return self.now()[0]

    def caller_of(self, given: bytes, otherwise: object) -> int:
        """The caller with this token; if no token is required, the caller at `otherwise`. Raises BadRequest."""
        tokens = [token.encode() for token in self.now()]
        if tokens == [b""]:
            return caller_named(otherwise)
        if not any([hmac.compare_digest(given, token) for token in tokens]):
            problem = "this token is unknown here: ask the service's operator" if given else "a token is needed"
            raise BadRequest(f"{problem}; it is sent as `Authorization: Bearer TOKEN`", 401)
        return caller_named(given)


def read_tokens(file: Path) -> list[str]:
    """Raises OSError, and ValueError unless the file is a list of tokens."""
    tokens = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    if not tokens or not all(map(is_token, tokens)):
        raise ValueError("it must contain one token per line, of printable ASCII without blanks")
    return tokens


def is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


Shape = TypeVar("Shape")


class Service:
    """Runs calls over a client. Every call has exactly one Response, after any failure; only a disconnected caller has
    none. Cancelling the task that awaits it ends the program."""

    def __init__(self, settings: Settings, client: SandboxClient) -> None:
        self.settings = settings
        self.client = client
        self.started = time.monotonic()
        self.draining = False
        """The service is shutting down: pending calls are answered, new ones on old connections are refused."""
        self.connections: set[FrameConnection] = set()
        """Open connections that exchange frames."""
        self.tokens = CallerTokens(settings)
        self.budget = Budget(settings.max_held_mb * 2**20)
        self.held_back = 0
        """Calls of batches that have not been submitted yet."""
        self.ended: Callable[[Response], None] = lambda response: None
        """Called with each response, for the metrics."""

    def usage(self) -> Usage:
        usage = self.client.usage()
        return structs.replace(usage, waiting=usage.waiting + self.held_back)

    async def run(self, call: Call, *, waits: bool = False) -> Response:
        """waits: the call waits for room in a full queue, as in a batch; else it is `overloaded` at once."""
        if call.files or len(call.code) > BIG_BODY_BYTES:
            await asyncio.sleep(0)  # other tasks first: encoding this call takes a while
        return await self.outcome_of(call.id, self.client.run(call, waits=waits))

    async def outcome_of(self, name: str, running: Awaitable[Response]) -> Response:
        """The call's response, or one about the service's failure; `name`: the call's id. Raises SessionLost."""
        try:
            response = await running
        except SessionLost:
            raise
        except SandboxDown as error:
            response = fault(name, str(error))
        except Exception as error:  # a bug in rocstar, which must not make a caller wait forever
            LOG.exception("a call failed")
            response = fault(name, f"the service failed: {type(error).__name__}")
        self.ended(response)
        return response

    def retry_headers(self, outcome: Outcome) -> Mapping[str, str]:
        """When to retry, whole seconds: the queue's duration if each slot runs ten programs a second; soon after a
        failure of ours, which another daemon may not share."""
        if outcome is not ServiceOutcome.OVERLOADED:
            return {"retry-after": "1"} if outcome is ServiceOutcome.INTERNAL else {}
        seconds = 1 + self.usage().waiting // (10 * self.client.info().slots)
        return {"retry-after": str(min(seconds, MAX_RETRY_SECONDS))}


class HttpRequest(NamedTuple):
    """One complete HTTP request."""

    service: Service
    body: bytes
    held: Hold


Serve = Callable[[HttpRequest], Awaitable["HttpReply"]]
"""Raises BadRequest."""
Endpoints = dict[tuple[str, str], Serve]
"""By method and path."""


def decode(body: bytes, shape: type[Shape], wrong_field: int = 400) -> Shape:
    """Raises BadRequest; `wrong_field`: the status for JSON of another shape. Strings, names, lists and objects are
    counted before any is decoded; a quote inside a string has a backslash before it."""
    if len(body) > BIG_BODY_BYTES:
        parts = body.count(b"[") + body.count(b"{") + body.count(b'"') - body.count(b'\\"')
        if parts > MAX_PARTS:
            raise BadRequest(f"the request has {parts} parts and at most {MAX_PARTS} are accepted; send several", 413)
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has a wrong field: {error}", wrong_field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        half = HALF_PAIR.search(body[-99:])  # msgspec reports it as a truncated body
        problem = "it has half of a surrogate pair, which is no character" if half else error
        raise BadRequest(f"the request is not valid JSON: {problem}") from error
    except RecursionError:
        raise BadRequest("the request is nested too deeply") from None


encode = msgspec.json.encode
"""Value to JSON; bytes become base64."""
