"""One hostile program per test. Wanted each time: a truthful outcome, and a next call that notices nothing.

A test is skipped only where the level in force does not promise what it checks (docs/sandbox.md)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import ProgramOutcome, Response
from tests.sandbox.support import ended, eventually, run, slot_processes

REPOSITORY = Path(__file__).resolve().parents[2]


def promised(client: SandboxClient, *levels: str, without: str = "") -> None:
    info = client.info()
    if info.isolation not in levels:
        pytest.skip(f"isolation {info.isolation} does not promise this, {' and '.join(levels)} do")
    if without in info.failed_probes:
        pytest.skip(f"the sandbox reports {without} here")


async def attack(client: SandboxClient, code: str, **limits: Any) -> Response:
    """Run it, then see that the next call is served by an unharmed sandbox."""
    response = await run(client, code, **limits)
    # An interpreter that is installed below the working directory's path is mounted there, and is no leftover.
    after = await run(
        client, "import os\nprint(1 + 1, [name for name in os.listdir('.') if not os.path.ismount(name)])"
    )
    assert (after.outcome, after.stdout, after.attempt) == (ProgramOutcome.OK, "2 []\n", 1)
    return response


def tried(*calls: str) -> str:
    """A program that prints, for each expression, its value or the name of its exception."""
    body = "import ctypes, os, signal, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for call in calls:
        body += f"try:\n    print({call})\nexcept Exception as error:\n    print(type(error).__name__)\n"
    return body


# What it can learn


async def test_environment_of_the_trainer_is_not_there(client: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    response = await attack(client, "import os\nsorted(os.environ)")
    assert response.value is not None
    names = set(eval(response.value))
    assert names <= {"HOME", "PATH", "LANG", "TMPDIR", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}


async def test_processes_outside_cannot_be_read(client: SandboxClient) -> None:
    promised(client, "L2", "L3")
    paths = [f"/proc/{pid}/{name}" for pid in ("1", os.getpid(), "self") for name in ("environ", "maps", "mem")]
    response = await attack(client, tried(*(f"open({path!r}, 'rb').read(1)" for path in paths)))
    assert set(response.stdout.split()) <= {"FileNotFoundError", "PermissionError"}


async def test_files_outside_cannot_be_read(client: SandboxClient) -> None:
    promised(client, "L2", "L3")
    paths = ["/etc/shadow", "/etc/hosts", str(REPOSITORY / "pyproject.toml"), str(REPOSITORY / "rocstar/types.py")]
    response = await attack(client, tried(*(f"open({path!r}).read()" for path in paths)))
    assert set(response.stdout.split()) <= {"FileNotFoundError", "PermissionError"}


async def test_only_the_interpreter_and_the_libraries_are_there(client: SandboxClient) -> None:
    promised(client, "L3")
    response = await attack(client, "import os\nsorted(os.listdir('/')), os.path.exists('/proc/self')")
    assert response.value is not None
    folders, proc = eval(response.value)
    assert not {"proc", "sys", "home", "var", "run", "boot", "srv"} & set(folders)
    assert proc is False


async def test_a_call_finds_nothing_of_the_one_before_in_memory(client: SandboxClient) -> None:
    needle = "needle-" + os.urandom(12).hex()
    await run(
        client, f"import sys\nprint({needle!r})\nprint(sys.stdin.read(), file=sys.stderr)\n{needle!r}", stdin=needle
    )
    # The needle is put together again only while looking, and both spellings of the search are thrown away by it.
    code = f"""
import ctypes, gc
half, other = {needle[:12]!r}, {needle[12:]!r}
hits = [o for o in gc.get_objects() if isinstance(o, (bytes, bytearray)) and (half + other).encode() in o]
print(len(hits))
"""
    assert (await run(client, code)).stdout == "0\n"


async def test_standard_streams_are_the_only_descriptors(client: SandboxClient) -> None:
    code = """
