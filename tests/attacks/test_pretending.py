"""Hostile programs that lie about how they ended, and crash in odd ways."""

from __future__ import annotations

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import ProgramOutcome
from tests.attacks.support import attack


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
