"""Each limit ends the program that passes it, says so, and keeps what it had printed."""

from __future__ import annotations

import asyncio

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request
from tests.sandbox.support import LIMITS, run


async def test_wall_time_is_limited_and_partial_output_kept(client: SandboxClient) -> None:
    response = await run(client, "print('so far')\nimport time\ntime.sleep(60)", wall_seconds=0.3)
    assert response.outcome is ProgramOutcome.WALL_TIMEOUT
    assert (response.stdout, response.exit_code, response.signal) == ("so far\n", None, None)
    assert response.run_seconds >= 0.3


async def test_cpu_time_is_limited(client: SandboxClient) -> None:
    response = await run(client, "print('so far')\nwhile True: pass", cpu_seconds=0.5)
    assert response.outcome is ProgramOutcome.CPU_TIMEOUT
    assert response.stdout == "so far\n"
    assert response.cpu_seconds >= 0.5


async def test_cpu_limit_holds_for_a_program_that_ignores_the_signal(client: SandboxClient) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    response = await run(client, code, cpu_seconds=1.0, wall_seconds=60.0)  # other work may share the machine
    assert response.outcome is ProgramOutcome.CPU_TIMEOUT


async def test_memory_is_limited(client: SandboxClient) -> None:
    response = await run(client, "print('so far')\nx = bytearray(10**9)", memory_bytes=100 * 2**20)
    assert response.outcome is ProgramOutcome.MEMORY
    assert response.stdout == "so far\n"
    assert "MemoryError" in response.stderr


async def test_memory_that_grows_bit_by_bit_is_limited(client: SandboxClient) -> None:
    response = await run(client, "x = []\nwhile True: x.append('a' * 10**5)", memory_bytes=100 * 2**20)
    assert response.outcome is ProgramOutcome.MEMORY


async def test_memory_within_the_limit_is_there(client: SandboxClient) -> None:
    response = await run(client, "len(bytearray(80 * 2**20))", memory_bytes=100 * 2**20)
    assert response.value == str(80 * 2**20)
    assert response.peak_memory_bytes > 80 * 2**20


async def test_what_a_slot_held_for_earlier_calls_is_not_taken_from_the_limit(client: SandboxClient) -> None:
    files = {"large": bytes(15 * 2**20)}
    large = [Request(id=f"large-{n}", code="1", files=files, fetch=["large"], limits=LIMITS) for n in range(4)]
    for response in await asyncio.gather(*map(client.run, large)):
        assert dict(response.files) == files
    for _ in range(8):
        response = await run(client, "len(bytearray(80 * 2**20))", memory_bytes=100 * 2**20)
        assert response.value == str(80 * 2**20)


async def test_output_is_limited_and_its_head_kept(client: SandboxClient) -> None:
    response = await run(client, "for n in range(10**9): print(n)", output_bytes=1000)
    assert response.outcome is ProgramOutcome.OUTPUT_LIMIT
    assert response.stdout.startswith("0\n1\n2\n")
    assert len(response.stdout) == 1000
    assert response.truncated_bytes > 0


async def test_stdout_and_stderr_share_the_limit(client: SandboxClient) -> None:
    code = "import sys\nprint('a' * 599)\nprint('b' * 599, file=sys.stderr)"
    response = await run(client, code, output_bytes=1000)
    assert response.outcome is ProgramOutcome.OUTPUT_LIMIT
    assert len(response.stdout) + len(response.stderr) == 1000
    assert response.truncated_bytes == 200


@pytest.mark.parametrize("size", [1000, 65536, 300_000])
async def test_output_up_to_the_limit_is_complete(client: SandboxClient, size: int) -> None:
    response = await run(client, f"import sys\nsys.stdout.write('x' * {size})\nNone", output_bytes=size)
    assert response.outcome is ProgramOutcome.OK
    assert response.stdout == "x" * size
    assert response.truncated_bytes == 0


async def test_long_values_are_cut_and_counted(client: SandboxClient) -> None:
    response = await run(client, "'x' * 5000", output_bytes=1000)
    assert response.outcome is ProgramOutcome.OK
    assert response.value is not None
    assert len(response.value) == 1000
    assert response.truncated_bytes == 4002


async def test_endless_recursion_ends_by_itself(client: SandboxClient) -> None:
    response = await run(client, "def f(): f()\nf()")
    assert response.exception is not None
    assert response.exception.type == "RecursionError"


async def test_recursion_without_a_limit_is_bounded(client: SandboxClient) -> None:
    code = "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()"
    response = await run(client, code, memory_bytes=30 * 2**20)
    assert response.outcome in (ProgramOutcome.MEMORY, ProgramOutcome.SIGNAL, ProgramOutcome.EXCEPTION)


async def test_queueing_is_not_run_time(own_client: SandboxClient) -> None:
    slow = "import time; time.sleep(0.3)"
    first, second = await asyncio.gather(run(own_client, slow), run(own_client, "1"))
    assert second.queue_seconds >= 0.3
    assert second.run_seconds < first.run_seconds


def test_limits_have_defaults_that_run_ordinary_programs() -> None:
    assert Limits().processes >= 2
