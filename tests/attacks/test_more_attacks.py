"""More hostile programs, one per test: odd system calls, priorities, sources and answers that are meant to hurt."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import attack, promised, tried
from tests.sandbox.support import daemon_process, eventually, program_processes, run, slot_processes


async def test_the_clock_cannot_be_changed(client: SandboxClient) -> None:
    calls = ["__import__('time').clock_settime(0, 0)", "libc.settimeofday((ctypes.c_long * 2)(1, 1), None)"]
    response = await attack(client, tried(*calls))
    assert response.stdout.split() == ["PermissionError", "-1"]


async def test_kernel_logs_dumps_and_handles_are_out_of_reach(client: SandboxClient) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the system-call numbers below are those of x86-64")
    calls = [
        "libc.syscall(103, 3, 0, 0)",  # syslog
        "libc.syscall(304, -100, 0, 0)",  # open_by_handle_at
        "libc.syscall(246, 0, 0, 0, 0)",  # kexec_load
        "libc.syscall(175, 0, 0, 0)",  # init_module
        "libc.syscall(240, b'/box', 0o102, 0o600, 0)",  # mq_open
        "libc.syscall(311, os.getppid(), 0, 0, 0, 0, 0)",  # process_vm_writev
        "libc.syscall(167, b'/tmp/x', 0)",  # swapon
    ]
    response = await attack(client, tried(*calls))
    assert response.stdout.split() == ["-1"] * len(calls)


async def test_kernel_files_cannot_be_written(client: SandboxClient) -> None:
    promised(client, "L2", "L3")
    paths = (
        "/dev/kmsg",
        "/proc/sysrq-trigger",
        "/sys/power/state",
        "/proc/self/oom_score_adj",
        "/proc/sys/vm/drop_caches",
    )
    response = await attack(client, tried(*(f"os.open({path!r}, os.O_WRONLY)" for path in paths)))
    assert set(response.stdout.split()) <= {"FileNotFoundError", "PermissionError"}


async def test_a_crash_leaves_no_core_file(client: SandboxClient) -> None:
    response = await attack(client, "import resource, os\nprint(resource.getrlimit(resource.RLIMIT_CORE))\nos.abort()")
    # Where not even oneself may be signalled, the C library ends itself by an instruction that is not permitted.
    assert response.stdout == "(0, 0)\n"
    assert response.signal == "SIGABRT" or (client.info().walls < "L3" and response.signal == "SIGSEGV")


async def test_calls_of_the_32_bit_kind_kill_the_caller(client: SandboxClient) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("int 0x80 is an x86 instruction")
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("still here")
"""
    response = await attack(client, code)
    assert (response.outcome, response.stdout) == (ProgramOutcome.SIGNAL, "")
    assert response.signal in ("SIGSYS", "SIGSEGV")  # the second where the kernel has no such entry at all


async def test_priorities_can_only_be_lowered(client: SandboxClient) -> None:
    calls = [
        "os.nice(-5)",
        "os.setpriority(os.PRIO_PROCESS, 0, -20)",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "libc.mlockall(3)",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_RTPRIO, (1, 1))",
    ]
    response = await attack(client, tried(*calls))
    assert set(response.stdout.split()) <= {"PermissionError", "ValueError", "-1", "0"}
    assert response.stdout.split()[:3] == ["PermissionError"] * 3


async def test_ones_own_slot_cannot_be_made_to_wait_by_joining_its_group(client: SandboxClient) -> None:
    calls = [
        "os.setpgid(0, os.getppid())",
        "os.setpriority(os.PRIO_PGRP, 0, 19)",
        "os.setpriority(os.PRIO_PGRP, os.getppid(), 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    ]
    before = [process.nice() for process in slot_processes(client)]
    await attack(client, tried(*calls))
    assert [process.nice() for process in slot_processes(client)] == before


async def test_a_long_program_makes_way_for_short_ones_and_its_slot_does_not(client: SandboxClient) -> None:
    if "same_user" in client.info().failed_probes:
        pytest.skip("the slot may not touch priorities where other processes run under its user")
    task = asyncio.ensure_future(run(client, "while True: pass", wall_seconds=20.0))

    def aged() -> bool:
        return any(process.nice() > psutil.Process().nice() for process in program_processes(client))

    assert await asyncio.to_thread(eventually, aged)
    assert slot_processes(client)[0].nice() == psutil.Process().nice()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_process_tricks_outlive_nothing(client: SandboxClient) -> None:
    code = """
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
print("left")
os._exit(0)
"""
    daemon = daemon_process(client)
    await run(client, "1")  # its slot is up, and nothing of earlier calls is left
    before = len(daemon.children(recursive=True))
    assert (await attack(client, code)).stdout == "left\n"
    assert await asyncio.to_thread(eventually, lambda: len(daemon.children(recursive=True)) == before)


async def test_a_flood_of_short_processes_leaves_nothing(client: SandboxClient) -> None:
    code = "import os\nfor _ in range(300):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\nprint('done')"
    assert (await attack(client, code)).stdout == "done\n"


async def test_answers_that_swell_in_json_arrive_whole(client: SandboxClient) -> None:
    response = await attack(client, "print('\\x01' * 60_000, end='')\n'\\x02' * 10", output_bytes=64 * 1024)
    assert response.stdout == "\x01" * 60_000
    assert response.stdout_bytes == 60_000


async def test_sources_of_any_size_are_run_or_refused(client: SandboxClient) -> None:
    assert (await attack(client, "")).outcome is ProgramOutcome.OK
    assert (await attack(client, "#" * 10 * 2**20 + "\nprint(1)")).stdout == "1\n"
    response = await attack(client, "#" * (16 * 2**20 + 1))
    assert (response.outcome, response.run_seconds) == (ProgramOutcome.REJECTED, 0.0)
    assert "at most" in response.message


async def test_bytes_that_are_no_text_are_replaced_and_flagged(client: SandboxClient) -> None:
    response = await attack(client, "import os\nos.write(2, b'a\\xff')\nos.write(1, 'é'.encode())")
    assert (response.stdout, response.stderr, response.invalid_utf8) == ("é", "a\ufffd", True)
    assert not (await run(client, "print('é')")).invalid_utf8


async def test_receipts_say_what_a_call_used_and_why_it_ended(client: SandboxClient) -> None:
    code = """
import os
for _ in range(3):
    if os.fork() == 0:
        for n in range(10**6): pass
        os._exit(0)
for _ in range(3): os.wait()
"""
    response = await attack(client, code)
    alone = await run(client, "for n in range(10**6): pass")
    assert response.cpu_seconds > 2 * alone.cpu_seconds  # that of its children included
    assert (response.kill_reason, response.node != "") == ("", True)
    late = await run(client, "print('é' * 10)\nwhile True: pass", wall_seconds=0.3)
    assert (late.kill_reason, late.stdout_bytes, late.stderr_bytes) == ("wall", 21, 0)
    loud = await run(client, "print('x' * 5000)", output_bytes=1000)
    assert (loud.kill_reason, loud.stdout_bytes, loud.truncated_bytes) == ("output", 5001, 4001)
