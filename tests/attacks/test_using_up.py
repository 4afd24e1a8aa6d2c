"""Hostile programs that use up memory and processes."""

from __future__ import annotations

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import attack, promised, tried
from tests.sandbox.support import slot_processes


async def test_fork_burst_is_bounded_and_killed(client: SandboxClient) -> None:
    promised(client, "L1", "L2", "L3", without="no_process_limit")
    code = """
import os, time
for n in range(60):
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


async def test_memory_of_a_call_is_limited_whatever_its_number_of_processes(client: SandboxClient) -> None:
    promised(client, "L1", "L2", "L3", without="no_memory_cgroup")
    # Each process keeps to its own limit; together they want five times as much as the call may have.
    code = """
import os, time
for n in range(9):
    if os.fork() == 0:
        held = bytearray(b"x") * (100 * 2**20)
        time.sleep(60)
        os._exit(len(held) % 2)
try:
    while True: os.wait()
except ChildProcessError:
    print("all were killed")
"""
    response = await attack(client, code, memory_bytes=128 * 2**20, processes=12, wall_seconds=3.0)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.MEMORY, "memory")


async def test_a_child_that_the_kernel_kills_for_memory_is_told_even_if_its_parent_goes_on(
    client: SandboxClient,
) -> None:
    promised(client, "L1", "L2", "L3", without="no_memory_cgroup")
    code = """
import os, time
pids = []
for n in range(6):
    pids.append(os.fork())
    if pids[-1] == 0:
        held = bytearray(b"x") * (100 * 2**20)
        time.sleep(1)
        os._exit(0)
print(any(os.waitpid(pid, 0)[1] for pid in pids))
"""
    response = await attack(client, code, memory_bytes=128 * 2**20, processes=12)
    assert (response.outcome, response.stdout, response.exit_code) == (ProgramOutcome.MEMORY, "True\n", 0)


async def test_a_slot_outlives_every_memory_bomb_in_it(client: SandboxClient) -> None:
    promised(client, "L1", "L2", "L3", without="no_memory_cgroup")
    code = """
import os
os.fork(), os.fork(), os.fork()
held = []
while True: held.append(bytearray(b"x" * 2**20))
"""
    before = slot_processes(client)
    for _ in range(3):
        response = await attack(client, code, memory_bytes=100 * 2**20, wall_seconds=2.0)
        assert response.outcome in (ProgramOutcome.MEMORY, ProgramOutcome.WALL_TIMEOUT)
    assert slot_processes(client) == before


async def test_files_count_as_memory_of_the_call_and_are_forgotten_with_it(client: SandboxClient) -> None:
    promised(client, "L3", without="no_memory_cgroup")
    code = "open('big', 'wb').write(bytes(60 * 2**20))\nprint('written')"
    for _ in range(4):  # kept, they would pass the limit at the third
        response = await attack(client, code, memory_bytes=64 * 2**20)
        assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "written\n")
