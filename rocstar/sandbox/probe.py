"""What a program can really reach here, found by running one. Names say what is missing or exposed."""

from __future__ import annotations

import asyncio

from rocstar.sandbox import slotwire, wire
from rocstar.sandbox.crew import Crew
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request, Response, SandboxDown

PROGRAM = r"""
import ctypes, os, socket, sys

def readable(path):
    try:
        with open(path) as file:
            file.read(1)
        return True
    except OSError:
        return False

def writable(folder):
    try:
        os.close(os.open(f"{folder}/.probe", os.O_CREAT | os.O_WRONLY))
    except OSError:
        return False
    os.unlink(f"{folder}/.probe")
    return True

def network():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
        return True
    except OSError:
        return False

def may_signal(pid):
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False

if any(readable(path) for path in ("/etc/hosts", "/etc/group", "/etc/hostname", "/etc/fstab")):
    print("files_visible")
if any(writable(folder) for folder in ("/", "/usr", "/var/tmp", "/dev", sys.prefix, sys.base_prefix)):
    print("files_writable")
if readable(f"/proc/{os.getppid()}/stat"):
    print("proc_visible")
if network():
    print("network_reachable")
if os.getppid() != 1 and may_signal(os.getppid()):
    print("processes_signalable")
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    print("namespaces_allowed")
"""


async def failed(crew: Crew) -> tuple[str, ...]:
    """Properties missing in force. Raises SandboxDown when not even this program runs."""
    request = Request(id="probe", code=PROGRAM, limits=Limits(wall_seconds=20.0))
    response = await run(crew, request)
    if response is None or response.outcome is not ProgramOutcome.OK:
        seen = "its slot died" if response is None else f"{response.outcome}: {response.stderr.strip()[-300:]}"
        raise SandboxDown(f"the sandbox started as {crew.plan.level} but cannot run a program ({seen})")
    return tuple(dict.fromkeys([*crew.walls_failed, *response.stdout.split()]))


async def run(crew: Crew, request: Request) -> Response | None:
    lane = crew.ready.pop()
    answered: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
    message = wire.request_message(request)
    lane.run(message, slotwire.pack_task(message), answered.set_result)
    return await answered
