"""Hostile programs that run at once, in two slots or beside other processes of the machine, and try to signal to each
other through what they share, or to learn what others do."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rocstar.sandbox.call import ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.walls import linux
from rocstar.sandbox.walls.plans import CONFINED, PROCESS
from tests.attacks.support import promised, tried
from tests.sandbox.driver import Daemon, daemon_of, eventually, needs_empty_folder

SHARED = ["/usr", "/usr/lib", "/dev/null", "/dev/zero", "/usr/bin/env"]


def during(neighbours: Daemon, first: str, second: str) -> tuple[Response, Response]:
    """`second` runs after `first` has done its work and before it ends."""
    number = neighbours.begin(first)
    seen = neighbours.run(second)
    return neighbours.cancel(number), seen


def test_a_lock_on_a_shared_file_is_not_seen_by_another(neighbours: Daemon) -> None:
    take = f"""
import fcntl, os
for path in (*{SHARED}, os.__file__):
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK if hasattr(fcntl, "F_OFD_SETLK") else 37, b"\\0" * 32)
    print("taken", path)
"""
    first, second = during(neighbours, take, take)
    assert first.stdout == second.stdout and first.stdout.count("taken") == len(SHARED) + 1, second


@pytest.mark.parametrize("kind", ["fcntl.F_WRLCK", "fcntl.F_RDLCK"])
def test_a_record_lock_is_not_seen_by_another(neighbours: Daemon, kind: str) -> None:
    take = f"""
import fcntl, os, struct
fd = os.open("/dev/null", os.O_RDWR)
mine = struct.pack("hhqqi4x", {kind}, 0, 0, 0, 0)
for command in (fcntl.F_SETLK, 37): fcntl.fcntl(fd, command, mine)
other = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
print([struct.unpack_from("h", fcntl.fcntl(fd, command, other))[0] == fcntl.F_UNLCK for command in (fcntl.F_GETLK, 36)])
"""
    first, second = during(neighbours, take, take)
    assert first.stdout == second.stdout == "[True, True]\n"


def test_locks_do_not_reach_the_machine_outside(neighbours: Daemon) -> None:
    take = "import fcntl, os\nfcntl.flock(os.open('/dev/null', os.O_RDWR), fcntl.LOCK_EX)\n"
    number = neighbours.begin(take)
    null = os.open("/dev/null", os.O_RDWR)
    fcntl.flock(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(null)
    neighbours.cancel(number)


def test_nothing_can_be_watched(neighbours: Daemon) -> None:
    calls = ["libc.inotify_init()", "libc.inotify_init1(0)", "libc.inotify_add_watch(0, b'/usr', 2)"]
    calls += ["libc.fanotify_init(0, 0)", "__import__('fcntl').fcntl(os.open('/usr', 0), 1026, 2)"]
    calls += ["__import__('fcntl').fcntl(os.open('/usr/bin/env', 0), 1024, 0)"]
    response = neighbours.run(tried(*calls))
    assert response.stdout.split() == ["-1", "-1", "-1", "-1", "OSError", "OSError"]


def test_pages_of_shared_files_cannot_be_asked_for_or_thrown_out(neighbours: Daemon) -> None:
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
    assert neighbours.run(code).stdout == "-1\n[-1, -1, -1, -1]\nOSError\n-1\n"


@needs_empty_folder
def test_numbers_of_new_files_do_not_tell_what_others_make(neighbours: Daemon) -> None:
    promised(neighbours, "L3")
    make = "[open(str(n), 'w').close() for n in range(700)]\nprint('made')\n"
    look = "import os\n[os.open(name, os.O_CREAT) and os.stat(name).st_ino for name in 'abc']"
    first, second = during(neighbours, make, look)
    assert (first.stdout, second.value) == ("made\n", "[2, 3, 4]")


def test_space_of_another_is_not_seen(neighbours: Daemon) -> None:
    fill = "open('big', 'wb').write(bytes(40 * 2**20))\nprint('filled')\n"
    look = """
import os
try: print(os.statvfs(".").f_bfree == os.statvfs(".").f_blocks)
except PermissionError: print(True)
"""
    first, second = during(neighbours, fill, look)
    assert (first.stdout, second.stdout) == ("filled\n", "True\n")


MARKS = [
    "libc.sethostname(b'box', 3)",
    "socket.socket(socket.AF_UNIX).bind('\\0box')",
    "[(end, end.bind('\\0box')) for end in socket.socketpair()[:1]]",
    "libc.shmget(7, 4096, 0o1600)",
    "libc.syscall(248, b'user', b'box', b'x', 1, -4)",
    "open('/dev/shm/box', 'w')",
    "os.utime('/dev/null', (1, 1))",
    "os.chmod('/dev/null', 0o600)",
    "[libc.syscall(129, os.getpid(), 40, bytes(128)) for _ in range(20_000)]",
]


def test_no_mark_is_seen_by_a_neighbour(neighbours: Daemon) -> None:
    look = """
import ctypes, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def said(action):
    try: return action()
    except OSError as error: return error.errno
