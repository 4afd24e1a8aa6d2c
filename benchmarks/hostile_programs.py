"""Hostile programs and what must be seen of each, and ordinary ones whose right answer follows from their number: what
`sandbox_soak.py`, `sandbox_neighbours.py` and `sandbox_service.py` run. The suite that also looks from outside is
`tests/attacks`; a quick check of a machine is `rocstar sandbox bench here`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocstar.sandbox.call import Call, Limits, Response
from rocstar.sandbox.slot.channel import CONTROL

SHORT = {"cpu_seconds": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    """What must hold, in words."""
    code: str
    """The program; many print `safe` or what they got."""
    passes: Callable[[Response], bool]
    """Whether the response shows that it holds."""
    limits: Mapping[str, Any] | None = None
    """Of the call, beside its wall seconds; the default ones when None."""
    level: str = "L1"
    """The weakest level that promises it."""
    loops: bool = False
    """It runs until its wall limit ends it."""


def says(text: str) -> Callable[[Response], bool]:
    return lambda response: response.outcome == "ok" and response.stdout.strip() == text


def ends(*outcomes: str) -> Callable[[Response], bool]:
    return lambda response: response.outcome in outcomes


def denied(action: str, imports: str = "os") -> str:
    """A program that prints `safe` when an OSError stops the action."""
    return f"import {imports}\ntry:\n    {action}\n    print('did it')\nexcept OSError:\n    print('safe')"


OTHER_PLACES = "['/etc/rocstar-probe', '/usr/rocstar-probe', os.path.dirname(os.__file__) + '/rocstar_probe.py']"
WRITES = f"""
import os
got = []
for path in {OTHER_PLACES}:
    try:
        open(path, 'w').close()
        os.unlink(path)
        got.append(path)
    except OSError:
        pass
print(got or 'safe')
"""
CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
names = ('ptrace mount unshare bpf keyctl perf_event_open userfaultfd io_uring_setup '
         'setns kexec_load init_module').split()
numbers = {'x86_64': (101, 165, 272, 321, 250, 298, 323, 425, 308, 246, 175),
           'aarch64': (117, 40, 97, 280, 219, 241, 282, 425, 268, 104, 105)}[os.uname().machine]
arguments = {'ptrace': (16, 1), 'unshare': (0x10000000,), 'userfaultfd': (0,), 'keyctl': (0, -3, 1)}
got = [name for name, number in zip(names, numbers)
       if libc.syscall(number, *arguments.get(name, (0, 0, 0, 0, 0))) >= 0]
print(got or 'safe')
"""
BURST = """
import os
children = 0
try:
    for _ in range(500):
        if os.fork() == 0:
            import time; time.sleep(60)
        children += 1
except OSError:
    print('safe')
"""
BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
ENVIRONMENT = """
import os
names = [n for n in os.environ if any(w in n.upper() for w in ('TOKEN', 'SECRET', 'KEY', 'PASSWORD', 'CREDENTIAL'))]
print(names or 'safe')
"""
LOOPBACK = """
import socket
got = []
for address in (('127.0.0.1', 22), ('127.0.0.1', 8700), ('169.254.169.254', 80), ('1.1.1.1', 53)):
    try:
        socket.create_connection(address, 0.3)
        got.append(address)
    except ConnectionRefusedError:
        got.append(address)  # somebody's network said no: it was reached
    except OSError:
        pass
print(got or 'safe')
"""
STAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    for fd in range(3):
        os.close(fd)
    time.sleep(60)