import asyncio
import os
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
print([fd for fd in range(1024) if is_open(fd)])
"""
    assert (await attack(client, code)).stdout == "[0, 1, 2]\n"


async def test_random_numbers_differ_from_call_to_call(client: SandboxClient) -> None:
    code = "import os, random, uuid\n(random.random(), os.urandom(8), uuid.uuid4())"
    first, second = await run(client, code, seed=1), await run(client, code, seed=2)
    assert first.value is not None and second.value is not None
    assert first.value != second.value


# What it can leave behind


@pytest.mark.parametrize("folder", ["/", "/usr", "/usr/lib", "/etc", "/dev", "{prefix}", "{site}", "{source}"])
async def test_system_and_libraries_cannot_be_written(client: SandboxClient, folder: str) -> None:
    promised(client, "L2", "L3")
    import sys
    import sysconfig

    where = folder.format(prefix=sys.prefix, site=sysconfig.get_paths()["purelib"], source=REPOSITORY)
    # Harmless where the wall has a hole: an empty file of an odd name, and the mode that is there already.
    create = f"os.open({where + '/.rocstar-attack'!r}, os.O_CREAT | os.O_WRONLY)"
    change = f"os.chmod({where!r}, os.stat({where!r}).st_mode & 0o7777)"
    response = await attack(client, tried(create, change))
    refused = {"OSError", "PermissionError", "FileNotFoundError"}
    assert response.stdout.split()[0] in refused
    assert response.stdout.split()[-1] in refused


async def test_files_are_gone_for_the_next_call(client: SandboxClient) -> None:
    code = """
import os, tempfile
home = os.getcwd()
os.makedirs("a/b/c")
open("a/b/c/file", "w").write("left")
open(".hidden", "w").write("left")
os.symlink("/usr", "link")
os.symlink(home, "a/loop")
os.link(".hidden", "a/hard")
os.mkfifo("fifo")
tempfile.mkdtemp()
os.chmod("a/b", 0)
os.chmod("a", 0)
os.chmod(home, 0o700)
"""
    await attack(client, code)


async def test_folders_deeper_than_any_path_are_gone_too(client: SandboxClient) -> None:
    code = "import os\nfor n in range(300):\n    os.mkdir('x' * 20)\n    os.chdir('x' * 20)"
    assert (await attack(client, code)).outcome is ProgramOutcome.OK


async def test_names_that_are_not_text_are_gone_too(client: SandboxClient) -> None:
    await attack(client, "import os\nopen(b'\\xff\\n', 'w').close()\nos.mkdir(b'-rf \\xfe')")


async def test_shared_memory_and_attributes_are_no_letterbox(client: SandboxClient) -> None:
    promised(client, "L3")
    write = """
import asyncio
import os
from multiprocessing import shared_memory
shared_memory.SharedMemory("box", create=True, size=64)
"""
    await attack(client, write)
    calls = [
        "open('/dev/shm/box')",
        "os.setxattr('.', 'user.box', b'1')",
        "libc.shmget(7, 4096, 0o1600)",
        "libc.msgget(7, 0o1600)",
        "libc.semget(7, 1, 0o1600)",
    ]
    response = await attack(client, tried(*calls))
    assert response.stdout.split() == ["FileNotFoundError", "PermissionError", "-1", "-1", "-1"]


async def test_patched_modules_are_whole_again_in_the_next_call(client: SandboxClient) -> None:
    code = """
import builtins, json, math, os, random, sys
math.gcd = lambda *a: 42
json.dumps = builtins.print = None
os.fork = os._exit = os.listdir = None
random.seed = None
sys.modules["json"] = None
sys.setrecursionlimit(20)
"""
    await run(client, code)
    response = await run(client, "import json, math\nprint(json.dumps(math.gcd(12, 18)))")
    assert response.stdout == "6\n"


async def test_disk_cannot_be_filled(client: SandboxClient) -> None:
    promised(client, "L3")
    code = """
import asyncio
import os
try:
    for n in range(8):
        with open(f"big{n}", "wb") as file:
            for _ in range(50):
                file.write(bytes(2**20))
except OSError as error:
    print(error.errno)
