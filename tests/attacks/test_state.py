"""Hostile programs that leave state for the next program of the same slot: a call must find nothing that an earlier
one could have chosen."""

from __future__ import annotations

from rocstar.sandbox.call import ProgramOutcome
from tests.attacks.support import promised
from tests.sandbox.driver import Daemon, needs_empty_folder

LOOK = """
import ctypes, os, fcntl, signal, resource, socket, sys
libc = ctypes.CDLL(None)
def said(action):
    try: return action()
    except OSError as error: return error.errno
state = os.stat(".")
now = __import__("time").time()
print(oct(state.st_mode), state.st_nlink, state.st_size, abs(now - state.st_mtime) < 3600 > abs(now - state.st_atime))
print(os.listdir("."), os.umask(0), os.getpriority(0, 0), signal.pthread_sigmask(signal.SIG_BLOCK, []))
print([said(lambda: fcntl.fcntl(fd, command)) for fd in (0, 1, 2) for command in (3, 9, 11, 1025)])
print([said(lambda: os.lseek(fd, 0, 1)) for fd in (0, 1, 2)], os.stat(0).st_rdev, os.getpgrp() == os.getpid())
print([said(lambda: os.listxattr(path)) for path in (".", "/usr", "/dev/null")], sys.getswitchinterval())
print([resource.getrlimit(number) for number in range(16)])
print(said(lambda: os.listdir("/dev/shm")), libc.shmget(7, 0, 0), libc.semget(7, 0, 0), libc.msgget(7, 0))
print([signal.getsignal(number) for number in (2, 10, 13, 14, 17)])
print([os.stat(path).st_mtime_ns for path in ("/usr", "/dev/null", "/dev/zero")], os.environ)
"""
MARKS = {
    "mode": "os.chmod('.', 0o1700)",
    "times": "os.utime('.', (1, 1))",
    "times-of-parent": "os.utime('..', (1, 1))",
    "times-of-devices": "[os.utime('/dev/' + name, (1, 1)) for name in ('null', 'zero', 'full', 'random', 'urandom')]",
    "mode-of-devices": "[os.chmod('/dev/' + name, 0o644) for name in ('null', 'zero')]",
    "owner-of-devices": "os.chown('/dev/null', os.getuid(), os.getgid())",
    "file-and-gone": "open('x', 'w').close(); os.unlink('x')",
    "many-files-and-gone": "[(open(str(n), 'w').close(), os.unlink(str(n))) for n in range(500)]",
    "sub-folders": "os.makedirs('a/b/c')",
    "beside": "os.mkdir('../beside')",
    "attribute": "os.setxattr('.', 'user.box', b'1')",
    "attribute-of-system": "os.setxattr('/usr', 'user.box', b'1')",
    "flags": "fcntl.ioctl(os.open('.', 0), 0x40086602, b'\\x40\\0\\0\\0\\0\\0\\0\\0')",
    "project": "fcntl.ioctl(os.open('.', 0), 0x401c5820, bytes(28))",
    "nonblocking": "[os.set_blocking(fd, False) for fd in (0, 1, 2)]",
    "async": "[fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_APPEND) for fd in (0, 1, 2)]",
    "owner": "[fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid()) for fd in (0, 1, 2)]",
    "own-signal": "[fcntl.fcntl(fd, 10, 12) for fd in (0, 1, 2)]",
    "lease": "[fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK) for fd in (0, os.open('/dev/null', 0))]",
    "notify": "fcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_MULTISHOT)",
    "lock": "[fcntl.flock(fd, fcntl.LOCK_EX) for fd in (0, os.open('/usr', 0), os.open('/dev/null', 0))]",
    "hint": "fcntl.fcntl(os.open('.', 0), 1036, b'\\x02' + bytes(7))",
    "offset": "os.lseek(0, 1000, 0)",
    "mask": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); os.umask(0o777); os.nice(5)",
    "handlers": "[signal.signal(n, signal.SIG_IGN) for n in range(1, 65) if n not in (9, 19, 32, 33)]",
    "limits": "[resource.setrlimit(n, (1, 1)) for n in (0, 2, 4, 8, 11, 12, 13)]",
    "timers": "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); signal.alarm(1)",
    "orphans": "os.fork() or (os.setsid(), os.fork() or time.sleep(60))",
    "shared-memory": "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory('box', True, 64)",
    "socket": "socket.socket(socket.AF_UNIX).bind('box')",
    "abstract": "socket.socket(socket.AF_UNIX).bind('\\0box')",
    "sysv": "libc.shmget(7, 4096, 0o1600), libc.semget(7, 1, 0o1600), libc.msgget(7, 0o1600)",
    "keys": "libc.syscall(248, b'user', b'box', b'x', 1, -2)",
    "name": "libc.sethostname(b'box', 3)",
    "environment": "os.environ.update(BOX='1'); os.putenv('BOX', '1')",
    "stdout-size": "[fcntl.fcntl(fd, 1031, 2**20) for fd in (1, 2)]",
    "packets": "[fcntl.fcntl(fd, fcntl.F_SETFL, 0o40000) for fd in (1, 2)]",
    "reading": "os.listdir('.'), os.listdir('/usr'), os.listdir('/dev')",
    "modules": "sys.modules.clear(); __import__('builtins').__dict__.pop('print')",
}


