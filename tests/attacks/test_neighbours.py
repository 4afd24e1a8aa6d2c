"""Hostile programs that run at once, in two slots or beside other processes of the machine, and try to signal to each
other through what they share, or to learn what others do."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from rocstar.sandbox.call import ProgramOutcome, Response
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import promised, tried
from tests.sandbox.support import run

SHARED = ["/usr", "/usr/lib", "/dev/null", "/dev/zero", "/usr/bin/env"]
PAUSE = "import time\ntime.sleep(0.6)\n"


async def during(client: SandboxClient, first: str, second: str) -> tuple[Response, Response]:
    """`second` runs while `first` does."""
    task = asyncio.ensure_future(run(client, first + PAUSE))
    await asyncio.sleep(0.2)
    seen = await run(client, second)
    return await task, seen


@pytest.mark.parametrize("path", [*SHARED, "library"])
async def test_a_lock_on_a_shared_file_is_not_seen_by_another(neighbours: SandboxClient, path: str) -> None:
    name = "__import__('os').__file__" if path == "library" else repr(path)
    take = f"""
import fcntl, os
fd = os.open({name}, os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.fcntl(fd, fcntl.F_OFD_SETLK if hasattr(fcntl, "F_OFD_SETLK") else 37, b"\\0" * 32)
print("taken")
"""
    first, second = await during(neighbours, take, take)
    assert (first.stdout, second.stdout) == ("taken\n", "taken\n")


@pytest.mark.parametrize("kind", ["fcntl.F_WRLCK", "fcntl.F_RDLCK"])
async def test_a_record_lock_is_not_seen_by_another(neighbours: SandboxClient, kind: str) -> None:
    take = f"""
import fcntl, os, struct
fd = os.open("/dev/null", os.O_RDWR)
mine = struct.pack("hhqqi4x", {kind}, 0, 0, 0, 0)
for command in (fcntl.F_SETLK, 37): fcntl.fcntl(fd, command, mine)
other = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
print([struct.unpack_from("h", fcntl.fcntl(fd, command, other))[0] == fcntl.F_UNLCK for command in (fcntl.F_GETLK, 36)])
"""
    first, second = await during(neighbours, take, take)
    assert first.stdout == second.stdout == "[True, True]\n"


async def test_locks_do_not_reach_the_machine_outside(neighbours: SandboxClient) -> None:
    take = "import fcntl, os\nfcntl.flock(os.open('/dev/null', os.O_RDWR), fcntl.LOCK_EX)\n"
    task = asyncio.ensure_future(run(neighbours, take + PAUSE))
    await asyncio.sleep(0.3)
    null = os.open("/dev/null", os.O_RDWR)
    fcntl.flock(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(null)
    assert (await task).outcome is ProgramOutcome.OK


async def test_nothing_can_be_watched(neighbours: SandboxClient) -> None:
    calls = ["libc.inotify_init()", "libc.inotify_init1(0)", "libc.inotify_add_watch(0, b'/usr', 2)"]
    calls += ["libc.fanotify_init(0, 0)", "__import__('fcntl').fcntl(os.open('/usr', 0), 1026, 2)"]
    calls += ["__import__('fcntl').fcntl(os.open('/usr/bin/env', 0), 1024, 0)"]
    response = await run(neighbours, tried(*calls))
    assert response.stdout.split() == ["-1", "-1", "-1", "-1", "OSError", "OSError"]


async def test_pages_of_shared_files_cannot_be_asked_for_or_thrown_out(neighbours: SandboxClient) -> None:
    code = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open("/usr/bin/env", os.O_RDONLY)
area = mmap.mmap(fd, 4096, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
libc.mmap.restype = ctypes.c_void_p
address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)))
print(libc.mincore(address, ctypes.c_size_t(4096), ctypes.create_string_buffer(1)))
print([libc.madvise(address, ctypes.c_size_t(4096), advice) for advice in (12, 20, 21, 25)])
try: os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
except OSError as error: print("OSError")
print(libc.syscall(451, fd, 0, 0, 0))
"""
    assert (await run(neighbours, code)).stdout == "-1\n[-1, -1, -1, -1]\nOSError\n-1\n"


async def test_numbers_of_new_files_do_not_tell_what_others_make(neighbours: SandboxClient) -> None:
    promised(neighbours, "L3")
    make = "[open(str(n), 'w').close() for n in range(700)]\nprint('made')\n"
    look = "import os\n[os.open(name, os.O_CREAT) and os.stat(name).st_ino for name in 'abc']"
    first, second = await during(neighbours, make, look)
    assert (first.stdout, second.value) == ("made\n", "[2, 3, 4]")


async def test_space_of_another_is_not_seen(neighbours: SandboxClient) -> None:
    fill = "open('big', 'wb').write(bytes(40 * 2**20))\nprint('filled')\n"
    look = """
import os
try: print(os.statvfs(".").f_bfree == os.statvfs(".").f_blocks)
except PermissionError: print(True)
"""
    first, second = await during(neighbours, fill, look)
    assert (first.stdout, second.stdout) == ("filled\n", "True\n")


@pytest.mark.parametrize(
    "mark",
    [
        "libc.sethostname(b'box', 3)",
        "socket.socket(socket.AF_UNIX).bind('\\0box')",
        "libc.shmget(7, 4096, 0o1600)",
        "libc.syscall(248, b'user', b'box', b'x', 1, -4)",
        "open('/dev/shm/box', 'w')",
        "os.utime('/dev/null', (1, 1))",
        "os.chmod('/dev/null', 0o600)",
        "[libc.syscall(129, os.getpid(), 40, bytes(128)) for _ in range(20_000)]",
    ],
)
async def test_a_mark_is_not_seen_by_a_neighbour(neighbours: SandboxClient, mark: str) -> None:
    look = """
import ctypes, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def said(action):
    try: return action()
    except OSError as error: return error.errno
print(os.uname().nodename, said(lambda: socket.socket(socket.AF_UNIX).bind("\\0box")), libc.shmget(7, 0, 0))
print(libc.syscall(249, b"user", b"box", 0, -4), said(lambda: os.listdir("/dev/shm")))
print(oct(os.stat("/dev/null").st_mode), os.stat("/dev/null").st_mtime_ns)
timer = ctypes.c_void_p()
print(libc.timer_create(0, None, ctypes.byref(timer)))
"""
    alone = await run(neighbours, look)
    first = (
        "import ctypes, os, signal, socket\nlibc = ctypes.CDLL(None)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
    )
    _, second = await during(neighbours, f"{first}try: kept = {mark}\nexcept OSError: pass\n", look)
    assert second.stdout == alone.stdout


async def test_files_of_a_neighbour_cannot_be_reached(neighbours: SandboxClient) -> None:
    promised(neighbours, "L2", "L3")
    keep = "import os\nopen('secret', 'w').write('x')\nprint(os.getcwd())\n"
    task = asyncio.ensure_future(run(neighbours, keep + PAUSE))
    await asyncio.sleep(0.3)
    look = """
import glob, os
here = os.getcwd()
found = []
for top in ("/tmp", os.path.dirname(here), os.path.dirname(os.path.dirname(here))):
    for folder, _, names in os.walk(top):
        found += [name for name in names if name == "secret"]
    for number in range(64):
        found += glob.glob(f"{top}/0-{number}/run/secret") + glob.glob(f"{top}/{number}/run/secret")
print(found)
"""
    assert (await run(neighbours, look)).stdout == "[]\n"
    assert (await task).outcome is ProgramOutcome.OK


def queued_signals() -> int:
    """Of this user, on the whole machine."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigQ"))
    return int(line.split()[1].split("/")[0])


async def test_the_operators_count_of_queued_signals_is_left_alone(neighbours: SandboxClient) -> None:
    code = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
for number in range(20_000): libc.syscall(129, os.getpid(), 34 + number % 30, bytes(128))
timer = ctypes.c_void_p()
for number in range(1000): libc.timer_create(0, None, ctypes.byref(timer))
"""
    before = queued_signals()
    task = asyncio.ensure_future(run(neighbours, code + PAUSE))
    await asyncio.sleep(0.3)
    assert queued_signals() - before < 50
    assert (await task).outcome is ProgramOutcome.OK