print('safe')
"""
DEAF = """
import signal, time
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
"""

ROWS: Sequence[Row] = (
    Row(name="no secret in the environment", code=ENVIRONMENT, passes=says("safe")),
    Row(name="password file not readable", code=denied("open('/etc/shadow').read()"), passes=says("safe")),
    Row(name="system and libraries not writable", code=WRITES, passes=says("safe"), level="L2"),
    Row(name="no network", code=LOOPBACK, passes=says("safe")),
    Row(name="dangerous system calls denied", code=CALLS, passes=says("safe")),
    Row(name="own root may not change", code=denied("os.chroot('/')"), passes=says("safe")),
    Row(name="may not become root", code=denied("os.setresuid(0, 0, 0) or os.getuid() or 1/0"), passes=ends("ok")),
    Row(
        name="sees no process but its own",
        code="import os\nprint('safe' if not os.path.exists('/proc/1/cmdline') else os.listdir('/proc')[:5])",
        passes=says("safe"),
        level="L3",
    ),
    Row(name="may not signal its parent", code=denied("os.kill(os.getppid(), 9)"), passes=ends("ok", "exception")),
    Row(name="no descriptor but 0, 1, 2 and its report's",
        code="import os\ngot = []\nfor fd in range(3, 1024):\n    try:\n        "
        "os.fstat(fd)\n        got.append(fd)\n    except OSError:\n        pass\nprint(got or 'safe')",
        passes=lambda r: r.stdout in ("safe\n", f"[{CONTROL}]\n")),
    Row(name="endless loop ends at its limit", code="while True: pass", passes=ends("wall_timeout", "cpu_timeout"),
        loops=True),
    Row(name="deaf sleeper ends at its limit", code=DEAF, passes=ends("wall_timeout"), loops=True),
    Row(name="memory bomb ends", code="x = []\nwhile True: x.append(bytearray(2**24))",
        limits={**SHORT, "memory_bytes": 2**28}, passes=ends("memory", "exception", "signal")),
    Row(name="deep recursion ends", code="import sys\nsys.setrecursionlimit(10**6)\ndef f(): f()\nf()",
        limits=SHORT, passes=ends("exception", "memory", "signal", "wall_timeout", "cpu_timeout"), loops=True),
    Row(name="flood of output is cut", code="while True: print('x' * 4096)", limits=SHORT,
        passes=ends("output_limit")),
    Row(name="burst of forks is stopped", code=BURST, limits=SHORT, passes=lambda r: "safe" in r.stdout),
    Row(name="fork bomb ends at its limit", code=BOMB, passes=ends("wall_timeout", "cpu_timeout", "signal"),
        loops=True),
    Row(name="daemon dies with its call", code=STAY, passes=says("safe")),
    Row(name="disk cannot be filled", code=denied("open('big', 'wb').write(bytes(200 * 2**20))"),
        limits={"memory_bytes": 2**30}, passes=lambda r: "did it" not in r.stdout),
    Row(name="crash is told as a crash", code="import ctypes\nctypes.string_at(0)",
        passes=lambda r: r.outcome == "signal" and r.signal == "SIGSEGV"),
    Row(name="invalid output is replaced", code="import sys\nsys.stdout.buffer.write(b'a\\xffb')",
        passes=lambda r: r.outcome == "ok" and r.stdout == "a\ufffdb"),
    Row(name="hooks run at exit", code="import atexit\natexit.register(print, 'safe')", passes=says("safe")),
    Row(name="missing stdin is an end of file", code="input()", passes=lambda r: r.exception.type == "EOFError"),
    Row(name="patched builtins", code="import builtins, json\nbuiltins.print = None\njson.dumps = None",
        passes=ends("ok")),
    Row(name="... are whole again in the next call", code="import json\nprint(json.loads(json.dumps('safe')))",
        passes=says("safe")),
    Row(name="a file left behind", code="import os\nopen('left', 'w').write('x')\nos.makedirs('d/e', 0o000)",
        passes=ends("ok")),
    Row(name="... is gone in the next call",
        code="import os\nprint([name for name in os.listdir('.') if not os.path.ismount(name)] or 'safe')",
        passes=says("safe")),
)  # fmt: skip


# -- ordinary programs, and the mix of a soak

HOSTILE_SHARE = 0.1
PATIENT = 60.0  # seconds; a busy machine must not end a program that would end by itself
LOOP_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    call: Call
    kind: str
    """Name of the ordinary program, or of the hostile row."""
    hostile: bool
    passes: Callable[[Response, str], bool]
    """Whether a response and the level in force are what this program must lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordinary:
    """A program with `{n}` for its number, and what it must lead to."""

    code: str
    weight: int
    """How often it comes, relative to the others."""
    outcome: str = "ok"
    stdout: Callable[[int], str] = lambda n: ""
    stdin: bool = False
    """Its number comes on stdin too."""
    more: Callable[[Response, int], bool] = lambda response, n: True
    """What else must hold."""


