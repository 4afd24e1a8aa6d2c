"""Programs whose true end is known: each is reported as what it is, and none as a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rocstar.sandbox.call import ProgramOutcome, Response
from tests.sandbox.driver import Daemon

OK, EXCEPTION, EXIT, SIGNAL = (ProgramOutcome(name) for name in ("ok", "exception", "exit_nonzero", "signal"))
WALL, CPU, MEMORY, OUTPUT = (
    ProgramOutcome(f"{name}") for name in ("wall_timeout", "cpu_timeout", "memory", "output_limit")
)
SHORT = {"wall_seconds": 0.5}
ONE_SECOND = {"cpu_seconds": 1.0}
FORGE = "import os, struct\ndef forge(body): os.write(3, struct.pack('=I', len(body)) + body)\n"
SIGNAL_SELF = "import os, signal\nos.kill(os.getpid(), {})"

PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Ends by itself
    "nothing": ("", {}, {"outcome": OK, "exit_code": 0}),
    "a value": ("6 * 7", {}, {"outcome": OK, "value": "42"}),
    "output": ("print('x' * 100)", {}, {"outcome": OK, "stdout": "x" * 100 + "\n"}),
    "no text": ("import os\nos.write(1, b'\\xff')", {}, {"outcome": OK, "stdout": "\ufffd", "invalid_utf8": True}),
    "half a character": ("print('\\ud800')", {}, {"outcome": OK, "invalid_utf8": True}),
    "exit 0": ("import sys\nsys.exit(0)", {}, {"outcome": OK, "exit_code": 0}),
    "exit None": ("raise SystemExit", {}, {"outcome": OK, "exit_code": 0}),
    "exit 3": ("import sys\nsys.exit(3)", {}, {"outcome": EXIT, "exit_code": 3}),
    "exit -1": ("import sys\nsys.exit(-1)", {}, {"outcome": EXIT, "exit_code": 255}),
    "exit with text": ("import sys\nsys.exit('no')", {}, {"outcome": EXIT, "exit_code": 1, "stderr": "no\n"}),
    "_exit": ("import os\nos._exit(7)", {}, {"outcome": EXIT, "exit_code": 7}),
    "exec": ("import os, sys\nos.execv(sys.executable, ['p', '-c', 'raise SystemExit(9)'])", {}, {"outcome": EXIT, "exit_code": 9}),
    "exception": ("1 / 0", {}, {"outcome": EXCEPTION, "exit_code": 1, "kill_reason": ""}),
    "syntax error": ("def", {}, {"outcome": EXCEPTION}),
    "null byte": ("'a\0'", {}, {"outcome": EXCEPTION}),
    "recursion": ("def f(): f()\nf()", {}, {"outcome": EXCEPTION}),
    "end of input": ("input()", {}, {"outcome": EXCEPTION}),
    "interrupt": ("raise KeyboardInterrupt", {}, {"outcome": EXCEPTION}),
    "exception without text": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E", {}, {"outcome": EXCEPTION}
    ),
    "too large a file": ("open('f', 'wb').write(bytes(65 * 2**20))", {}, {"outcome": EXCEPTION}),
    "its own MemoryError": ("raise MemoryError", {}, {"outcome": MEMORY, "exit_code": 1}),
    "a thread's exception": ("import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()", {}, {"outcome": OK}),
    "closed output": ("import os\nos.close(1)\nprint(1)", {}, {"outcome": EXCEPTION, "stdout": ""}),
    "closed descriptors": ("import os\nos.closerange(0, 256)\nos._exit(4)", {}, {"outcome": EXIT, "exit_code": 4}),
    # Signals
    "abort": ("import os\nos.abort()", {}, {"outcome": SIGNAL, "signal": "SIGABRT", "exit_code": None}),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", {}, {"outcome": SIGNAL, "signal": "SIGSEGV"}),
    "SIGKILL to itself": (SIGNAL_SELF.format("9"), {}, {"outcome": SIGNAL, "signal": "SIGKILL", "kill_reason": ""}),
    "SIGXCPU to itself": (SIGNAL_SELF.format("signal.SIGXCPU"), {}, {"outcome": SIGNAL, "signal": "SIGXCPU"}),
    "SIGTERM to itself": (SIGNAL_SELF.format("signal.SIGTERM"), {}, {"outcome": SIGNAL, "signal": "SIGTERM"}),
    "SIGUSR1 to itself": (SIGNAL_SELF.format("signal.SIGUSR1"), {}, {"outcome": SIGNAL, "signal": "SIGUSR1"}),
    "SIGINT to itself": (SIGNAL_SELF.format("signal.SIGINT"), {}, {"outcome": EXCEPTION}),
    "real-time signal": (SIGNAL_SELF.format("37"), {}, {"outcome": SIGNAL, "signal": "SIG37"}),
    "last signal": (SIGNAL_SELF.format("64"), {}, {"outcome": SIGNAL, "signal": "SIGRTMAX"}),
    "alarm": ("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(9)", {}, {"outcome": SIGNAL, "signal": "SIGALRM"}),
    "SIGKILL to its group": ("import os\nos.killpg(0, 9)", {}, {"outcome": SIGNAL, "signal": "SIGKILL"}),
    "SIGUSR1 to the slot": (
        "import os, signal\ntry: os.kill(os.getppid(), signal.SIGUSR1)\nexcept OSError: pass\nos._exit(5)", {},
        {"outcome": EXIT, "exit_code": 5},
    ),
    "SIGKILL to all": ("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos._exit(6)", {}, {"outcome": EXIT, "exit_code": 6}),
    "own group, SIGKILL": ("import os\nos.setsid() if os.getpgid(0) != os.getpid() else 0\nos.kill(os.getpid(), 9)", {}, {"outcome": SIGNAL, "signal": "SIGKILL"}),
    "SIGXCPU after a child's work": (
        "import os, signal, time\nif os.fork() == 0:\n    while time.process_time() < 1.2: pass\n    os._exit(0)\nos.wait()\n"
        "os.kill(os.getpid(), signal.SIGXCPU)", ONE_SECOND | {"cpu_seconds": 2.0}, {"outcome": SIGNAL, "signal": "SIGXCPU"},
    ),
    # Limits
    "asleep": ("import time\ntime.sleep(60)", SHORT, {"outcome": WALL, "kill_reason": "wall", "exit_code": None, "signal": None}),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", SHORT, {"outcome": WALL, "kill_reason": "wall"}),
    "waits for a thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", SHORT, {"outcome": WALL}),
    "left its group": ("import os, time\nos.setpgid(0, 0)\ntime.sleep(60)", SHORT, {"outcome": WALL, "kill_reason": "wall"}),
    "vforked child": ("import ctypes\nlibc = ctypes.CDLL(None)\nif libc.vfork() == 0: libc.sleep(60)", SHORT, {"outcome": WALL}),
    "deaf to signals": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "time.sleep(60)", SHORT, {"outcome": WALL},
    ),
    "busy": ("while True: pass", ONE_SECOND, {"outcome": CPU, "kill_reason": "cpu", "exit_code": None}),
    "busy, deaf to SIGXCPU": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", ONE_SECOND, {"outcome": CPU}),
    "large object": ("bytearray(10**9)", {"memory_bytes": 2**27}, {"outcome": MEMORY}),
    "growing": ("x = []\nwhile True: x.append(bytes(10**5))", {"memory_bytes": 2**27}, {"outcome": MEMORY}),
    "much output": ("while True: print('y' * 1000)", {"output_bytes": 5000}, {"outcome": OUTPUT, "kill_reason": "output"}),
    "too much to stderr": ("import os\nos.write(2, bytes(5001))", {"output_bytes": 5000}, {"outcome": OUTPUT, "truncated_bytes": 1}),
    "just enough output": ("import os\nos.write(1, b'z' * 5000);", {"output_bytes": 5000}, {"outcome": OK, "truncated_bytes": 0}),
    "output in packets": (
        "import fcntl, os\ntry: fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)\nexcept OSError: pass\nfor _ in range(9): os.write(1, b'p' * 3000)", {},
        {"outcome": OK, "stdout": "p" * 27_000},
    ),
    "long value": ("'v' * 5000", {"output_bytes": 1000}, {"outcome": OK, "truncated_bytes": 4002}),
    # Children
    "child left": ("import os, time\nif os.fork() == 0: time.sleep(60)", {}, {"outcome": OK}),
    "orphan left": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)", {}, {"outcome": OK}),
    "child's exit": ("import os\nif os.fork() == 0: os._exit(3)\nos.wait()\nos._exit(8)", {}, {"outcome": EXIT, "exit_code": 8}),
    "child comes back": ("import os\nif os.fork():\n    os.wait()\n    raise ValueError", {}, {"outcome": EXCEPTION}),
    # Forged reports
    "forged exception": (f"{FORGE}forge(b'{{\"exception\": [\"E\", \"\", 1]}}\\n')\nos._exit(0)", {}, {"outcome": OK, "exception": None}),
    "forged success": (f"{FORGE}forge(b'{{\"value\": 1}}\\n1')\nos._exit(5)", {}, {"outcome": EXIT, "exit_code": 5, "value": None}),
    "forged large number": (f"{FORGE}forge(b'{{\"dropped\": ' + b'9' * 5000 + b'}}\\n')\nos._exit(0)", {}, {"outcome": OK, "truncated_bytes": 0}),
    "forged line": (f"{FORGE}forge(b'{{\"exception\": [\"E\", \"\", ' + b'9' * 30 + b']}}\\n')\nos._exit(1)", {}, {"outcome": EXIT, "exception": None}),
    "forged truncation": (f"{FORGE}forge(b'{{\"value\": 1, \"dropped\": 549755813888}}\\n1')\nos._exit(0)", {}, {"outcome": OK, "truncated_bytes": 0}),
    "forged refusal": (f"{FORGE}forge(b'{{\"refused\": \"no\"}}\\n')\nos._exit(1)", {}, {"outcome": EXIT, "exit_code": 1}),
    "deep report": (f"{FORGE}forge(b'[' * 200000)\nos._exit(0)", {}, {"outcome": OK}),
    "endless report": ("import os\nos.write(3, b'\\xff' * 4)\nwhile True: os.write(3, bytes(65536))", SHORT, {"outcome": WALL}),
    "forged end": ("import os\nfor _ in range(9): os.write(3, bytes(51))\nos._exit(2)", {}, {"outcome": EXIT, "exit_code": 2}),
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "python"])
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, Response]]:
    """Of all of them, run beside each other."""
    with Daemon(compiled=request.param) as daemon:
        numbers = {name: daemon.submit(code, **limits) for name, (code, limits, _) in PROGRAMS.items()}
        yield {name: daemon.answer(number) for name, number in numbers.items()}


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_reported_as_what_it_did(answers: dict[str, Response], name: str) -> None:
    answer = answers[name]
    told = {field: getattr(answer, field) for field in PROGRAMS[name][2]}
    assert told == PROGRAMS[name][2], answer
    assert answer.attempt == 1
