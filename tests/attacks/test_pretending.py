"""Hostile programs that lie about how they ended, make their failure look like ours, and crash in odd ways."""

from __future__ import annotations

import json
import struct

import pytest

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.slot import channel
from tests.attacks.support import attack
from tests.sandbox.driver import Daemon

SAY = """
import os
def say(data):
    for fd in range(3, 1024):
        try: os.set_blocking(fd, False); os.write(fd, data)
        except OSError: pass
"""


def framed(body: bytes) -> bytes:
    return struct.pack("=I", len(body)) + body


HEADS: list[object] = [
    {"value": 1e300},
    {"value": True},
    {"value": 5, "dropped": -7},
    {"dropped": 2**40, "value": 0},
    {"exception": ["E" * 100_000, "m" * 100_000, 3]},
    {"exception": ["", "", -5]},
    {"exception": []},
    {"status": 999, "files": [["../../x", 3]], "images": [4]},
    {"images": [1] * 100_000},
    {"refused": "x" * 100_000},
    {"outcome": "ok", "exit_code": 0, "kill_reason": "wall"},
    None,
]
REPORTS = [  # beside those of tests/sandbox/test_verdict.py
    *(framed(json.dumps(head).encode() + b"\nvalue") for head in HEADS),
    framed(b"{" * 262_140),
    framed(b'{"value": 3}\n\xff\xfe\xfd'),
    framed(b"\xff" * 262_144),
    framed(b""),
    b"\xff\xff\xff\xff" + b"x" * 100_000,
    b"\0\0\0\0" * 50_000,
    b"\x01",
    b"R" * 100,
    b"\0" * channel.ENDED.size,
]


def test_forged_reports_change_no_outcome_and_no_count(daemon: Daemon) -> None:
    """Each is answered, truthfully, and the next one is served by the same slot."""
    for report in REPORTS:
        for status, outcome in ((3, ProgramOutcome.EXIT_NONZERO), (0, ProgramOutcome.OK)):
            response = daemon.run(f"{SAY}\nsay({report!r})\nos.write(1, b'end')\nos._exit({status})")
            assert (response.outcome, response.exit_code, response.stdout) == (outcome, status, "end"), report[:80]
            assert response.kill_reason == "" and (response.value is None or status == 0), report[:80]
            assert response.exception is None and response.truncated_bytes == 0 and not response.files, report[:80]
    assert attack(daemon, "print('still here')").stdout == "still here\n"


def test_a_flood_of_reports_costs_nobody_an_answer(daemon: Daemon) -> None:
    code = f"{SAY}\nimport time\nend = time.monotonic() + 0.2\nwhile time.monotonic() < end: say(b'\\0' * 65536)"
    assert attack(daemon, code).outcome is ProgramOutcome.OK


def test_another_process_group_or_session_changes_nothing(daemon: Daemon) -> None:
    for move in ("os.setsid()", "os.setpgid(0, 0)", "os.setpgid(0, os.getppid())", "os.setpgid(0, 1)"):
        code = f"import os\ntry: {move}\nexcept OSError: pass\nos.write(1, b'x')\nos._exit(7)"
        response = attack(daemon, code)
        assert (response.outcome, response.exit_code, response.stdout) == (ProgramOutcome.EXIT_NONZERO, 7, "x")


def test_the_signals_of_a_slot_cannot_be_forged(daemon: Daemon) -> None:
    code = """
import os, signal
sent = []
for target in (os.getppid(), -os.getppid(), 1, 0):
    for number in (signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM):
        try: signal.signal(number, signal.SIG_IGN); os.kill(target, number)
        except OSError: pass
print("done")
"""
    response = attack(daemon, code)
    assert (response.outcome, response.stdout, response.kill_reason) == (ProgramOutcome.OK, "done\n", "")


def test_a_child_is_no_sibling_and_a_thread_is_no_program(daemon: Daemon) -> None:
    code = """
import ctypes, os, threading
libc = ctypes.CDLL(None)
print(libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0))  # clone with CLONE_PARENT
threading.Thread(target=os._exit, args=(6,)).start()
import time; time.sleep(60)
"""
    response = attack(daemon, code)
    assert (response.outcome, response.exit_code) == (ProgramOutcome.EXIT_NONZERO, 6)
    assert response.stdout == "-1\n"


def test_a_first_thread_that_ends_before_the_others_is_waited_for(daemon: Daemon) -> None:
    code = """
import ctypes, os, threading, time
threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"late"), os._exit(5))).start()
ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread alone
"""
    response = attack(daemon, code)
    assert (response.exit_code, response.stdout) == (5, "late")


@pytest.mark.parametrize(
    ("code", "outcome", "status"),
    [
        ("import atexit, os\natexit.register(os._exit, 0)\n1 / 0", ProgramOutcome.EXCEPTION, 0),
        ("error = SyntaxError()\nerror.lineno, error.text = 1, 5\nraise error", ProgramOutcome.EXCEPTION, 1),
        ("import builtins\nbuiltins.len = None\n1 / 0", ProgramOutcome.EXCEPTION, 1),
        ("import sys\nsys.exit(2**70)", ProgramOutcome.EXIT_NONZERO, 255),  # as CPython does
    ],
)
def test_a_failure_does_not_end_as_a_success(daemon: Daemon, code: str, outcome: ProgramOutcome, status: int) -> None:
    response = attack(daemon, code)
    assert (response.outcome, response.exit_code, response.value) == (outcome, status, None)
