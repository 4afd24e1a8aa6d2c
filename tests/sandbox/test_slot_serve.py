"""The contract of `serve`, over the compiled loop and its Python twin: real forks, a fake keeper, fake programs."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from rocstar.sandbox.slot import channel, serve
from rocstar.sandbox.slot.channel import Ended
from rocstar.sandbox.walls import linux, plans
from rocstar.sandbox.walls.cgroups import Shield
from tests.sandbox.slots import SECONDS, Reader

LOOPS = ["c", "python", "python without a pid namespace"]
BURN = "end = time.process_time() + 0.2\n    while time.process_time() < end: pass"


class Keeper(threading.Thread):
    """Renews the working directory and counts how often; one that fails says so."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(daemon=True)
        self.workdir = workdir
        self.ours, self.theirs = socket.socketpair()
        self.renewed = 0
        self.fails = False
        self.start()

    def run(self) -> None:
        while self.ours.recv(1):
            shutil.rmtree(self.workdir)
            self.workdir.mkdir()
            self.renewed += 1
            self.ours.send(b"\0" if self.fails else b"\1")


class Answer(NamedTuple):
    ended: Ended
    stdout: str
    stderr: str


class Loop:
    """A slot that runs `serve`; its programs are Python texts, sent over control."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.workdir = folder / "run"
        self.workdir.mkdir()
        self.keeper = Keeper(self.workdir)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(SECONDS)
        source, sink = os.pipe()
        self.status: int | None = None
        self.parent = os.fork()
        if self.parent == 0:
            self.channel.close()
            self.keeper.ours.close()
            be_loop(kind, theirs, self.keeper.theirs, str(self.workdir), sink)
        theirs.close()
        os.close(sink)
        with open(source) as file:
            self.pid = int(file.read() or 0)
        if not self.pid:
            pytest.skip("a pid namespace is not to be had here")

    def begin(self, code: str, kind: bytes = channel.RUN) -> tuple[Reader, Reader, socket.socket]:
        ours, theirs = socket.socketpair()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with theirs:
            socket.send_fds(self.channel, [kind], [out_end, err_end, theirs.fileno()])
        os.close(out_end)
        os.close(err_end)
        ours.sendall(textwrap.dedent(code).encode())
        ours.shutdown(socket.SHUT_WR)
        return Reader(out), Reader(err), ours

    def ended(self) -> Ended:
        return channel.parse_ended(self.channel.recv(channel.ENDED.size))

    def run(self, code: str, kind: bytes = channel.RUN) -> Answer:
        out, err, control = self.begin(code, kind)
        with control:
            return Answer(self.ended(), out.text(), err.text())

    def has_exited(self) -> bool:
        """Waits for it."""
        return self.channel.recv(1) == b""

    def close(self) -> int:
        """Its parent's wait status, once it has ended."""
        self.channel.close()
        if self.status is None:
            self.status = os.waitpid(self.parent, 0)[1]
        return self.status


def be_loop(kind: str, connection: socket.socket, reset: socket.socket, workdir: str, sink: int) -> NoReturn:
    """In a fresh fork; a fork more where there is a pid namespace."""
    try:
        is_private = "without" not in kind
        if is_private:
            user, group = os.geteuid(), os.getegid()
            linux.unshare(linux.CLONE_NEWPID | (linux.CLONE_NEWUSER if user else 0))
            if user:
                linux.map_user(user, user, group)
            pid = os.fork()
        else:
            linux.become_subreaper()
            pid = 0
        if pid or not is_private:
            os.write(sink, b"%d" % (pid or os.getpid()))
        os.close(sink)
        if pid:
            os.closerange(3, 1000)
            os.waitpid(pid, 0)
            os._exit(0)
        walls = plans.Walls(
            process=0,
            keeper=0,
            reset=reset.fileno(),
            workdir=workdir,
            private_processes=is_private,
            may_age=True,
            children=-1 if is_private else plans.open_children(),
            inside=plans.Inside(None, is_private, 4, ""),
            shield=Shield(),
        )
        loop = importlib.import_module("rocstar.sandbox.slot._fork") if kind == "c" else serve
        control = loop.serve(connection, walls)
        be_program(control)
    finally:
        os._exit(99)


def be_program(control: int) -> NoReturn:
    """Exit status 0, or 9 after an exception."""
    status = 9
    try:
        code = b""
        while data := os.read(control, 65536):
            code += data
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # pytest has put its own there
        exec(code.decode(), {"os": os, "time": time, "signal": signal, "sys": sys, "control": control})
        sys.stdout.flush()
        status = 0
    except BaseException as error:
        os.write(2, repr(error).encode())
    finally:
        os._exit(status)


