"""The types of the sandbox: a call, its limits, its response.

Outcomes of programs and of the service are two different enums. A reward may depend on `ProgramOutcome`;
`ServiceOutcome` reports a failure of the sandbox and gives no evidence about the program.
"""

from __future__ import annotations

import zlib
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, field, structs

MAX_OUTPUT_BYTES = 4 * 2**20
"""Largest `Limits.output_bytes`."""
OF_LIMITS = "limit "
"""Prefix of a message that rejects a call for its limits, which the program's author did not choose."""
MAX_BRANCHES = 64
"""Branches in one fork of a session."""
FEW = Meta(max_length=10_000)
"""The decoder refuses a longer collection before it decodes its elements."""


class ProgramOutcome(StrEnum):
    """How the program ended."""

    OK = "ok"
    EXCEPTION = "exception"  # uncaught, syntax errors included
    EXIT_NONZERO = "exit_nonzero"
    SIGNAL = "signal"  # killed by a signal that no limit explains
    WALL_TIMEOUT = "wall_timeout"
    CPU_TIMEOUT = "cpu_timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    REJECTED = "rejected"  # not run: the request itself is too large or malformed


class ServiceOutcome(StrEnum):
    """How the service failed a call; no evidence about its program."""

    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


CALLER: ContextVar[int] = ContextVar("CALLER", default=0)
"""Number of the caller that calls are made for, 24 bits: daemons let callers take turns."""
EVENTS = ("up", "restarted", "lost", "unreachable")
"""Changes of a daemon's state that its client reports."""

if TYPE_CHECKING:
    Outcome = ProgramOutcome | ServiceOutcome
else:
    Outcome = str  # msgspec decodes no union of two string enums; `Response.__post_init__` makes it one of them


class Isolation(StrEnum):
    """Level in force; docs/sandbox.md describes what each guarantees. A larger name is a stronger level."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"


class SandboxDown(Exception):
    """No sandbox daemon can be reached or started; the message gives the reason. Safe to retry later."""


class ForkRefused(ValueError):
    """This session cannot be forked in its present state; the message gives the reason."""


class SessionLost(SandboxDown):
    """The daemon no longer holds this session: its names and files are gone. A service fault."""


class Limits(Struct, frozen=True, kw_only=True):
    wall_seconds: float = 5.0
    """Wall time from start to end of the program, seconds; queueing excluded, and time for which it waits for a CPU
    that others have, up to three times as long."""
    cpu_seconds: float = 5.0
    """CPU of any one process of the program, seconds, rounded up to a whole second. It does not follow `wall_seconds`:
    a program that may compute for 30 s needs both."""
    memory_bytes: int = 512 * 2**20
    """Memory of the whole call, and address space that each process may add to the preloaded modules, bytes."""
    output_bytes: int = 64 * 1024
    """stdout and stderr together, bytes."""
    processes: int = 16
    """Processes and threads alive at once, the first one included."""


class Call(Struct, frozen=True, kw_only=True):
    """One program to run, or one cell of a session."""

    id: str
    """Chosen by the caller and returned in the response."""
    code: str
    """Python source, run as `__main__`."""
    stdin: str = ""
    """Standard input; at its end the program reads EOF."""
    limits: Limits = Limits()
    seed: int | None = None
    """Seeds `random` and the global generators of numpy and sympy; None draws a fresh one."""
    files: Annotated[dict[str, bytes], FEW] = field(default_factory=dict)
    """Files written to the working directory before the run: relative path to content."""
    fetch: Annotated[tuple[str, ...], FEW] = ()
    """Files to return after the run: paths relative to the working directory."""
    patience_seconds: float = 3600.0
    """How long the call may wait for its turn, seconds; then it is `overloaded`."""
    session: str = ""
    """Session that this cell belongs to; empty for a plain program."""
    cell: int = 0
    """Number of the cell in its session, from 1. Only cell 1 may start a session: a daemon that has lost the session
    answers any other with `SessionLost`."""
    branches: Annotated[tuple[str, ...], Meta(max_length=MAX_BRANCHES)] = ()
    """Of a session: instead of running code, start sessions with these names as copies of it."""


class Failure(Struct, frozen=True, kw_only=True):
    """An uncaught exception, as the program's own process reported it."""

    type: str
    """Class name, with its module unless that is `builtins`."""
    message: str
    """`str(exception)`, cut to 2,000 characters."""
    line: int | None
    """Last line of the program in the traceback, 1 is the first; None when there is none."""