"""
    assert (await attack(client, code)).stdout == "28\n"


async def test_files_cannot_be_made_without_end(client: SandboxClient) -> None:
    promised(client, "L3")
    code = "try:\n    for n in range(10**5): open(str(n), 'w').close()\nexcept OSError as error: print(error.errno)"
    assert (await attack(client, code)).stdout == "28\n"


# What it can reach


async def test_network_is_out_of_reach(client: SandboxClient) -> None:
    calls = [
        "socket.create_connection(('127.0.0.1', 80), 1)",
        "socket.create_connection(('192.0.2.1', 80), 1)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
        "socket.socket(40, socket.SOCK_STREAM)",  # vsock, which namespaces do not contain
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    ]
    response = await attack(client, tried(*calls))
    assert set(response.stdout.split()) <= {"PermissionError", "OSError"}  # OSError: network unreachable


async def test_abstract_sockets_of_the_machine_are_out_of_reach(client: SandboxClient) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        name = f"\0rocstar-{os.getpid()}"
        listener.bind(name)
        listener.listen()
        response = await attack(client, tried(f"socket.socket(socket.AF_UNIX).connect({name!r})"))
    assert response.stdout.split()[0] in {"ConnectionRefusedError", "PermissionError"}


async def test_other_processes_cannot_be_signalled(client: SandboxClient) -> None:
    promised(client, "L2", "L3")
    bystander = psutil.Popen(["sleep", "60"])
    try:
        calls = [f"os.kill({bystander.pid}, 9)", f"os.kill({os.getpid()}, 0)"]
        response = await attack(client, tried(*calls))
        assert set(response.stdout.split()) <= {"PermissionError", "ProcessLookupError"}
        assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        bystander.kill()
        bystander.wait()


async def test_its_own_slot_cannot_be_killed_stopped_or_strangled(client: SandboxClient) -> None:
    before = slot_processes(client)
    calls = [f"os.kill(os.getppid(), signal.{name})" for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP", "SIGKILL")]
    calls += [
        "__import__('resource').prlimit(os.getppid(), 7, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "libc.ptrace(16, os.getppid(), 0, 0)",
    ]
    if client.info().isolation == "L3":  # elsewhere a hole would cost whoever runs this test all their processes
        calls.append("os.kill(-1, 9)")
    await attack(client, tried(*calls))
    assert slot_processes(client) == before
    assert before[0].nice() == psutil.Process().nice()
    assert before[0].cpu_affinity() == psutil.Process().cpu_affinity()


async def test_privileged_and_obscure_calls_are_refused(client: SandboxClient) -> None:
    calls = [
        "libc.unshare(0x10000000)",
        "libc.unshare(0x20000)",
        "libc.setns(0, 0)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "libc.umount2(b'/tmp', 0)",
        "libc.chroot(b'/tmp')",
        "libc.ptrace(0, 0, 0, 0)",
        "libc.syscall(321, 0, 0, 0)",  # bpf
        "libc.syscall(250, 0, 0, 0)",  # keyctl
        "libc.syscall(425, 1, 0)",  # io_uring_setup
        "libc.syscall(323, 0)",  # userfaultfd
        "libc.syscall(298, 0, 0, 0, 0, 0)",  # perf_event_open
        "libc.syscall(435, 0, 0)",  # clone3
        "libc.syscall(0x40000000 + 39)",  # getpid by its x32 number
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone with a new user namespace
        "libc.personality(0xffffffff)",
        "libc.sethostname(b'x', 1)",
        "libc.setuid(os.getuid() + 1)",
        "libc.reboot(0)",
    ]
    if os.uname().machine != "x86_64":
        pytest.skip("the system-call numbers above are those of x86-64")
    response = await attack(client, tried(*calls))
    assert response.stdout.split() == ["-1"] * len(calls)


async def test_privileges_cannot_be_had_from_set_uid_programs(client: SandboxClient) -> None:
    code = "import subprocess\nprint(subprocess.run(['/bin/su', '-c', 'id'], capture_output=True).returncode != 0)"
    response = await attack(client, code)
    assert response.stdout == "True\n" or "Error" in response.stderr


# What it can use up


async def test_fork_burst_is_bounded_and_killed(client: SandboxClient) -> None:
    promised(client, "L1", "L2", "L3", without="no_process_limit")
    code = """
import os, time
for n in range(80):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError as error:
        print(n, error.errno)
        break