ORDINARY: Mapping[str, Ordinary] = {
    "print": Ordinary(code="print({n} ** 2)", weight=30, stdout=lambda n: f"{n**2}\n"),
    "stdin": Ordinary(code="print(int(input()) + 1)", weight=10, stdin=True, stdout=lambda n: f"{n + 1}\n"),
    "value": Ordinary(code="[{n}] * 2", weight=10, more=lambda response, n: response.value == str([n, n])),
    "work": Ordinary(
        code="print(sum(i % 7 for i in range({n} % 1000 * 20)))",
        weight=10,
        stdout=lambda n: f"{sum(i % 7 for i in range(n % 1000 * 20))}\n",
    ),
    "file": Ordinary(
        code="import os\nold = os.listdir()\nopen('f', 'w').write('{n}')\nprint(old, open('f').read())",
        weight=5,
        stdout=lambda n: f"[] {n}\n",
    ),
    "large output": Ordinary(code="print('{n} ' * 2000)", weight=5, stdout=lambda n: f"{n} " * 2000 + "\n"),
    "numpy": Ordinary(
        code="import numpy as np\nprint(int(np.arange({n} % 100).sum()))",
        weight=12,
        stdout=lambda n: f"{sum(range(n % 100))}\n",
    ),
    "sympy": Ordinary(
        code="from sympy import symbols, expand\nx = symbols('x')\nprint(expand((x + {n}) ** 2))",
        weight=5,
        stdout=lambda n: f"x**2 + {2 * n}*x + {n**2}\n",
    ),
    "raise": Ordinary(
        code="def f():\n    raise ValueError('{n}')\nf()",
        weight=8,
        outcome="exception",
        more=lambda response, n: response.exception is not None and response.exception.message == str(n),
    ),
    "exit": Ordinary(
        code="import sys\nsys.exit({n} % 200 + 1)",
        weight=5,
        outcome="exit_nonzero",
        more=lambda response, n: response.exit_code == n % 200 + 1,
    ),
}


def task(number: int, seed: int) -> Task:
    """The call of that number, 1 is the first; the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    if rng.random() < HOSTILE_SHARE:
        return hostile_task(number, rng.choice(ROWS))
    names, weights = list(ORDINARY), [kind.weight for kind in ORDINARY.values()]
    return ordinary_task(number, rng.choices(names, weights)[0])


def ordinary_task(number: int, name: str) -> Task:
    kind = ORDINARY[name]

    def passes(response: Response, level: str) -> bool:
        told = (str(response.outcome), response.stdout) == (kind.outcome, kind.stdout(number))
        return told and kind.more(response, number)

    call = Call(
        id=str(number),
        code=kind.code.replace("{n}", str(number)),
        stdin=f"{number}\n" if kind.stdin else "",
        limits=Limits(wall_seconds=PATIENT, cpu_seconds=PATIENT),
        seed=number,
    )
    return Task(call=call, kind=name, hostile=False, passes=passes)


def hostile_task(number: int, row: Row) -> Task:
    """The row with time limits that suit a soak."""
    seconds = LOOP_SECONDS if row.loops else PATIENT
    limits: dict[str, Any] = {**(row.limits or {}), "wall_seconds": seconds, "cpu_seconds": PATIENT}
    call = Call(id=str(number), code=row.code, limits=Limits(**limits), seed=number)
    return Task(call=call, kind=row.name, hostile=True, passes=partial(is_held, row))


def is_held(row: Row, response: Response, level: str) -> bool:
    """Also where the level in force does not promise it."""
    try:
        return row.passes(response) or level < row.level
    except AttributeError:  # there is no exception, say
        return level < row.level
