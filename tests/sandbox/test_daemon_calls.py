"""The queue, the workers and the daemon's life, seen from its connection: every call is answered once, truthfully; and
programs whose true end is known (`truth.txt`), each of which is reported as what it is."""

from __future__ import annotations

import ast
import glob
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import psutil
import pytest

from rocstar.sandbox import wire
from rocstar.sandbox.call import MAX_OUTPUT_BYTES, Call, DaemonSettings, Response, SandboxDown
from rocstar.sandbox.daemon import BOOT
from rocstar.sandbox.daemon.main import failed_probes
from rocstar.sandbox.daemon.pool import BARE, Pool, Pools
from rocstar.sandbox.daemon.queue import Queue
from rocstar.sandbox.walls import plans
from rocstar.sandbox.walls.cgroups import Groups
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.driver import Daemon, Refused, daemon_of, ended, eventually, is_starved, needs_empty_folder, unread
from tests.sandbox.scripted import INFO


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One slot; a test may break all below the daemon."""
    with Daemon(slots=1, grace_seconds=1.0) as started:
        yield started


def test_callers_take_turns(daemon: Daemon) -> None:
    many = [daemon.submit("import time\ntime.sleep(0.02); time.time()") for _ in range(40)]
    other = 1 << wire.CALLER_SHIFT | 10**6
    daemon.send(FrameKind.CALL, wire.encode(Call(id="other", code="import time\ntime.time()")), other)
    times = [float(daemon.answer(number).value or 0) for number in many]
    assert float(daemon.answer(other).value or 0) < times[20] and times == sorted(times)


def test_as_many_programs_run_at_once_as_there_are_slots_and_no_two_share_a_user() -> None:
    slots = 5
    with Daemon(slots=slots) as daemon:
        running = [daemon.begin() for _ in range(slots)]
        assert len({process.uids().real for process in daemon.slots()}) == (slots if os.geteuid() == 0 else 1)
        assert {daemon.cancel(number).outcome for number in running} == {"cancelled"}
        code = "import time\na = time.time()\ntime.sleep(0.2)\na, time.time()"
        numbers = [daemon.submit(code) for _ in range(7)] + [daemon.submit(f"{code} # numpy") for _ in range(2)]
        numbers += [daemon.submit(code, session=f"s{n}", cell=1) for n in range(2)]
        spans = [eval(daemon.answer(number).value or "") for number in numbers]
    for at, _ in spans:
        assert sum(start <= at < end for start, end in spans) <= slots


def test_the_limit_of_a_call_that_has_just_ended_does_not_end_the_next_one(daemon: Daemon) -> None:
    number = daemon.submit("import time\ntime.sleep(1.5)\n1", wall_seconds=2.0)
    assert eventually(daemon.programs)
    daemon.process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not daemon.programs())
    time.sleep(1.0)  # now the daemon sees the limit first, and then the end
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.answer(number).value == "1"
    assert daemon.run("1").value == "1"


def test_a_call_waits_no_longer_than_its_patience(daemon: Daemon) -> None:
    first = daemon.begin()
    response = daemon.run("1", patience_seconds=0.2)
    assert (response.outcome, response.isolation) == ("overloaded", "")
    assert "patience of 0.2 seconds" in response.message
    daemon.cancel(first)
    assert daemon.run("import time\ntime.sleep(0.5)\n1", patience_seconds=0.2).value == "1", "it did not wait"


def test_a_full_queue_says_so_at_once() -> None:
    with Daemon(slots=1, max_queue=2) as daemon:
        first = daemon.begin()
        waiting = [daemon.submit("1") for _ in range(2)]
        assert daemon.run("1").outcome == "overloaded"
        daemon.send(FrameKind.CANCEL, number=first)
        assert [daemon.answer(number).value for number in waiting] == ["1", "1"]


def test_queueing_is_not_run_time(daemon: Daemon) -> None:
    first, second = daemon.submit("import time\ntime.sleep(0.4)"), daemon.submit("1")
    assert daemon.answer(first).run_seconds >= 0.4
    answer = daemon.answer(second)
    assert answer.queue_seconds > max(0.3, answer.run_seconds)


def test_a_cancelled_program_ends_and_one_that_waits_never_runs(daemon: Daemon) -> None:
    running, waiting = daemon.begin(), daemon.submit("print('never')")
    for number in (waiting, running, 999):
        daemon.send(FrameKind.CANCEL, number=number)
    answers = [daemon.answer(waiting), daemon.answer(running)]
    assert [answer.outcome for answer in answers] == ["cancelled", "cancelled"]
    assert daemon.run("1").value == "1"


def test_the_same_number_twice_is_refused(daemon: Daemon) -> None:
    first = daemon.begin()
    daemon.number -= 1
    assert "that of another call" in daemon.answer(daemon.submit("1")).message
    assert daemon.cancel(first).outcome == "cancelled"


@needs_empty_folder
def test_files_go_in_and_come_back_and_the_next_call_finds_none(daemon: Daemon) -> None:
    code = "import os\nopen('d/ä', 'wb').write(open('d/in', 'rb').read() * 2)\nos.symlink('/etc/passwd', 'link')"
    response = daemon.run(code, files={"d/in": b"\xff\0"}, fetch=("d/ä", "./d/in", "link", "d", "missing"))
    assert response.files == {"d/ä": b"\xff\0\xff\0", "./d/in": b"\xff\0"}
    assert daemon.run("import os\nos.listdir('.')").value == "[]"
    large = daemon.run("open('f', 'wb').write(bytes(10**7));", fetch=("f",))
    assert len(large.files["f"]) == 10**7


@pytest.mark.parametrize(
    ("end", "outcome"),
    [("1 / 0", "exception"), ("raise SystemExit(3)", "exit_nonzero"), ("held = bytearray(2**33)", "memory")],
)
def test_files_come_back_from_a_program_that_failed_wherever_it_is_then(daemon: Daemon, end: str, outcome: str) -> None:
    held = "held = [bytearray(2**20) for _ in range(80)]\ntry:\n    while held.append(open('f')) is None: pass"
    code = f"import os\nopen('f', 'wb').write(b'x' * 10**7)\n{held}\nexcept OSError: os.chdir('/')\n{end}"
    response = daemon.run(code, fetch=("f",), memory_bytes=2**27)
    assert (response.outcome, len(response.files["f"])) == (outcome, 10**7), response


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(60)", "os.fork()"])
def test_no_files_come_back_from_a_program_that_did_not_come_to_its_end(daemon: Daemon, end: str) -> None:
    response = daemon.run(f"import os, time\nopen('f', 'w').write('x')\n{end}", fetch=("f",), wall_seconds=0.3)
    assert response.files == ({"f": b"x"} if end == "os.fork()" else {})


@pytest.mark.parametrize("which", [Daemon.slots, Daemon.zygotes], ids=["slot", "zygote"])
def test_what_dies_under_a_call_is_our_fault_and_is_replaced(
    daemon: Daemon, which: Callable[[Daemon], list[psutil.Process]]
) -> None:
    number = daemon.begin()
    which(daemon)[0].kill()
    response = daemon.answer(number)
    assert (response.outcome, response.isolation) == ("internal", "")
    assert daemon.run("1").value == "1"


def test_a_program_is_not_charged_for_the_time_that_the_whole_sandbox_was_stopped(daemon: Daemon) -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\n1"
    numbers = [daemon.submit(code, wall_seconds=1.0), daemon.submit(code, wall_seconds=1.0, session="s", cell=1)]
    assert eventually(daemon.programs)
    stopped = [psutil.Process(daemon.process.pid), *daemon.below()]
    for process in stopped:
        process.suspend()
    time.sleep(1.5)
    for process in reversed(stopped):
        process.resume()
    assert [daemon.answer(number).value for number in numbers] == ["1", "1"]


def test_a_slot_that_is_stuck_before_the_program_ran_is_our_fault(daemon: Daemon) -> None:
    assert daemon.run("1").value == "1"
    daemon.slots()[0].suspend()
    assert daemon.run("1", wall_seconds=0.1).outcome == "internal"
    assert daemon.run("1").value == "1"


def test_a_slot_that_is_stuck_under_a_program_that_took_too_long_does_not_excuse_it(daemon: Daemon) -> None:
    number = daemon.begin(wall_seconds=1.0)
    daemon.slots()[0].suspend()
    response = daemon.answer(number)
    assert (response.outcome, response.kill_reason) == ("wall_timeout", "wall")
    assert daemon.run("1").value == "1"


def test_sessions_leave_the_slots_of_plain_calls_alone(daemon: Daemon) -> None:
    daemon.cell("s", 1, "1")
    daemon.run("import os\nif os.fork() == 0: os._exit(0)\nos.wait()")  # its slot is not used again
    assert daemon.run("1").value == "1"
    daemon.end_sessions()


def test_a_bug_while_an_answer_is_made_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = BOOT.replace(
        "main()",
        "\nfrom rocstar.sandbox.daemon import verdict\nkeep = verdict.kept_value\n"
        "verdict.kept_value = lambda report, value, call: 1 / 0 if call.code == '7' else keep(report, value, call)\n"
        "main()",
    )
    monkeypatch.setattr("rocstar.sandbox.daemon.BOOT", boot)
    with Daemon(slots=1) as daemon:
        response = daemon.run("7")
        assert (response.outcome, response.id) == ("internal", "1")
        assert "ZeroDivisionError" in response.message
        assert daemon.run("8").value == "8"


def test_every_call_is_answered_once(daemon: Daemon) -> None:
    codes = ["1", "1 / 0", "import os\nos._exit(1)", "print('x' * 10**5)"] * 10
    numbers = [daemon.submit(code, output_bytes=1000) for code in codes]
    for number in numbers[::7]:
        daemon.send(FrameKind.CANCEL, number=number)
    answers = [daemon.answer(number) for number in numbers]
    assert all(isinstance(answer, Response) for answer in answers)
    assert not unread(daemon)


def test_usage_counts_what_runs_and_what_waits_and_the_cpu_of_programs(daemon: Daemon) -> None:
    before = daemon.usage()
    burned = daemon.run("import time\nwhile time.process_time() < 0.5: pass").cpu_seconds
    running, waiting = daemon.begin(), daemon.submit("1")
    told = [before]
    assert eventually(lambda: told.append(daemon.usage()) or told[-1].waiting), "a report of before may come first"
    usage = told[-1]
    daemon.cancel(running)
    daemon.answer(waiting)
    assert (usage.running, usage.waiting, usage.sessions) == (1, 1, 0)
    assert usage.cpu_seconds - before.cpu_seconds >= burned >= 0.5


# The daemon's life


@pytest.mark.parametrize("plan", [plan.name for plan in plans.PLANS])
def test_its_end_leaves_no_process_no_folder_and_no_group(plan: str) -> None:
    with daemon_of(plan) as daemon:
        assert daemon.run("open('left', 'w').write('1')").outcome == "ok"
        daemon.cell("s", 1, "open('left', 'w').write('1')")
        daemon.submit("import time\ntime.sleep(60)")
        family = daemon.below()
        assert family
    assert eventually(lambda: not any(process.is_running() for process in family))
    assert glob.glob(f"{daemon.workdirs}*") == []


@pytest.mark.parametrize("plan", [plan.name for plan in plans.PLANS])
def test_files_of_a_slot_that_has_ended_are_removed_while_the_daemon_runs(plan: str) -> None:
    with daemon_of(plan, slots=1) as daemon:
        daemon.cell("s", 1, "for n in range(300): open(f'left{n}', 'w').close()")
        daemon.end("s")
        daemon.begin("open('left', 'w').close()")
        daemon.keepers()[0].kill()
        assert eventually(lambda: glob.glob(f"{daemon.workdirs}/*") == [])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_ends_with_the_process_that_started_it_even_where_the_connection_stays_open(is_stopped: bool) -> None:
    code = """
        import os, sys, time
        from tests.sandbox.driver import Daemon
        daemon = Daemon()
        print(daemon.process.pid, flush=True)
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        family = [process, *process.children(recursive=True)]
        heirs = psutil.Process(parent.pid).children()
        if is_stopped:
            process.suspend()
        parent.kill()
    assert eventually(lambda: not any(each.is_running() for each in family))
    for heir in heirs:
        if heir.is_running():
            heir.kill()