def mark(daemon: Daemon, action: str) -> None:
    code = f"""
import ctypes, fcntl, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
try: {action}
except (OSError, ValueError) as error: pass
"""
    daemon.run(code)


def test_a_mark_of_an_earlier_program_is_not_to_be_seen(daemon: Daemon) -> None:
    promised(daemon, "L2", "L3")
    daemon.run("1")
    before = daemon.run(LOOK)
    assert before.outcome is ProgramOutcome.OK, before.stderr
    for name, action in MARKS.items():
        mark(daemon, action)
        after = daemon.run(LOOK)
        assert (after.outcome, after.stdout) == (ProgramOutcome.OK, before.stdout), f"{name}: {after.stderr}"
        assert after.attempt == 1, name


@needs_empty_folder
def test_everything_that_is_numbered_starts_anew_and_reading_leaves_no_trace(daemon: Daemon) -> None:
    promised(daemon, "L3")  # without a file system and process numbers of their own, programs see those of the machine
    code = """
import os
print(os.getpid(), os.getppid())
print(os.stat(".").st_ino, [os.open(name, os.O_CREAT) and os.stat(name).st_ino for name in "ab"])
os.utime("a", (5, 5)); open("a").read(); os.mkdir("d"); os.utime("d", (5, 5)); os.listdir("d")
print(os.stat("a").st_atime, os.stat("d").st_atime)
try: os.open(".", os.O_TMPFILE | os.O_RDWR)
except OSError as error: print(error.errno)
"""
    busy = """
import os
for n in range(50):
    open(str(n), "w").close()
    if os.fork() == 0: os._exit(0)
    os.wait()
"""
    seen = []
    for _ in range(3):
        assert daemon.run(busy).outcome is ProgramOutcome.OK
        seen.append(daemon.run(code).stdout)
    assert seen == ["2 1\n1 [2, 3]\n5.0 5.0\n95\n"] * 3


def test_nothing_of_an_earlier_call_lies_in_memory(daemon: Daemon) -> None:
    needle = "needle-" + "x7f3" * 3
    code = f"import sys\nprint({needle!r})\nopen('out', 'w').write({needle!r})\nraise ValueError({needle!r})"
    daemon.run(code, stdin=needle * 1000, files={needle: needle.encode() * 1000}, fetch=("out",))
    # Searches the heaps page by page, for the needle in two halves and, to see that it works, for another text.
    look = f"""
import ctypes, os, sys
libc, (read, write) = ctypes.CDLL(None), os.pipe()
def page(address):
    return os.read(read, 4096) if libc.write(write, ctypes.c_void_p(address), 4096) == 4096 else b""
def count(half, other):
    hits = 0
    for address in range(base - 64 * 2**20, base + 64 * 2**20, 4096):
        data = page(address)
        at = data.find(half)
        while at >= 0:
            hits += data[at + len(half):].startswith(other)
            at = data.find(half, at + 1)
    return hits
base = id(object()) & ~0xfff
control = (b"con", b"trol-%d" % len(sys.argv))
kept = b"".join(control)
print(count({needle[:9].encode()!r}, {needle[9:].encode()!r}), count(*control) > 0)
"""
    assert daemon.run(look).stdout == "0 True\n"


@needs_empty_folder
def test_what_lies_in_sockets_that_only_they_reach_is_gone(daemon: Daemon) -> None:
    """The kernel collects such descriptors some milliseconds after the program's end."""
    promised(daemon, "L3")
    leave = """
import array, os, socket
listener = socket.socket(socket.AF_UNIX); listener.bind("\\0box"); listener.listen()
a, b = socket.socketpair()
file = open("held", "w+b"); file.write(bytes(2**20)); file.flush()
def send(*fds): a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
send(listener.fileno(), file.fileno()); send(b.fileno()); send(a.fileno())
print("left")
"""
    look = """
import os, socket, time
state = os.statvfs(".")
print(state.f_blocks == state.f_bfree, state.f_files - state.f_ffree)
for _ in range(200):
    try: print(socket.socket(socket.AF_UNIX).bind("\\0box")); break
    except OSError: time.sleep(0.01)
"""
    assert daemon.run(leave).stdout == "left\n"
    assert daemon.run(look).stdout == "True 1\nNone\n"


def test_patched_modules_are_whole_again_in_the_next_call(daemon: Daemon) -> None:
    code = """
import builtins, json, math, os, random, sys
math.gcd = lambda *a: 42
json.dumps = builtins.print = None
os.fork = os._exit = os.listdir = None
random.seed = None
sys.modules["json"] = None
sys.setrecursionlimit(20)
"""
    daemon.run(code)
    response = daemon.run("import json, math\nprint(json.dumps(math.gcd(12, 18)))")
    assert response.stdout == "6\n"


def test_what_a_program_inherits_cannot_be_written_to(daemon: Daemon) -> None:
    code = """
import gc
for view in gc.get_objects() + gc.get_referents(*gc.get_objects()):
    if type(view).__name__ not in ("memoryview", "mmap", "bytearray"): continue
    try: view[:] = b"\\xee" * len(view)
    except (TypeError, ValueError, NotImplementedError): pass
"""
    daemon.run(code)
    for number in range(3):
        response = daemon.run(f"{number}")
        assert (response.value, response.attempt) == (f"{number}", 1)
