"""Processes that are forked from one that has loaded what tests load, for a test session: the commands that tests
carry out, and the workers of `pytest -n`, whose one has imported the tests as well. To load it takes four seconds of
CPU each, and to import all tests six more.

    python -m tests.forks DESCRIPTOR     that process: it answers at a listening socket until its stdin is closed

A request is one line of JSON (`forked`); the answers are a line with the process's number, and one with its exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from selectors import EVENT_READ, DefaultSelector
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

ADDRESS = "ROCSTAR_TESTS_FORKS"
"""Names, in the environment, the socket of the session's server."""
BEGIN = """\
#!{python} -IS
import json, os, signal, socket, sys
given, passed = sys.argv[1:], None
"""
ASK = """\
with socket.socket(socket.AF_UNIX) as door:
    door.connect({address!r})
    files = [f"/proc/{{os.getpid()}}/fd/{{number}}" for number in range(3)]
    request = dict(act={act!r}, given=given, folder=os.getcwd(), files=files, environment=dict(os.environ))
    socket.send_fds(door, [json.dumps(dict(request, passed=passed)).encode() + b"\\n"], passed or ())
    lines = door.makefile()
    group = int(lines.readline())
"""
END = """\
    code = int(lines.readline())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
STUB = f"""\
{BEGIN}{ASK}\
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.killpg(group, number))
    sys.exit(int(lines.readline()))
"""
CHILD = f"""\
{BEGIN}\
import ctypes
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(os.environ["ROCSTAR_PARENT"]):
    sys.exit(1)
given = given[2:]
passed = [int(given[-1])] if given[-1].isdigit() else []
{ASK}{END}"""
"""As STUB, for a child of a run (`rocstar.support.child`): it has the descriptor that it was passed, and the process
that is forked for it ends when it is killed, as it is when its parent ends."""
JUDGE = f"""\
{BEGIN}\
given = given[-1:]
passed = [json.loads(given[0])[1]]
{ASK}{END}"""
"""As CHILD, for the process that judges answers (`rocstar.answers.pool`), which ends with its socket."""


class Forked:
    """A process that the server has forked."""

    def __init__(self, request: Mapping[str, Any], passed: Sequence[int]) -> None:
        self._door = socket.socket(socket.AF_UNIX)
        self._door.connect(address())
        socket.send_fds(self._door, [json.dumps(request).encode() + b"\n"], passed)
        self._answers = self._door.makefile("rb", buffering=0)
        self.pid = int(self._answers.readline())
        self.exitcode: int | None = None
        """Negative: the number of the signal that ended it."""

    def join(self, timeout: float | None = None) -> None:
        if self.exitcode is None and select([self._door], [], [], timeout)[0]:
            self.exitcode = int(self._answers.readline())
            self._answers.close()
            self._door.close()

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


def forked(
    act: str,
    *given: str,
    folder: str | Path,
    files: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    passed: Sequence[int] = (),
) -> Forked:
    """Start `act` (module:function) with these arguments, in a session of its own. files: those behind its stdin,
    stdout and stderr. passed: descriptors that it has too; with any, it ends with this process at the latest."""
    known = {**environment, ADDRESS: address()}
    request = dict(act=act, given=given, folder=str(folder), files=files, environment=known, passed=passed or None)
    return Forked(request, passed)


def once_it_speaks(act: str, *given: str, folder: str | Path) -> tuple[Forked, str]:
    """A process that has written a line to its stdout, and that line."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as said, os.fdopen(writing):
        process = forked(act, *given, folder=folder, files=[os.devnull, opened_by(os.getpid(), writing), os.devnull])
        return process, said.readline()


def opened_by(process: int, descriptor: int) -> str:
    return f"/proc/{process}/fd/{descriptor}"


def write_stub(path: Path, act: str, text: str = STUB, *, door: str = "") -> None:
    """A command that has `act` carried out by a process that is forked for it, with the folder, the environment, the
    files and the signals of the command. door: the socket of another server than the session's."""
    path.write_text(text.format(python=sys.executable, address=door or address(), act=act))
    path.chmod(0o755)


def fork_children(put: Callable[[object, str, object], None] = setattr) -> None:
    """From here on this process has the learner ranks and engines that it starts forked, and the judge of answers:
    their imports took four seconds of CPU each, and those of the judge, which every run asks as it begins, half a
    second. That such a child begins on its own is for tests of it. put: a test's `monkeypatch.setattr`."""
    from rocstar.answers import pool
    from rocstar.support import child

    stubs = Path(address()).parent
    put(child, "sys", SimpleNamespace(executable=str(stubs / "child")))
    put(pool, "sys", SimpleNamespace(executable=str(stubs / "judge"), path=sys.path))