"""
    assert (await attack(client, code, processes=10)).stdout == "9 11\n"


async def test_fork_bomb_ends_at_the_wall_limit(client: SandboxClient) -> None:
    promised(client, "L1", "L2", "L3", without="no_process_limit")
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    response = await attack(client, code, wall_seconds=0.5, processes=16)
    assert response.outcome is ProgramOutcome.WALL_TIMEOUT
    assert response.cpu_seconds > 0.05  # that of all its processes, not of the first one


async def test_memory_bomb_is_a_memory_outcome(client: SandboxClient) -> None:
    response = await attack(client, "x = 'x' * 10**10", memory_bytes=64 * 2**20)
    assert response.outcome is ProgramOutcome.MEMORY


async def test_memory_limit_cannot_be_dodged_by_shared_maps(client: SandboxClient) -> None:
    calls = ["__import__('mmap').mmap(-1, 2**31)", "os.memfd_create('x')"]
    response = await attack(client, tried(*calls), memory_bytes=64 * 2**20)
    assert response.stdout.split() == ["OSError", "PermissionError"]


async def test_limits_cannot_be_raised(client: SandboxClient) -> None:
    code = """
import resource
for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
    try:
        resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY,) * 2)
        print("raised", name)
    except (ValueError, OSError):
        pass
"""
    assert (await attack(client, code)).stdout == ""


async def test_output_flood_is_cut_at_once(client: SandboxClient) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    response = await attack(client, code, output_bytes=100_000)
    assert response.outcome is ProgramOutcome.OUTPUT_LIMIT
    assert len(response.stdout) == 100_000


async def test_flood_by_a_child_is_cut_as_well(client: SandboxClient) -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: os.write(2, b'x' * 65536)\ntime.sleep(60)"
    assert (await attack(client, code, output_bytes=1000)).outcome is ProgramOutcome.OUTPUT_LIMIT


async def test_endless_loop_that_ignores_signals_is_killed(client: SandboxClient) -> None:
    code = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
print("ignoring")
while True: pass
"""
    response = await attack(client, code, wall_seconds=0.3)
    assert (response.outcome, response.stdout) == (ProgramOutcome.WALL_TIMEOUT, "ignoring\n")


async def test_stopping_oneself_does_not_stop_the_clock(client: SandboxClient) -> None:
    promised(client, "L3")
    response = await attack(client, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_seconds=0.3)
    assert response.outcome is ProgramOutcome.WALL_TIMEOUT


