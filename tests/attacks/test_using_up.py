"""Hostile programs that use up memory and processes, flood, hang on, or leave processes behind."""

from __future__ import annotations

import pytest

from rocstar.sandbox.call import ProgramOutcome
from tests.attacks.support import attack, names, promised
from tests.sandbox.driver import STARVED_TRIES, Daemon, ended, eventually


def test_fork_burst_is_bounded_and_killed(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_process_limit")
    code = """
import os, time
for n in range(60):
    try: os.fork() or time.sleep(60)
    except OSError as error: print(n, error.errno); break
else: time.sleep(60)  # where they are not limited but watched
"""
    response = attack(daemon, code, processes=10)
    assert response.stdout == "9 11\n" or response.kill_reason == "processes"


def test_a_call_has_at_no_moment_more_processes_than_it_may(uncounted: Daemon) -> None:
    promised(uncounted, "L1", "L2", "L3", without="no_process_limit")
    code = """
import os
for n in range(200):
    try: os.fork() or os.execv("/bin/sleep", ["sleep", "60"])
    except OSError: break
    os.write(1, b".")
"""
    response = attack(uncounted, code, processes=10)
    assert (response.stdout, response.outcome) == ("." * 9, ProgramOutcome.OK)


def test_processes_and_threads_one_after_another_are_no_fork_bomb(uncounted: Daemon) -> None:
    code = """
import subprocess, threading
for n in range(60):
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    thread.join()
print("all", *sorted({subprocess.run(["false"]).returncode for n in range(60)}))
"""
    assert attack(uncounted, code, processes=4).stdout == "all 1\n"


def test_a_signal_ends_no_fork(uncounted: Daemon) -> None:
    code = """
import os, signal, subprocess
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for n in range(150):
    if (pid := os.fork()) == 0: os._exit(0)
    os.waitpid(pid, 0)
print(*{subprocess.run(["true"], preexec_fn=os.getpid).returncode for n in range(20)})
"""
    response = attack(uncounted, code)
    assert (response.stdout, response.stderr) == ("0\n", "")


def test_fork_bomb_ends_at_the_wall_limit(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_process_limit")
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n    sum(range(2 * 10**5))"
    for _ in range(STARVED_TRIES):  # in so short a time a busy machine may have given it hardly any CPU
        response = attack(daemon, code, wall_seconds=0.3, processes=16)
        assert response.outcome is ProgramOutcome.WALL_TIMEOUT or response.kill_reason == "processes"
        if response.cpu_seconds > 0.05:
            break
    assert response.cpu_seconds > 0.05  # that of all its processes, not of the first one


def test_memory_limit_cannot_be_dodged_by_shared_maps(daemon: Daemon) -> None:
    calls = ["__import__('mmap').mmap(-1, 2**31)", "os.memfd_create('x')"]
    assert names(daemon, *calls, memory_bytes=64 * 2**20) == ["OSError", "OSError"]


def test_memory_that_no_process_has_mapped_is_not_had_where_only_that_is_counted(uncounted: Daemon) -> None:
    calls = ["m.mmap(-1, 2**20)", "m.mmap(os.open('/dev/zero', os.O_RDWR), 4096)"]
    calls += ["len(m.mmap(-1, 4096, flags=m.MAP_PRIVATE))", "open('/dev/zero', 'rb').read(9).count(0)"]
    found = names(uncounted, *(call.replace("m.", "__import__('mmap').") for call in calls))
    assert found == ["PermissionError", found[1], "4096", "9"] and found[1] in {"PermissionError", "OSError"}


def test_limits_cannot_be_raised(daemon: Daemon) -> None:
    code = """
import resource
for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
    try: resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY,) * 2); print("raised", name)
    except (ValueError, OSError): pass
"""
    assert attack(daemon, code).stdout == ""


def test_memory_of_a_call_is_limited_whatever_its_number_of_processes_and_told_even_if_the_first_goes_on(
    daemon: Daemon,
) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_memory_cgroup")
    # Each process keeps to its own limit; together they want five times as much as the call may have.
    code = """
import os, time
for n in range(6):
    if os.fork() == 0:
        held = bytearray(b"x") * (100 * 2**20)
        time.sleep(60)
print(os.wait()[1] != 0)
"""
    response = attack(daemon, code, memory_bytes=128 * 2**20, processes=12)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.MEMORY, "memory")
    assert (response.stdout, response.exit_code) == ("True\n", 0)


def test_files_count_as_memory_of_the_call_and_are_forgotten_with_it(daemon: Daemon) -> None:
    promised(daemon, "L3", without="no_memory_cgroup")
    code = "open('big', 'wb').write(bytes(60 * 2**20))\nprint('written')"
    for _ in range(4):  # kept, they would pass the limit at the third
        response = attack(daemon, code, memory_bytes=64 * 2**20)
        assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "written\n")


BURN = """
end = time.process_time() + 0.2
held = bytearray(b"x") * (150 * 2**20)
while time.process_time() < end: pass
"""


@pytest.mark.parametrize(
    "ignore",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "libc.syscall(13, 17, struct.pack('QQQQ', 0, 2, 0, 0), None, 8)",  # SA_NOCLDWAIT
        "os.fork() and os._exit(0) if os.fork() == 0 else os.wait()",
    ],
)
def test_children_that_nobody_waits_for_are_counted(daemon: Daemon, ignore: str) -> None:
    code = f"""
import ctypes, os, signal, struct, time
libc = ctypes.CDLL(None)
{ignore}
read, write = os.pipe()
if os.fork() == 0:
    {"    ".join(BURN.splitlines(keepends=True))}
    os._exit(0)
os.close(write)
os.read(read, 1)
time.sleep(0.1)
print("end")
os._exit(0)
"""
    response = attack(daemon, code, memory_bytes=512 * 2**20)
    assert response.stdout.endswith("end\n")
    assert response.cpu_seconds >= 0.15
    assert response.peak_memory_bytes >= 150 * 2**20