def begin_child(module: str, *arguments: str) -> None:
    """What CHILD has carried out."""
    from rocstar.support import child

    os.environ[child.PARENT] = str(os.getppid())
    sys.exit(child.main([module, *arguments]))


def begin_judge(config: str) -> None:
    """What JUDGE has carried out, as `pool.BOOT` does."""
    from rocstar.answers import worker

    sys.path[:], *settings = json.loads(config)
    worker.main(*settings)


@cache
def address() -> str:
    """Of the session's server, which is started by whoever is first, and ends with that process."""
    if known := os.environ.get(ADDRESS):
        return known
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(128)
        command = [sys.executable, "-m", "tests.forks", str(door.fileno())]
        root = Path(__file__).parents[1]
        server = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, pass_fds=[door.fileno()])
    atexit.register(server.communicate)
    os.environ[ADDRESS] = f"{folder}/door"  # also for what is started by a shell
    write_stub(Path(folder) / "child", "tests.forks:begin_child", CHILD)
    write_stub(Path(folder) / "judge", "tests.forks:begin_judge", JUDGE)
    return f"{folder}/door"


def serve(door: socket.socket, *until: int) -> None:
    """until: descriptors; it ends once one of them is closed at its other end."""
    with DefaultSelector() as watched:
        watched.register(door, EVENT_READ)
        for descriptor in until:
            watched.register(descriptor, EVENT_READ)
        while True:
            for key, _ in watched.select():
                if key.fd not in watched.get_map():
                    continue  # let go of by one before it
                if key.fileobj in until:
                    return
                if key.fileobj is door:
                    client = door.accept()[0]
                    pid, bound = _begun(client)
                    try:
                        client.sendall(f"{pid}\n".encode())
                    except OSError:  # whoever asked was killed meanwhile
                        os.kill(pid, signal.SIGKILL)
                    process = os.pidfd_open(pid)
                    watched.register(process, EVENT_READ, (pid, client))
                    if bound:
                        watched.register(client, EVENT_READ, process)
                elif isinstance(key.fileobj, socket.socket):  # a child's stub was killed
                    signal.pidfd_send_signal(key.data, signal.SIGKILL)
                    watched.unregister(key.fileobj)
                else:
                    watched.unregister(key.fd)
                    os.close(key.fd)
                    pid, client = key.data
                    with suppress(KeyError):
                        watched.unregister(client)
                    _told(pid, client)


def _told(pid: int, client: socket.socket) -> None:
    """How the process ended, to the one who asked for it, if it is still there."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with client, suppress(OSError):
        client.sendall(f"{code}\n".encode())


def _begun(client: socket.socket) -> tuple[int, bool]:
    """The process, and whether it is a child's, which ends with its client."""
    text, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 1)
    while not text.endswith(b"\n"):
        text += client.recv(1 << 16)
    request = json.loads(text)
    passed = request.pop("passed", None)
    if pid := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        return pid, passed is not None
    code = 1
    try:
        for wanted, descriptor in zip(passed or (), descriptors, strict=True):
            if descriptor != wanted:  # which dup2 refuses
                os.dup2(descriptor, wanted, inheritable=False)
        begin = 3
        for wanted in passed or ():
            os.closerange(begin, wanted)
            begin = wanted + 1
        os.closerange(begin, 1024)
        code = _carried_out(**request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _carried_out(act: str, given: list[str], folder: str, files: list[str], environment: dict[str, str]) -> int:
    """In the process that was forked for it, which a shell would have started so; its exit code."""
    import numpy

    sys.modules["__main__"], sys.argv[:] = ModuleType("__main__"), [act]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.chdir(folder)
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the process lives)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, "")
    numpy.random.seed()  # Python's own generator does so after a fork
    module, _, name = act.partition(":")
    try:
        getattr(import_module(module), name)(*given)
        code: Any = None
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def write_worker(stub: Path, folder: Path, *tests: str) -> None:
    """A command that is a worker of `pytest -n`, forked from a process that has imported these tests."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path := f"{stub}.door")
        door.listen(128)
        given = (str(door.fileno()), *tests)
        server = forked("tests.forks:workers", *given, folder=folder, files=[os.devnull] * 3, passed=[door.fileno()])
    atexit.register(server.kill)
    write_stub(stub, "tests.forks:worker", door=path)


def workers(descriptor: str, *tests: str) -> None:
    """Their server. A module that cannot be imported, each of them imports again, and tells."""
    import pytest

    pytest.main(["--collect-only", "-p", "no:cacheprovider", *tests])
    serve(socket.socket(fileno=int(descriptor)))


def worker(*_: str) -> None:
    """A worker of `pytest -n`: what the process does that execnet starts, of which only the Python can be chosen."""
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_module("tests.loaded")
    serve(socket.socket(fileno=int(sys.argv[1])), 0)
