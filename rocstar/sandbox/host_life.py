"""A host's life: what it finds out about the machine and takes of it before it serves, and gives back afterwards.

Not here: serving (`host`)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rocstar.sandbox import groups, jail, launcher, probe, second_kernel, stale, watch, wire
from rocstar.sandbox.crew import Crew, Terms
from rocstar.sandbox.groups import Groups
from rocstar.sandbox.host import Host
from rocstar.sandbox.lane import Lane
from rocstar.sandbox.roster import Roster
from rocstar.sandbox.session_desk import SessionTerms
from rocstar.sandbox.wire import HostInfo, Isolation


def run(config: Mapping[str, Any]) -> None:
    """Serve until the client closes or its process dies."""
    connection = socket.socket(fileno=config["fd"])
    connection.setblocking(False)
    with ExitStack() as given_back:
        hold_workdirs(config["workdirs"], given_back)
        counted = groups.found() if config.get("groups", True) else Groups()
        given_back.callback(counted.close)
        terms = Terms(
            size=config["slots"],
            grace_seconds=config["grace_seconds"],
            workdirs=config["workdirs"],
            compiled=config["compiled"],
            groups=counted,
        )
        asyncio.run(serve(connection, Roster(config["preload"], terms, permitted(config)), config))


def hold_workdirs(workdirs: str, given_back: ExitStack) -> None:
    """Make the folder for working directories and lock it; remove those of hosts that are dead."""
    folder = Path(workdirs)
    with suppress(OSError):  # where it cannot be made, the ways to isolate that need it say so
        stale.sweep(folder.parent, launcher.WORKDIRS)
        _, lock = stale.made_and_locked(lambda: folder)
        given_back.callback(os.close, lock)


def permitted(config: Mapping[str, Any]) -> Sequence[jail.Plan]:
    """The last plan has no walls: it is tried only where that was asked for by name."""
    plans = jail.PLANS if config["min_isolation"] == Isolation.L0 else jail.PLANS[:-1]
    return plans[config["skip_plans"] :]


async def serve(connection: socket.socket, roster: Roster, config: Mapping[str, Any]) -> None:
    """Bring the first slots up, then serve until the client closes or its process dies."""
    loop = asyncio.get_running_loop()
    try:
        crew = await roster.start()
        inner = second_kernel.name(second_kernel.gathered())
        info = checked_info(roster, crew, await probe.failed(crew), config, inner)
    except wire.SandboxDown as error:
        await loop.sock_sendall(connection, wire.encode_frame({"kind": "refused", "message": str(error)}))
        return
    sessions = SessionTerms(slots=config["session_slots"], idle_seconds=config["session_idle_seconds"])
    host = Host(roster, info, sessions)
    await loop.connect_accepted_socket(lambda: host, connection)
    with suppress(OSError):  # before Linux 5.3 only the closed connection tells
        loop.add_reader(os.pidfd_open(config["parent"]), host.gone.set)
    lost = asyncio.create_task(roster.failed.wait())
    gone = asyncio.create_task(host.gone.wait())
    watching = asyncio.create_task(watch.watch(lambda: lanes(host)))
    await asyncio.wait((lost, gone, watching), return_when=asyncio.FIRST_COMPLETED)


def lanes(host: Host) -> Iterator[Lane]:
    for crew in host.roster.crews.values():
        yield from crew.lanes.values()
    yield from host.desk.lanes


def checked_info(
    roster: Roster, crew: Crew, failed: tuple[str, ...], config: Mapping[str, Any], inner: str
) -> HostInfo:
    """`inner`: name of the second kernel. Raises SandboxDown when the level in force is below the one asked for."""
    level = level_of(crew.plan.level, inner)
    wanted = Isolation(config["min_isolation"])
    if level < wanted:
        raise wire.SandboxDown(
            f"the sandbox reaches isolation {level} here and min_isolation asks for {wanted}; {advice(level, wanted)} "
            f"({'; '.join(roster.problems) or 'every way to isolate was tried that this machine has'})"
        )
    return HostInfo(
        isolation=level,
        failed_probes=failed,
        slots=config["slots"],
        preload=tuple(config["preload"]),
        tiers=tuple(tier.name for tier in roster.order),
        fork_path=crew.fork_path,
        node=config["node"] or socket.gethostname(),
        second_kernel=inner,
    )


def level_of(walls: str, inner: str) -> Isolation:
    """A second kernel adds to namespaces and replaces none of what they promise: L2 in a virtual machine stays L2."""
    return Isolation.L4 if inner and walls == Isolation.L3 else Isolation(walls)


def advice(level: Isolation, wanted: Isolation) -> str:
    if level == Isolation.L3:
        return "run it in gVisor, Kata or Firecracker, or lower sandbox.min_isolation"
    return "lower sandbox.min_isolation or permit namespaces"
