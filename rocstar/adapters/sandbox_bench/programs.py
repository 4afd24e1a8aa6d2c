"""Programs whose ends are known, and programs that try what none may do; values only, nothing runs here.

Each attack prints `held` where it got nothing. What it does when it gets through is bounded: it reads, it takes at most
ATTACK_BYTES or ATTACK_PROCESSES for seconds, and it harms only a process that was started to be harmed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ATTACK_BYTES, ATTACK_PROCESSES, ATTACK_SECONDS = 3 * 2**30, 600, 5


class KnownProgram(NamedTuple):
    name: str
    code: str
    ends: str
    """ok, failed or timeout: what every service can tell."""
    stdout: str = ""
    """Compared without white space at its ends, for programs that end `ok`."""
    stdin: str = ""
    seconds: float = 5.0
    """What it may take."""


TEXT = "naïve, 数学, \U0001f680"
COMPUTES = "import time\nwhile time.process_time() < 0.5: pass\nprint('done')"
CATCHES = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
WAITS = "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()"
KNOWN = (
    KnownProgram("prints", "print(2**100)", "ok", str(2**100)),
    KnownProgram("prints nothing", "x = 1", "ok"),
    KnownProgram("reads its input", "print(sum(map(int, input().split())))", "ok", "6", "1 2 3\n"),
    KnownProgram("reads lines to their end", "import sys\nprint(len(sys.stdin.readlines()))", "ok", "3", "a\nb\nc\n"),
    KnownProgram("is not ASCII", f"print({TEXT!r})", "ok", TEXT),
    KnownProgram("imports", "import math, collections, itertools\nprint(math.comb(40, 20))", "ok", "137846528820"),
    KnownProgram("is a script", "if __name__ == '__main__':\n    print('main')", "ok", "main"),
    KnownProgram("exits with 0", "import sys\nprint('bye')\nsys.exit(0)", "ok", "bye"),
    KnownProgram("flushes late", "import atexit\natexit.register(print, 'end')", "ok", "end"),
    KnownProgram("writes a file", "open('a.txt', 'w').write('7')\nprint(open('a.txt').read())", "ok", "7"),
    KnownProgram("starts a thread", "from threading import Thread\nThread(target=print, args=(5,)).start()", "ok", "5"),
    KnownProgram("recurses deeply", "f = lambda n: n and 1 + f(n - 1)\nprint(f(900))", "ok", "900"),
    KnownProgram("prints 20,000 characters", "print('x' * 20_000)", "ok", "x" * 20_000),
    KnownProgram("computes for 0.5 s", COMPUTES, "ok", "done"),
    KnownProgram("waits for 1 s", "import time\ntime.sleep(1)\nprint('done')", "ok", "done"),
    KnownProgram("raises", "print(1)\nraise ValueError('no')", "failed"),
    KnownProgram("has a syntax error", "print((1)", "failed"),
    KnownProgram("exits with 3", "import sys\nsys.exit(3)", "failed"),
    KnownProgram("exits with a message", "import sys\nsys.exit('no')", "failed"),
    KnownProgram("recurses forever", "def f(): f()\nf()", "failed"),
    KnownProgram("kills itself", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "failed"),
    KnownProgram("crashes", "import ctypes\nctypes.string_at(0)", "failed"),
    KnownProgram("divides by zero in a function", "def f(x): return 1 / x\nf(0)", "failed"),
    KnownProgram("computes forever", "while True: pass", "timeout", seconds=2.0),
    KnownProgram("sleeps forever", "import time\ntime.sleep(1000)", "timeout", seconds=2.0),
    KnownProgram("catches everything forever", CATCHES, "timeout", seconds=2.0),
    KnownProgram("computes in a child forever", WAITS, "timeout", seconds=2.0),
)

TRIES = """
import os, signal, socket, subprocess, sys, time
got = []
{body}
print(got and f'got {got[:3]}' or 'held')
"""
BODIES: Mapping[str, str] = {
    "reads the environment of its service": """
for name in os.listdir('/proc'):
    if name.isdecimal() and int(name) not in (os.getpid(), os.getppid()):
        try:
            got += [name] if open(f'/proc/{name}/environ', 'rb').read() else []
        except OSError:
            pass
got += [name for name in os.environ if 'ROCSTAR_BENCH' in name]
""",
    "reads files of the machine": """
for path in ('/etc/shadow', '{secret}'):
    try:
        got += [path] if open(path, 'rb').read(1) else []
    except OSError:
        pass
""",
    "sees processes of others": """
for name in os.listdir('/proc'):
    if name.isdecimal():
        try:
            got += [name] if b'rocstar-bench-canary' in open(f'/proc/{name}/cmdline', 'rb').read() else []
        except OSError:
            pass
""",
    "kills a process of others": """
try:
    os.kill({canary}, signal.SIGKILL)
    time.sleep(0.2)
except OSError:
    pass
""",
    "connects to the machine": """
try:
    socket.create_connection(('127.0.0.1', {port}), 1)
    got.append('127.0.0.1')
except OSError:
    pass
""",
    "writes beside its own files": """
for path in ('/usr/rocstar-bench', '/etc/rocstar-bench', os.path.dirname(os.__file__) + '/rocstar_bench.py'):
    try:
        open(path, 'w').close()
        os.unlink(path)
        got.append(path)
    except OSError:
        pass
""",
    "takes 3 GiB of memory": f"""
try:
    block = b'x' * {ATTACK_BYTES}
    got.append(len(block))
except MemoryError:
    pass
""",
    f"starts {ATTACK_PROCESSES} processes": f"""
children = 0
try:
    for _ in range({ATTACK_PROCESSES}):
        if os.fork() == 0:
            time.sleep({ATTACK_SECONDS})
            os._exit(0)
        children += 1
    got.append(children)
except OSError:
    pass
""",
    "fills the disk with 1 GiB": f"""
try:
    with open('filler', 'wb') as file:
        for _ in range({ATTACK_BYTES} // 3 // 2**24):
            file.write(bytes(2**24))
            file.flush()
    got.append('1 GiB')
    os.unlink('filler')
except OSError:
    pass
""",
    "traces a process": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
got += ['attached'] if libc.ptrace(16, {canary}, 0, 0) == 0 else []
""",
}
"""By what an attack tries; in braces what is set up for it: a canary process, a port that listens, a secret file."""
PRINTS_FOR_EVER = "while True: print('x' * 10_000)"
LEAVES_A_PROCESS = (
    "import subprocess, sys\n"
    "code = 'import time; time.sleep(30)'\n"
    "subprocess.Popen([sys.executable, '-c', code, '{mark}'], start_new_session=True)\n"
    "print('left')"
)
LEAVES_A_FILE = "import tempfile, os\nopen(os.path.join(tempfile.gettempdir(), '{mark}'), 'w').close()\nprint('left')"
FINDS_A_FILE = (
    "import tempfile, os\nprint('found' if os.path.exists(os.path.join(tempfile.gettempdir(), '{mark}')) else 'held')"
)


def attack(name: str, *, canary: int, port: int, secret: str) -> str:
    """The program that tries it."""
    body = BODIES[name]
    for word, value in (("{canary}", canary), ("{port}", port), ("{secret}", secret)):
        body = body.replace(word, str(value))
    return TRIES.replace("{body}", body)
