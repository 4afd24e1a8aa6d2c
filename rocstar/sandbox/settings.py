"""The operator's settings of the service: the one place that names the options of `rocstar sandbox serve`. Imports
nothing slow, because the command line makes its help pages from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

ISOLATION = ("L1", "L2", "L3")  # the names of `call.Isolation`, which would import msgspec

MinIsolation = Annotated[str, Option(metavar="L1|L2|L3", help="Refuse to start below this level.")]
TokenFile = Annotated[
    Path | None, Option(metavar="FILE", help="The service's token, or several, a line each; or $ROCSTAR_SANDBOX_TOKEN.")
]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(help="0 takes a free one.")] = 8700
    daemons: Annotated[int, Option(help="Sandbox daemons; several only on machines with many cores.")] = 1
    slots: Annotated[int, Option(help="Programs that run at once; 0: four per core.")] = 0
    """Of all daemons together."""
    preload: Annotated[str, Option(metavar="A,B", help="Modules imported before programs are forked; '' for none.")] = (
        "numpy,sympy"
    )
    min_isolation: MinIsolation = "L3"
    """Also required of the nodes of a gateway."""
    token_file: TokenFile = None
    """One token per line; each token is one caller with its own share; read again when the file changes."""
    open_to_network: Annotated[bool, Option("--open-to-network", help="A public address without a token.")] = False
    nodes: Annotated[str, Option(metavar="A,B", help="Pass calls on to these services; run none here.")] = ""
    wall_seconds: Annotated[float, Option(help="Wall time of a call that names none.")] = 5.0
    memory_mb: Annotated[int, Option(help="Memory of a call that names none, MiB.")] = 512
    max_wall_seconds: Annotated[float, Option(help="Longest wall time a caller may ask for.")] = 600.0
    max_memory_mb: Annotated[int, Option(help="Most memory a caller may ask for, MiB.")] = 4096
    patience_seconds: Annotated[float, Option(help="How long a single call waits for its turn.")] = 60.0
    max_queue: Annotated[int, Option(help="Calls waiting in a daemon before more are refused.")] = 100_000
    max_held_mb: Annotated[int, Option(help="Large bodies and unread answers held at once, MiB.")] = 96
    """Of all callers, arriving frames and results of notebooks included; items of up to 64 KiB are not counted."""
    request_seconds: Annotated[float, Option(help="Within which a request must have arrived.")] = 30.0
    session_slots: Annotated[int, Option(help="Sessions alive at once in a daemon.")] = 96
    session_idle_seconds: Annotated[float, Option(help="How long a session may be without a cell.")] = 600.0
    drain_seconds: Annotated[float, Option(help="How long calls may take after SIGTERM.")] = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings(ServeOptions):
    token: str = ""
    """Required of every caller, in a header or in the path; empty: none is required. The first of `token_file`, which
    gateways send to nodes."""


def names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