FILL = """
import os, socket, time
held, total = [], 0
source, full = os.pipe()
def fill(end):
    global total
    os.set_blocking(end, False)
    while True:
        try: total += os.write(end, bytes(65536))
        except OSError: return
for _ in range(14):
    if os.fork() == 0:
        try:
            while True:
                KIND
        except OSError:
            print(total, flush=True)
            os.write(full, b"x")
            time.sleep(60)
os.close(full)
waiting = 14
while waiting and (data := os.read(source, waiting)): waiting -= len(data)
"""
SOCKETS = """
                pair = socket.socketpair(); held.extend(pair)
                for end in pair:
                    for option in (7, 32):
                        try: end.setsockopt(1, option, 2**27)
                        except OSError: pass
                    fill(end.fileno())
"""
PIPES = """
                pair = os.pipe(); held.extend(pair)
                try: __import__("fcntl").fcntl(pair[1], 1031, 2**20)
                except OSError: pass
                fill(pair[1])
"""


@pytest.mark.parametrize("kind", [SOCKETS, PIPES], ids=["sockets", "pipes"])
def test_memory_in_buffers_of_the_kernel_is_bounded(daemon: Daemon, kind: str) -> None:
    code = FILL.replace("                KIND\n", kind.lstrip("\n"))
    response = daemon.run(code, memory_bytes=32 * 2**20)
    assert response.outcome in (ProgramOutcome.OK, ProgramOutcome.MEMORY), response.stderr
    assert sum(map(int, response.stdout.split())) <= (32 + 128) * 2**20
    assert daemon.run("1").value == "1"


def test_sockets_in_sockets_are_bounded(daemon: Daemon) -> None:
    """Descriptors that are on their way do not count against a process's own limit."""
    code = """
import array, os, socket
total, kept = 0, []
def fill(end):
    global total
    end.setblocking(False)
    while True:
        try: total += end.send(bytes(65536))
        except OSError: return
try:
    while len(kept) < 3000:
        carrier, other = socket.socketpair()
        for _ in range(6):
            a, b = socket.socketpair()
            fill(a); fill(b)
            passed = array.array("i", (a.fileno(), b.fileno()))
            carrier.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            a.close(); b.close()
        kept.append((carrier, other))
except OSError: pass
print(total)
"""
    response = daemon.run(code, memory_bytes=32 * 2**20)
    assert int(response.stdout or 0) <= (32 + 128) * 2**20


def test_output_cannot_be_made_to_vanish_unsaid(daemon: Daemon) -> None:
    code = """
import ctypes, fcntl, os
for fd in (1, 2):
    for command, value in ((fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | 0o40000), (1031, 4096)):
        try: fcntl.fcntl(fd, command, value)
        except OSError: pass
for number in range(3000): os.write(1, b"%05d" % number)
"""
    response = attack(daemon, code)
    assert response.stdout == "".join(f"{number:05}" for number in range(3000))
    assert response.truncated_bytes == 0


def test_disk_cannot_be_filled(daemon: Daemon) -> None:
    promised(daemon, "L3")
    code = """
import os
try:
    for n in range(8):
        with open(f"big{n}", "wb") as file:
            for _ in range(50):
                file.write(bytes(2**20))
except OSError as error:
    print(error.errno)
"""
    assert attack(daemon, code).stdout == "28\n"


def test_files_cannot_be_made_without_end(daemon: Daemon) -> None:
    promised(daemon, "L3")
    code = "try:\n    for n in range(10**5): open(str(n), 'w').close()\nexcept OSError as error: print(error.errno)"
    assert attack(daemon, code).stdout == "28\n"


def test_flood_by_a_child_is_cut_as_well(daemon: Daemon) -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: os.write(2, b'x' * 65536)\ntime.sleep(60)"
    assert attack(daemon, code, output_bytes=1000).outcome is ProgramOutcome.OUTPUT_LIMIT


def test_exit_hooks_and_messages_that_never_end_are_killed(daemon: Daemon) -> None:
    for code in (
        "import atexit, time\natexit.register(time.sleep, 60)",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    ):
        assert attack(daemon, code, wall_seconds=0.15).outcome is ProgramOutcome.WALL_TIMEOUT


LEFT = {
    "daemonised grandchild": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(60)
    os._exit(0)
os.wait()
print("left")
""",
    "process tricks": """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(4, 1)   # dumpable
libc.prctl(1, 0)   # no signal when the parent dies
libc.prctl(36, 1)  # adopts orphans
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("left", flush=True)
os._exit(0)
""",
}


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_what_is_left_running_dies_with_the_call(daemon: Daemon, code: str) -> None:
    daemon.run("1")  # its slot is up, and nothing of earlier calls is left
    before = len(daemon.below())
    response = attack(daemon, code)
    assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "left\n")
    assert eventually(lambda: len(daemon.below()) == before)


def test_what_a_program_started_dies_even_when_its_slot_is_killed(daemon: Daemon) -> None:
    before = set(daemon.below())
    daemon.begin("import os\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        break")
    assert eventually(lambda: len(set(daemon.below()) - before) == 4)
    family = set(daemon.below()) - before
    daemon.slots()[0].kill()
    assert eventually(lambda: all(map(ended, family)))
    assert daemon.run("1").value == "1"
