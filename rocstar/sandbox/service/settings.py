"""What an operator decides about the service, and what is refused. Not here: what a caller decides (`shapes`)."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

from rocstar.sandbox.wire import Limits

LOOPBACK_NAMES = ("localhost",)
SLOTS_PER_CORE = 4  # more only lengthens the tail of the waiting times
RUNNABLE_PER_CORE = 2  # one computes while the other is being forked, wiped or answered


def default_slots() -> int:
    return SLOTS_PER_CORE * len(os.sched_getaffinity(0))


def default_runnable() -> int:
    return RUNNABLE_PER_CORE * len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8700
    """TCP port; 0 takes a free one."""
    workers: int = 1
    """Processes that answer HTTP; each has its share of the slots. One serves a few thousand calls a second."""
    slots: int = 8
    """Programs alive at once, all workers together."""
    runnable: int = 4
    """Programs younger than `young_seconds` at once, all workers together: what is admitted while there are slots."""
    young_seconds: float = 0.1
    """Age from which a program no longer counts as runnable: it sleeps, or is one of few that compute for long."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    """Modules imported before forking."""
    min_isolation: str = "L1"
    """The service does not start below this level."""
    token: str = ""
    """Asked of every caller, in a header or in the path (see `guard`); empty asks nothing."""
    open_to_network: bool = False
    """The operator said that an address other machines reach needs no token."""
    limits: Limits = field(default_factory=Limits)
    """Limits of a call that names none."""
    max_wall_seconds: float = 600.0
    """Longest `wall_seconds` and `cpu_seconds` a caller may ask for."""
    max_memory_bytes: int = 4 * 2**30
    """Most `memory_bytes` a caller may ask for."""
    patience_seconds: float = 60.0
    """How long a single call waits for its turn, when it does not say; then it is `overloaded`."""
    batch_patience_seconds: float = 3600.0
    """Same for each call of a batch."""
    max_queue: int = 100_000
    """Calls waiting in one worker; beyond it a call is `overloaded` at once."""
    max_batch: int = 50_000
    """Calls in one batch."""
    max_body_bytes: int = 32 * 2**20
    """Longest request body."""
    request_seconds: float = 30.0
    """Time to send a whole request, from its first byte."""
    keep_alive_seconds: float = 65.0
    """How long a connection may stay open without a request: longer than the 60 s after which proxies let go."""
    max_sessions: int = 1000
    """Sessions held at once, all workers together."""
    session_idle_seconds: float = 3600.0
    """How long a session may be without a cell; then it is forgotten."""
    drain_seconds: float = 120.0
    """How long calls may still take after SIGTERM."""


def complaint(settings: Settings) -> str:
    """Why the service cannot be started so; empty when it can."""
    if settings.workers < 1 or settings.slots < settings.workers:
        return f"--slots {settings.slots} must be at least --workers {settings.workers}, and both at least 1"
    if not settings.runnable >= 1:
        return f"--runnable must be at least 1, got {settings.runnable}"
    if settings.max_sessions < settings.workers or not settings.session_idle_seconds > 0:
        return (
            f"--max-sessions must be at least --workers, got {settings.max_sessions}, "
            f"and --session-idle-seconds above 0, got {settings.session_idle_seconds:g}"
        )
    if not 0 <= settings.port < 2**16:
        return f"--port must be from 0 to 65535, got {settings.port}"
    if not is_loopback(settings.host) and not settings.token and not settings.open_to_network:
        return (
            f"other machines reach {settings.host}, so anybody there could run programs: give --token SECRET, "
            "or say --open-to-network if only friends can reach it"
        )
    return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name that is not `localhost` may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


def share(total: int, workers: int) -> int:
    """Each worker's part, rounded up."""
    return -(-total // workers)