def started(kind: str, folder: Path) -> Iterator[Loop]:
    if kind == "c":
        pytest.importorskip("rocstar.sandbox.slot._fork", reason="the compiled part was not built")
    loop = Loop(kind, folder)
    yield loop
    loop.close()


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loop]:
    yield from started(request.param, tmp_path)


@pytest.fixture(params=LOOPS[:2])
def private(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loop]:
    """Those with a pid namespace."""
    yield from started(request.param, tmp_path)


# What a program's process starts with


def test_a_process_has_its_streams_and_control_and_nothing_else(loop: Loop) -> None:
    code = """
    open_ones = []
    for fd in range(300):
        try:
            os.fstat(fd)
        except OSError:
            continue
        open_ones.append(fd)
    os.write(2, b"error")
    print(open_ones, os.read(0, 10), os.readlink("/proc/self/fd/0"), os.getcwd(), control)
    print([os.get_inheritable(fd) for fd in open_ones])
    """
    answer = loop.run(code)
    expected = f"[0, 1, 2, 3] b'' /dev/null {loop.workdir} 3\n[True, True, True, False]\n"
    assert (answer.stdout, answer.stderr) == (expected, "error")
    assert answer.ended.reusable and not (answer.ended.stopped or answer.ended.stale)


def test_no_signal_is_blocked_and_the_process_leads_a_group(loop: Loop) -> None:
    answer = loop.run("print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.getpgrp() == os.getpid())")
    assert answer.stdout == "set() True\n"


def test_nothing_of_a_call_lies_in_the_memory_of_the_next(loop: Loop) -> None:
    mark = os.urandom(16).hex()
    search = f"""
    import re
    pattern, found = re.compile(b"[{mark[0]}]{mark[1:]}"), 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(start)
                found += len(pattern.findall(memory.read(end - start)))
    print(found > 0)
    """
    assert loop.run(search + f"# {mark}").stdout == "True\n"
    assert loop.run(search).stdout == "False\n"


# How its end is told


@pytest.mark.parametrize(("code", "exit_code"), [("1", 0), ("os._exit(3)", 3), ("os.abort()", -signal.SIGABRT)])
def test_the_wait_status_is_that_of_the_first_process(loop: Loop, code: str, exit_code: int) -> None:
    assert os.waitstatus_to_exitcode(loop.run(code).ended.wait_status) == exit_code
    assert loop.run("print(1)").stdout == "1\n"


def test_cpu_and_memory_of_every_process_count_and_own_cpu_apart(loop: Loop) -> None:
    code = f"""
    source, sink = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            block = bytearray(b"x") * (64 << 20)
            {BURN.replace(chr(10), chr(10) + " " * 8)}
        os._exit(0)
    os.close(sink)
    os.read(source, 1)
    """
    ended = loop.run(code).ended
    assert ended.cpu_seconds >= 0.2 > ended.own_cpu_seconds > 0
    assert ended.peak_memory_bytes >= 64 << 20
    assert ended.slot_cpu_seconds >= ended.cpu_seconds and ended.run_seconds > 0


def test_threads_count_as_the_process_itself(loop: Loop) -> None:
    code = "import threading\ndef burn():\n    " + BURN + "\nt = threading.Thread(target=burn)\nt.start()\nt.join()"
    assert loop.run(code).ended.own_cpu_seconds >= 0.2


def test_what_a_program_leaves_running_is_killed_before_the_answer(loop: Loop) -> None:
    code = (
        "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        os.fork()\n        time.sleep(1000)"
    )
    answer = loop.run(code)  # its output ends: nobody holds it open any more
    assert answer.ended.wait_status == 0


def test_a_parent_that_waits_for_a_vforked_child_is_killed_with_it(loop: Loop) -> None:
    code = "import subprocess\nprint(1, flush=True)\nsubprocess.Popen(['sleep', '1000'], start_new_session=True).wait()"
    out, _, control = loop.begin(code)
    with control:
        time.sleep(0.3)
        os.kill(loop.pid, signal.SIGUSR1)
        ended = loop.ended()
    assert ended.stopped and os.WTERMSIG(ended.wait_status) == signal.SIGKILL
    assert out.text() == "1\n"