class Response(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a call."""

    id: str
    """`Call.id`."""
    outcome: Outcome
    """A ProgramOutcome, or a ServiceOutcome when the sandbox failed."""
    exit_code: int | None = None
    """None when the program did not exit by itself."""
    signal: str | None = None
    """Name of the signal that ended the program (`SIGSEGV`, `SIG37`); None when none did."""
    exception: Failure | None = None
    """Set for EXCEPTION and for an uncaught MemoryError."""
    stdout: str = ""
    """Kept up to the output limit; bytes that are not UTF-8 are replaced."""
    stderr: str = ""
    """Same; ends with the traceback."""
    value: str | None = None
    """repr of the last expression; None when there is none or it is None."""
    truncated_bytes: int = 0
    """Bytes of output read and dropped; output that a killed program had not written yet is not counted."""
    kill_reason: str = ""
    """Which limit ended the program: `wall`, `cpu`, `output`, `memory`, `processes` (the last two of the whole call),
    or `cancelled`; empty when it ended by itself."""
    run_seconds: float = 0.0
    """Wall time of the program, seconds; queueing excluded."""
    cpu_seconds: float = 0.0
    """CPU of all processes of the program, seconds."""
    queue_seconds: float = 0.0
    """Wall time between arrival at the daemon and start, seconds."""
    peak_memory_bytes: int = 0
    """Largest resident set of one process of the program, preloaded modules included, bytes."""
    isolation: str = ""
    """Level in force; empty when nothing was run."""
    failed_probes: tuple[str, ...] = ()
    """Properties that the level should have and lacks on this machine (`no_memory_cgroup`)."""
    attempt: int = 1
    """2 when a first try was lost to a failure of the sandbox."""
    node: str = ""
    """Host name of the machine that ran the program."""
    message: str = ""
    """The reason, for REJECTED and for service outcomes."""
    state_lost: bool = False
    """Of a session's cell: the session's process was ended, so names and files of all its cells are gone."""
    replayed_cells: int = 0
    """Of a session's cell: earlier cells that were run again first, because the session had been lost."""
    images: tuple[bytes, ...] = ()
    """Of a session's cell: figures that the cell left open, as PNG, 8 MB together."""
    files: dict[str, bytes] = field(default_factory=dict)
    """The regular files that exist among `Call.fetch`, 16 MB together: relative path to content. Empty if the program
    was killed or called `os._exit`."""

    def __post_init__(self) -> None:
        kind = ServiceOutcome if self.outcome in ServiceOutcome._value2member_map_ else ProgramOutcome
        structs.force_setattr(self, "outcome", kind(self.outcome))  # ValueError for a value of neither enum


def failed(name: str, outcome: Outcome, message: str) -> Response:
    """The response to a call whose program was not run."""
    return Response(id=name, outcome=outcome, message=message)


def fault(name: str, message: str) -> Response:
    """The response to a call that the sandbox failed; no evidence about the program."""
    return failed(name, ServiceOutcome.INTERNAL, message)


class DaemonInfo(Struct, frozen=True, kw_only=True):
    """A daemon's description of itself when a client connects."""

    isolation: Isolation
    """Level in force."""
    failed_probes: tuple[str, ...] = ()
    """See Response."""
    slots: int = 1
    """Programs that run at once."""
    session_slots: int = 96
    """Sessions alive at once."""
    preload: tuple[str, ...] = ()
    """Modules that the operator listed for import before forking."""
    tiers: tuple[str, ...] = ()
    """Sets of preloaded modules that a program may be started from; those not needed yet are not loaded."""
    node: str = ""
    """See Response."""


class Usage(Struct, frozen=True, kw_only=True):
    """A daemon's report of its load, sent shortly after answers and in reply to a ping."""

    cpu_seconds: float = 0.0
    """CPU of the daemon and of all its descendants so far, seconds."""
    waiting: int = 0
    """Calls in the daemon's queue."""
    running: int = 0
    """Programs and cells that run."""
    sessions: int = 0
    """Sessions alive."""


class DaemonSettings(Struct, frozen=True, kw_only=True):
    """How a daemon is started."""

    slots: int = 2
    """Programs that run at once, sessions excluded."""
    daemons: int = 1
    """Daemons on this machine; each has `slots` slots, on the same cores."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    min_isolation: Isolation = Isolation.L3
    """The daemon refuses to start below this level."""
    skip_plans: int = 0
    """How many of the strongest ways to isolate (`walls.plans.PLANS`) are skipped."""
    groups: bool = True
    """Whether control groups may be used."""
    grace_seconds: float = 5.0
    """A slot that has not answered this long after the deadline is treated as stuck."""
    session_slots: int = 96
    """Sessions alive at once."""
    session_idle_seconds: float = 600.0
    """A session without a cell for this long is ended."""
    max_queue: int = 100_000
    """Calls waiting at once; beyond it a call is `overloaded` immediately."""


def caller_named(*names: object) -> int:
    """A caller's number. Two callers with equal numbers, one pair in sixteen million, share their turns."""
    return zlib.crc32(repr(names).encode()) >> 8