def test_what_is_no_frame_ends_the_connection() -> None:
    daemon = Daemon()
    daemon.socket.sendall(b"\xff" * 100)
    with pytest.raises((EOFError, ConnectionError)):
        while True:
            daemon.next_frame()
    daemon.close()
    assert daemon.process.returncode == 0


def test_it_says_why_it_does_not_serve() -> None:
    for module in ("no_such_module", ".relative"):
        with pytest.raises(Refused, match=rf"{module}.*install it or take it out"):
            Daemon(preload=(module,))
    advice = r"asks for L3; permit namespaces .*In a container.*, or lower it by sandbox\.min_isolation=L[12]"
    with pytest.raises(Refused, match=advice):
        Daemon(skip_plans=2, min_isolation=DaemonSettings().min_isolation)
    with pytest.raises(Refused, match="no sandbox slot can be started here"):
        Daemon(skip_plans=len(plans.PLANS))


def test_limits_below_those_of_a_program_are_refused_and_not_reported_as_its_failure() -> None:
    """By processes of their own: a hard limit is not raised again."""
    cases = {
        ("NOFILE", 200): r"may open 256 files, and a process here 200; .*ulimit -Hn",
        ("NPROC", 17): "of the 17 .*-Hu",
        ("AS", 2**30): "memory_bytes is .*-Hv",
        ("DATA", 2**30): "memory_bytes is .*-Hd",
        ("FSIZE", 10**6): "files of .* of 1000000; .*-Hf",
    }
    code = f"""
import os, resource
from tests.sandbox.driver import Daemon
for name, hard in {[*cases]}:
    if os.fork() == 0:
        resource.setrlimit(getattr(resource, f"RLIMIT_{{name}}"), (hard, hard))
        Daemon()
        break
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    refused = re.findall("Refused: .*", done.stderr)
    for case, sentence in zip(cases.values(), refused, strict=True):
        assert re.search(case, sentence), done.stderr


def test_neither_secrets_of_its_environment_nor_a_umask_that_closes_folders_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROCSTAR_SANDBOX_TOKEN", "secret")
    before = os.umask(0o077)
    try:
        with Daemon() as daemon:
            for process in (psutil.Process(daemon.process.pid), *daemon.zygotes()):
                assert "secret" not in f"{process.cmdline()} {process.environ()}"
            assert "secret" not in (daemon.run("import os\ndict(os.environ)").value or "secret")
            assert daemon.run("import os\nos.umask(0)").value == str(0o022)
    finally:
        os.umask(before)


def test_signals_of_the_terminal_do_not_end_it(daemon: Daemon) -> None:
    for pid in (daemon.process.pid, *(zygote.pid for zygote in daemon.zygotes())):
        assert os.getsid(pid) == pid, "those of the terminal's or the trainer's process group reach it"
    os.kill(daemon.process.pid, signal.SIGINT)
    assert daemon.run("1").value == "1"


# As much as is allowed


def test_memory_up_to_the_limit_is_there_whatever_earlier_calls_held(daemon: Daemon) -> None:
    files = {"large": bytes(15 * 2**20)}
    for _ in range(2):
        assert daemon.run("1", files=files, fetch=("large",)).files == files
        response = daemon.run("len(bytearray(80 * 2**20))", memory_bytes=100 * 2**20)
        assert response.value == str(80 * 2**20)
        assert response.peak_memory_bytes > 80 * 2**20


def test_recursion_without_a_limit_is_bounded(daemon: Daemon) -> None:
    response = daemon.run("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", memory_bytes=2**25)
    assert response.outcome in ("memory", "signal", "exception")


def test_the_longest_answer_fits_a_frame(daemon: Daemon) -> None:
    """Each byte that is no text becomes three."""
    code = f"""
        import os
        class Long:
            def __repr__(self): return "\\0" * 10**6
        open("f", "wb").write(bytes(2**24))
        for _ in range({MAX_OUTPUT_BYTES // 2**16}): os.write(1, bytes([255]) * 2**16)
        Long()
    """
    response = daemon.run(textwrap.dedent(code), output_bytes=MAX_OUTPUT_BYTES, fetch=("f",))
    assert (response.outcome, response.stdout) == ("ok", "\ufffd" * MAX_OUTPUT_BYTES), response.message
    assert len(response.value or "") + response.truncated_bytes == 10**6
    assert response.files["f"] == bytes(2**24)


def test_a_client_that_takes_no_answers_holds_what_waits_and_loses_nothing(daemon: Daemon) -> None:
    code = f"import os\nfor _ in range({MAX_OUTPUT_BYTES // 2**16}): os.write(1, bytes([255]) * 2**16)"
    numbers = [daemon.submit(code, output_bytes=MAX_OUTPUT_BYTES) for _ in range(6)]
    time.sleep(0.5)
    assert all(len(daemon.answer(number).stdout) == MAX_OUTPUT_BYTES for number in numbers)


def programs() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """By name: limits, what is told, the program."""
    _, *parts = Path(__file__).with_name("truth.txt").read_text().split("=== ")
    split = [part.split("\n", 3) for part in parts]
    return {
        name: (ast.literal_eval(limits), ast.literal_eval(told), code[:-1].replace("\\0", "\0"))
        for name, limits, told, code in split
    }


PROGRAMS = programs()


@pytest.fixture(scope="module", params=[0, 2], ids=["L3", "L2"])
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, Response]]:
    """Of all of them, run beside each other."""
    with Daemon(skip_plans=request.param) as daemon:
        numbers = {name: daemon.submit(code, **limits) for name, (limits, _, code) in PROGRAMS.items()}
        told = {name: daemon.answer(number) for name, number in numbers.items()}
        again = {name for name, response in told.items() if is_starved(response)}
        yield told | {name: daemon.run(PROGRAMS[name][2], **PROGRAMS[name][0]) for name in again}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_reported_as_what_it_did(answers: dict[str, Response], name: str) -> None:
    answer, told = answers[name], PROGRAMS[name][1]
    assert {field: getattr(answer, field) for field in told} == told, answer
    assert answer.attempt == 1


async def test_the_cpu_of_a_keeper_is_not_forgotten_with_its_slot() -> None:
    pool = Pools(DaemonSettings(), "", Groups()).pool(BARE)
    pool.commands, other = socket.socketpair()
    pool.workers[1] = worker = cast(Any, SimpleNamespace(number=1, cpu_seconds=1.0, keeper_cpu_seconds=0.0))
    worker.keeper = os.getpid()
    before = pool.cpu_seconds()
    worker.keeper = 0  # gone
    pool.lost(worker)
    assert pool.cpu_seconds() == before > 1.0
    pool.commands.close()
    other.close()


async def test_nothing_is_written_to_a_client_that_has_left() -> None:
    """Its transport is closed then."""
    pools, transport = SimpleNamespace(open_for_session=None, cpu_seconds=lambda: 0.0), Mock()
    queue = Queue(DaemonSettings(), INFO, cast(Any, pools))
    queue.connection_made(transport)
    queue.connection_lost(None)
    transport.reset_mock()
    queue.send_usage()
    assert not transport.write.called


async def test_a_first_slot_that_dies_before_it_is_probed_is_told_in_words() -> None:
    pools: Any = SimpleNamespace(plan=SimpleNamespace(level="L3"))
    pool: Any = SimpleNamespace(idle=[])
    with pytest.raises(SandboxDown, match="its slot died"):
        await failed_probes(pools, pool)


@pytest.mark.parametrize(("plan", "terminated"), [(plans.CONFINED.name, False), (plans.PROCESS.name, True)])
def test_what_a_program_forked_ends_with_the_daemon_that_is_ended_without_namespaces_or_groups(
    plan: str, terminated: bool
) -> None:
    with daemon_of(plan, groups=False) as daemon:
        for _ in range(2):
            daemon.begin("import os, time\nfor _ in range(3):\n    if not os.fork(): os.setsid(); time.sleep(600)")
        assert eventually(lambda: len(daemon.below()) >= 12)
        family = daemon.below()
        if terminated:
            daemon.process.terminate()
            daemon.process.wait(60)
    assert eventually(lambda: all(map(ended, family))) and glob.glob(f"{daemon.workdirs}*") == []


def test_a_tier_has_a_number_for_each_slot() -> None:
    """The 257th slot of a tier ended the daemon."""
    pool = SimpleNamespace(workers=dict.fromkeys(range(256)), starting={256}, for_sessions={257})
    assert Pool.free_number(pool) == 258  # type: ignore[arg-type]