def test_a_signal_stops_the_call_and_the_next_one_runs(loop: Loop) -> None:
    out, _, control = loop.begin("print('begun', flush=True)\ntime.sleep(1000)")
    with control:
        os.kill(loop.pid, signal.SIGUSR1)
        ended = loop.ended()
    assert ended.stopped and ended.wait_status == signal.SIGKILL
    assert out.text() in ("", "begun\n")
    answer = loop.run("print(1)")
    assert (answer.stdout, answer.ended.stopped) == ("1\n", False)


def test_a_signal_that_a_program_sends_does_not_reach_the_next(loop: Loop) -> None:
    for _ in range(5):
        loop.run("os.kill(os.getppid(), signal.SIGUSR1)")
        assert loop.run("time.sleep(0.01)\nprint(1)").stdout == "1\n"


def test_a_program_that_runs_for_long_makes_way_for_others(loop: Loop) -> None:
    code = "while not (nice := os.getpriority(os.PRIO_PROCESS, 0)): time.sleep(0.01)\nprint(nice)"
    assert loop.run(code).stdout == "10\n"


# The working directory


def test_an_untouched_directory_is_kept(loop: Loop) -> None:
    time.sleep(0.05)  # files are dated by a clock that ticks coarsely
    for _ in range(3):
        assert loop.run("os.path.exists('f')\nopen('/dev/null').close()").ended.reusable
    assert loop.keeper.renewed == 0


@pytest.mark.parametrize(
    "code",
    [
        "open('f', 'w').close()",
        "open('f', 'w').close()\nos.unlink('f')",
        "os.chmod('.', 0o700)",
        "os.utime('.', (1, 1))",
        "os.mkdir('d')\nos._exit(1)",
        "os.utime('.', ns=(0, 0))\nstate = os.stat('.')\nos.utime('.', ns=(state.st_atime_ns, state.st_mtime_ns))",
    ],
)
def test_a_directory_that_a_program_has_touched_is_renewed_before_the_answer(loop: Loop, code: str) -> None:
    for number in range(1, 4):  # also within the tick in which it was made
        assert loop.run(code).ended.reusable
        assert loop.keeper.renewed == number
        assert list(loop.workdir.iterdir()) == []


def test_a_directory_that_is_kept_shows_the_next_call_what_is_in_it(loop: Loop) -> None:
    ended = loop.run("open('f', 'w').write('kept')", channel.RUN_AND_KEEP).ended
    assert ended.reusable and loop.keeper.renewed == 0
    assert loop.run("print(open('f').read())").stdout == "kept\n"
    assert loop.run("print(os.listdir('.'))").stdout == "[]\n"


def test_a_slot_whose_directory_cannot_be_renewed_says_so_and_exits(loop: Loop) -> None:
    loop.keeper.fails = True
    assert not loop.run("open('f', 'w').close()").ended.reusable
    assert loop.has_exited()


# Its life


def test_a_program_that_has_started_processes_makes_the_next_call_stale(private: Loop) -> None:
    assert private.run("if os.fork() == 0: os._exit(0)\nos.wait()").ended.reusable
    answer = private.run("print('run')")
    assert answer.ended.stale and not answer.ended.reusable
    assert answer.stdout == ""
    assert private.has_exited()


def test_a_call_for_the_kept_directory_is_never_stale(private: Loop) -> None:
    private.run("open('f', 'w').close()\nif os.fork() == 0: os._exit(0)\nos.wait()", channel.RUN_AND_KEEP)
    answer = private.run("print(os.listdir('.'))")
    assert answer.stdout == "['f']\n"
    assert not answer.ended.stale and not answer.ended.reusable
    assert private.has_exited()


def test_process_numbers_tell_nothing_but_how_many_calls_there_were(private: Loop) -> None:
    first, second, third = [int(private.run("print(os.getpid())").stdout) for _ in range(3)]
    assert (second, third) == (first + 1, first + 2)


def test_it_ends_with_its_channel_and_holds_no_descriptor_of_calls(loop: Loop) -> None:
    held = f"/proc/{loop.pid}/fd"
    loop.run("1")
    before = len(os.listdir(held))
    for _ in range(50):
        loop.run("1")
    assert len(os.listdir(held)) == before
    assert loop.close() == 0


def test_the_compiled_loop_refuses_to_run_where_it_would_kill_others() -> None:
    compiled = pytest.importorskip("rocstar.sandbox.slot._fork")
    with pytest.raises(ValueError, match="first process of a pid namespace"):
        compiled.serve(socket.socketpair()[0], None)
