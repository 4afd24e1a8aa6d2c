"""What passes between a caller and the sandbox host: requests, responses, and how they are framed.

Not here: the bytes between the host and its slots (`slotwire`), which never hold Python objects.

A program's fate and the service's fate are two different enums. A reward may look at `ProgramOutcome`;
`ServiceOutcome` says that we failed, and says nothing about the program.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

MAX_FRAME_BYTES = 64 * 2**20  # a request with 10 MB of source and stdin fits many times; a runaway peer does not
MAX_OUTPUT_BYTES = 4 * 2**20  # of a program: six times as long in JSON at worst, and 24 MiB of fetched files beside it
FRAME_HEADER = struct.Struct("!I")


class ProgramOutcome(StrEnum):
    """What the program did."""

    OK = "ok"
    EXCEPTION = "exception"  # uncaught, syntax errors included
    EXIT_NONZERO = "exit_nonzero"
    SIGNAL = "signal"  # died by a signal that no limit explains
    WALL_TIMEOUT = "wall_timeout"
    CPU_TIMEOUT = "cpu_timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    REJECTED = "rejected"  # not run: the request itself is too large or malformed


class ServiceOutcome(StrEnum):
    """What became of a request that tells nothing about its program."""

    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


Outcome = ProgramOutcome | ServiceOutcome


class Isolation(StrEnum):
    """Level in force; what each promises stands in docs/sandbox.md. A larger name is a stronger level."""

    L0 = "L0"
    """No walls: to measure what they cost. Never chosen unless asked for."""
    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"
    """L3, and the kernel that programs see is itself held by another one."""


class SandboxDown(Exception):
    """The sandbox host cannot be reached or refused to start; the message says why. Safe to retry later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    wall_seconds: float = 5.0
    """Time from start to end of the program, seconds; queueing excluded."""
    cpu_seconds: float = 5.0
    """CPU of any one process of the program, seconds, rounded up to a whole second."""
    memory_bytes: int = 512 * 2**20
    """Address space each process may add to what is preloaded, bytes."""
    output_bytes: int = 64 * 1024
    """stdout and stderr together, bytes."""
    processes: int = 16
    """Processes and threads alive at once, the first one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: str
    """Chosen by the caller; unique among the calls it has in flight."""
    code: str
    """Python source, run as `__main__`."""
    stdin: str = ""
    """Standard input; at its end the program reads EOF."""
    limits: Limits = Limits()
    seed: int | None = None
    """Seeds `random` and the global generators of numpy and sympy; None draws a fresh one."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files put into the working directory before the run: relative path to content."""
    fetch: Sequence[str] = ()
    """Files to send back after it: paths relative to the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An uncaught exception, as the program's own process reported it."""

    type: str
    """Class name, with its module unless that is builtins."""
    message: str
    """`str(exception)`, cut to 2,000 characters."""
    line: int | None
    """Last line of the program involved, 1 is the first; None when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    id: str
    """`Request.id`."""
    outcome: Outcome
    """A ProgramOutcome, or a ServiceOutcome when we are at fault."""
    exit_code: int | None = None
    """None when it did not exit by itself."""
    signal: str | None = None
    """Name of the signal that ended it (`SIGSEGV`); None when none did."""
    exception: Failure | None = None
    """Set for EXCEPTION and for an uncaught MemoryError."""
    stdout: str = ""
    """Kept up to the cap; bytes that are not UTF-8 are replaced, lone surrogates stay."""
    stderr: str = ""
    """Same; ends with the traceback."""
    value: str | None = None
    """repr of the last expression; None when there is none or it is None."""
    truncated_bytes: int = 0
    """Bytes of output read and dropped; what a killed program still meant to write is not counted."""
    stdout_bytes: int = 0
    """Bytes read from stdout, dropped ones included."""
    stderr_bytes: int = 0
    """Same for stderr."""
    invalid_utf8: bool = False
    """Bytes that are no text were replaced in stdout, stderr or value."""
    kill_reason: str = ""
    """Which limit ended it: `wall`, `cpu`, `output`, `memory`, `processes` (the last two of the whole call), or
    `cancelled`; empty when it ended by itself."""
    run_seconds: float = 0.0
    """Wall time of the program, seconds; queueing excluded."""
    cpu_seconds: float = 0.0
    """CPU of all its processes, seconds."""
    queue_seconds: float = 0.0
    """Wall time between arrival at the host and start, seconds."""
    peak_memory_bytes: int = 0
    """Largest resident set of one of its processes, preloaded modules included, bytes."""
    isolation: str = ""
    """Level in force; empty when nothing was run."""
    failed_probes: tuple[str, ...] = ()
    """Properties the level should have and does not have here (`no_memory_cgroup`)."""
    attempt: int = 1
    """2 when a first try was lost to a fault of ours."""
    node: str = ""
    """Machine it ran on, as the operator named it; the host name otherwise."""
    message: str = ""
    """Why, for REJECTED and for service outcomes."""
    committed: bool = False
    """Of a session's cell: later cells start from what it left."""
    replayed_cells: int = 0
    """Of a session's cell: earlier cells that had to be run again first, because the paused processes were gone."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of those to be fetched the regular files that are there, 16 MB together: relative path to content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    isolation: Isolation
    """Level in force."""
    failed_probes: tuple[str, ...]
    """See Response."""
    slots: int
    """Programs that run at once."""
    preload: tuple[str, ...]
    """Modules the operator asked to be imported before forking."""
    tiers: tuple[str, ...] = ()
    """Sets of preloaded modules a program may be started from; those not needed yet are not up."""
    fork_path: str = "python"
    """`c`: slots run the compiled loop; `python`: it could not be built or used, and a call costs more."""
    node: str = ""
    """See Response."""
    second_kernel: str = ""
    """What holds the kernel that programs see, by evidence: `gvisor`, `kata`, `firecracker`, `microvm`; else empty."""

    @property
    def walls(self) -> Isolation:
        """The level of what we build ourselves, whatever is around it."""
        return Isolation.L3 if self.isolation == Isolation.L4 else self.isolation


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """One message as a length-prefixed JSON frame; plain ASCII, so lone surrogates survive."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return FRAME_HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Messages completed by `data`. Raises ValueError on a frame that cannot be one of ours."""
        self._pending += data
        while len(self._pending) >= FRAME_HEADER.size:
            (length,) = FRAME_HEADER.unpack_from(self._pending)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = FRAME_HEADER.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[FRAME_HEADER.size : end])
            del self._pending[:end]
            yield json.loads(body)