print(os.uname().nodename, said(lambda: socket.socket(socket.AF_UNIX).bind("\\0box")), libc.shmget(7, 0, 0))
print(said(lambda: socket.socketpair()[0].bind("\\0box")))
print(libc.syscall(249, b"user", b"box", 0, -4), said(lambda: os.listdir("/dev/shm")))
print(oct(os.stat("/dev/null").st_mode), os.stat("/dev/null").st_mtime_ns)
timer = ctypes.c_void_p()
print(libc.timer_create(0, None, ctypes.byref(timer)))
"""
    alone = neighbours.run(look)
    first = "import ctypes, os, signal, socket\nlibc, kept = ctypes.CDLL(None), []\n"
    first += "signal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
    first += "".join(f"try: kept.append({mark})\nexcept OSError: pass\n" for mark in MARKS)
    _, second = during(neighbours, first, look)
    assert second.stdout == alone.stdout


def test_files_of_a_neighbour_cannot_be_reached(neighbours: Daemon) -> None:
    promised(neighbours, "L2", "L3")
    keep = "import os\nopen('secret', 'w').write('x')\nprint(os.getcwd())\n"
    number = neighbours.begin(keep)
    look = """
import glob, os
here = os.getcwd()
found = []
for top in {"/tmp", os.path.dirname(here), os.path.dirname(os.path.dirname(here))}:
    for folder, folders, names in os.walk(top):
        folders[:] = {*folders} - {"usr", "site-packages"}
        found += [name for name in names if name == "secret"]
    for number in range(64):
        found += glob.glob(f"{top}/0-{number}/run/secret") + glob.glob(f"{top}/{number}/run/secret")
print(found)
"""
    assert neighbours.run(look).stdout == "[]\n"
    neighbours.cancel(number)


def queued_signals() -> int:
    """Of this user, on the whole machine."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigQ"))
    return int(line.split()[1].split("/")[0])


def test_the_operators_count_of_queued_signals_is_left_alone(neighbours: Daemon) -> None:
    code = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
for number in range(20_000): libc.syscall(129, os.getpid(), 34 + number % 30, bytes(128))
timer = ctypes.c_void_p()
for number in range(1000): libc.timer_create(0, None, ctypes.byref(timer))
"""
    before = queued_signals()
    number = neighbours.begin(code)
    assert queued_signals() - before < 50
    neighbours.cancel(number)


def test_what_a_program_is_told_does_not_depend_on_those_that_take_all_cpu() -> None:
    family = "import os\nfor _ in range(14):\n    if not os.fork(): break\nwhile True: pass"
    slots = 4 * len(os.sched_getaffinity(0))
    with Daemon(slots=slots + 1) as daemon:
        for _ in range(slots):
            daemon.submit(family, wall_seconds=60.0, cpu_seconds=60.0)
        assert eventually(lambda: len(daemon.slots()) == slots)
        response = daemon.answer(daemon.submit("import time\nwhile time.process_time() < 0.3: pass", wall_seconds=15.0))
    assert response.outcome in (ProgramOutcome.OK, ServiceOutcome.INTERNAL), response


def test_a_program_that_others_kept_from_computing_has_not_run_out_of_time() -> None:
    ends = {
        "while True: pass": ServiceOutcome.INTERNAL,
        "import os\nif not os.fork():\n    while True: pass\nos.wait()": ServiceOutcome.INTERNAL,
        "__import__('time').sleep(9)": ProgramOutcome.WALL_TIMEOUT,
    }
    hog = [sys.executable, "-c", "while True: pass"]
    with Daemon(slots=len(ends), groups=False) as daemon, ExitStack() as ended:
        for number in [daemon.submit("__import__('time').sleep(0.5)") for _ in ends]:
            assert daemon.answer(number).outcome is ProgramOutcome.OK, "each slot is up"
        processes = [subprocess.Popen(hog, start_new_session=True) for _ in range(12)]
        for process in processes:
            ended.callback(process.wait)
            ended.callback(process.kill)
        for process in (daemon.process, *daemon.below(), *processes):  # what they start is there as well
            try:
                os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            except PermissionError as error:  # a container's root without CAP_SYS_NICE
                pytest.skip(f"processes of other users cannot be bound to one CPU here: {error}")
        numbers = {code: daemon.submit(code, wall_seconds=2.0) for code in ends}
        assert {code: daemon.answer(number).outcome for code, number in numbers.items()} == ends


@pytest.mark.parametrize("plan", [CONFINED.name, PROCESS.name])
def test_a_program_that_fails_where_another_has_filled_the_disk_has_not_failed(plan: str) -> None:
    fill = "import os\nwith open('big', 'wb') as file:\n    while True: file.write(bytes(2**16)); file.flush()"
    with TemporaryDirectory() as folder, ExitStack() as ended:
        os.chmod(folder, 0o755)
        try:
            linux.mount("tmpfs", folder, "tmpfs", data="size=8m")
        except OSError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        ended.callback(linux.unmount, folder)
        daemon = ended.enter_context(daemon_of(plan, folder))
        filling = daemon.begin(f"try:\n    {fill.replace(chr(10), chr(10) + '    ')}\nexcept OSError: pass")
        assert daemon.run("print(input())", stdin="x" * 2**16).outcome is ServiceOutcome.INTERNAL
        assert daemon.run("print(1)").outcome is ProgramOutcome.OK
        daemon.cancel(filling)