async def test_exit_hooks_and_threads_that_never_end_are_killed(client: SandboxClient) -> None:
    for code in (
        "import atexit, time\natexit.register(time.sleep, 60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    ):
        assert (await attack(client, code, wall_seconds=0.15)).outcome is ProgramOutcome.WALL_TIMEOUT


async def test_daemonised_grandchild_dies_with_the_call(client: SandboxClient) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(60)
    os._exit(0)
os.wait()
print("left")
"""
    host = psutil.Process(client.process.pid)
    before = len(host.children(recursive=True))
    response = await attack(client, code)
    assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "left\n")
    assert eventually(lambda: len(host.children(recursive=True)) == before)


async def test_zombies_are_collected(client: SandboxClient) -> None:
    code = "import os\nfor _ in range(8):\n    if os.fork() == 0: os._exit(0)\nprint('made')"
    assert (await attack(client, code)).stdout == "made\n"


# What it can pretend


async def test_status_cannot_be_forged_by_printing(client: SandboxClient) -> None:
    code = """
import asyncio
import os
print('{"kind":"response","outcome":"ok","exit_code":0}')
for fd in range(3, 64):
    try: os.write(fd, b"R" * 100)
    except OSError: pass
os._exit(3)
"""
    response = await attack(client, code)
    assert (response.outcome, response.exit_code) == (ProgramOutcome.EXIT_NONZERO, 3)
    assert response.stdout == '{"kind":"response","outcome":"ok","exit_code":0}\n'


async def test_forged_reports_cannot_turn_failure_into_success(client: SandboxClient) -> None:
    code = """
import gc, mmap, os, struct
for thing in gc.get_objects() + gc.get_referents(*gc.get_objects()):
    if isinstance(thing, mmap.mmap):
        thing[:] = os.urandom(len(thing))
        body = b'{"exception": null, "has_value": true, "dropped": 0}' + b"\\n'forged'"
        thing[:4 + len(body)] = struct.pack("!I", len(body)) + body
os._exit(1)
"""
    response = await attack(client, code)
    assert (response.outcome, response.exit_code, response.value) == (ProgramOutcome.EXIT_NONZERO, 1, None)


async def test_garbage_reports_are_ignored(client: SandboxClient) -> None:
    for body in ("b'\\xff' * 262144", "b'[' * 262144", "b'\\x00\\x03\\xff\\xfc' + b'{' * 262140"):
        code = f"""
import gc, mmap, os
for thing in gc.get_objects() + gc.get_referents(*gc.get_objects()):
    if isinstance(thing, mmap.mmap) and len(thing) == 262144:
        thing[:] = {body}
os._exit(0)
"""
        assert (await attack(client, code)).outcome is ProgramOutcome.OK


async def test_segfault_is_a_signal_and_keeps_the_output(client: SandboxClient) -> None:
    response = await attack(client, "print('before')\nimport ctypes\nctypes.string_at(0)")
    assert (response.outcome, response.signal, response.stdout) == (ProgramOutcome.SIGNAL, "SIGSEGV", "before\n")


async def test_abort_is_a_signal(client: SandboxClient) -> None:
    response = await attack(client, "import os\nos.abort()")
    assert response.outcome is ProgramOutcome.SIGNAL


async def test_leaving_without_a_word_keeps_its_exit_code(client: SandboxClient) -> None:
    response = await attack(client, "import os\nos.write(1, b'x')\nos._exit(9)")
    assert (response.outcome, response.exit_code, response.stdout) == (ProgramOutcome.EXIT_NONZERO, 9, "x")


async def test_closed_or_replaced_streams_do_no_harm(client: SandboxClient) -> None:
    for code in (
        "import os\nfor fd in range(3): os.close(fd)\n1 / 0",
        "import sys\nsys.stdout.close(); sys.stderr.close()\n1 / 0",
        "import sys\nsys.stdout = sys.stderr = sys.__stderr__ = None\n1 / 0",
        "import sys\nsys.excepthook = None\nsys.stdout = 3\n1 / 0",
    ):
        assert (await attack(client, code)).outcome is ProgramOutcome.EXCEPTION


async def test_huge_messages_are_bounded(client: SandboxClient) -> None:
    response = await attack(client, "raise ValueError('x' * 10**7)", output_bytes=10_000)
    assert response.outcome is ProgramOutcome.OUTPUT_LIMIT
    assert len(response.stderr) <= 10_000


async def test_recursion_in_repr_and_in_source_is_the_programs_error(client: SandboxClient) -> None:
    for code in (
        "class R:\n    def __repr__(self): return repr(self)\nR()",
        "(" * 5000 + ")" * 5000,
        "-" * 10**5 + "1",
    ):
        response = await attack(client, code)
        assert response.outcome in (ProgramOutcome.EXCEPTION, ProgramOutcome.MEMORY, ProgramOutcome.SIGNAL)


async def test_a_fork_that_returns_from_the_program_speaks_for_nobody(client: SandboxClient) -> None:
    response = await attack(
        client, "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n'child' if pid == 0 else 'parent'"
    )
    assert response.value == "'parent'"


async def test_slot_that_cannot_be_emptied_is_replaced_and_the_answer_kept(client: SandboxClient) -> None:
    promised(client, "L1", "L2")  # elsewhere a folder without permissions is no obstacle
    response = await attack(client, "import os\nos.mkdir('shut', 0)\nprint('made')")
    assert (response.outcome, response.stdout, response.attempt) == (ProgramOutcome.OK, "made\n", 1)


async def test_a_call_that_waits_behind_one_that_spoils_its_slot_is_served(client: SandboxClient) -> None:
    promised(client, "L1", "L2")
    spoiling, waiting = await asyncio.gather(run(client, "import os\nos.mkdir('shut', 0)\n1"), run(client, "2"))
    assert (spoiling.value, waiting.value, waiting.attempt) == ("1", "2", 1)


async def test_what_a_program_started_dies_even_when_its_slot_is_killed(client: SandboxClient) -> None:
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        break
time.sleep(60)
"""
    host = psutil.Process(client.process.pid)
    before = len(host.children(recursive=True))
    task = asyncio.ensure_future(run(client, code, wall_seconds=20.0))
    assert await asyncio.to_thread(eventually, lambda: len(host.children(recursive=True)) == before + 4)
    family = host.children(recursive=True)[-4:]
    task.cancel()
    slot_processes(client)[0].kill()
    assert await asyncio.to_thread(eventually, lambda: all(map(ended, family)))
    await asyncio.gather(task, return_exceptions=True)
    assert (await run(client, "1")).value == "1"