def request_message(request: Request) -> dict[str, Any]:
    limits = request.limits
    return {
        "kind": "run",
        "id": request.id,
        "code": request.code,
        "stdin": request.stdin,
        "seed": fresh_seed() if request.seed is None else request.seed,
        "files": {path: packed_file(content) for path, content in request.files.items()},
        "fetch": list(request.fetch),
        "wall_seconds": limits.wall_seconds,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "processes": limits.processes,
    }


def packed_file(content: Any) -> Any:
    """As JSON can hold it: text stays, bytes become {"base64": text}; what is so already stays too."""
    return {"base64": base64.b64encode(content).decode()} if isinstance(content, bytes) else content


def unpacked_file(content: Any) -> str | bytes:
    """The inverse of `packed_file`."""
    return content if isinstance(content, str) else base64.b64decode(content["base64"])


def encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def decoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: base64.b64decode(content) for path, content in files.items()}


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(8))


def response_message(response: Response) -> dict[str, Any]:
    """All fields that differ from their defaults."""
    fields = {name: getattr(response, name) for name in Response.__slots__}
    message = {name: value for name, value in fields.items() if value}
    message["kind"] = "response"
    if response.exit_code is not None:
        message["exit_code"] = response.exit_code
    if response.value is not None:
        message["value"] = response.value
    if response.exception is not None:
        message["exception"] = asdict(response.exception)
    if response.files:
        message["files"] = encoded(response.files)
    return message


def parse_outcome(name: str) -> Outcome:
    """Raises ValueError for a name that is neither."""
    return ServiceOutcome(name) if name in ServiceOutcome._value2member_map_ else ProgramOutcome(name)


def parse_response(message: Mapping[str, Any]) -> Response:
    """The inverse of `response_message`. Raises KeyError, TypeError or ValueError on anything else."""
    fields = {name: message[name] for name in Response.__slots__ if name in message}
    fields["outcome"] = parse_outcome(message["outcome"])
    fields["failed_probes"] = tuple(message.get("failed_probes", ()))
    if "exception" in message:
        fields["exception"] = Failure(**message["exception"])
    if "files" in message:
        fields["files"] = decoded(message["files"])
    return Response(**fields)


def info_message(info: HostInfo) -> dict[str, Any]:
    return {"kind": "hello", **asdict(info)}


def parse_info(message: Mapping[str, Any]) -> HostInfo:
    """The inverse of `info_message`."""
    fields = {name: message[name] for name in HostInfo.__slots__}
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return HostInfo(**fields | lists | {"isolation": Isolation(message["isolation"])})
