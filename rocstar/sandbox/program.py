"""The forked child: runs one program as `__main__` and leaves. Everything here happens inside the jail.

What it reports (value, exception) goes into shared memory the slot reads after its death, and can be forged by the
program; whether it ran, failed, or was killed comes from the kernel and cannot.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import json
import linecache
import marshal
import mmap
import os
import resource
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from rocstar.sandbox import fetch, hooks, rootfs, seeds, slotwire, source
from rocstar.sandbox.hooks import Hooks
from rocstar.sandbox.jail import Inside
from rocstar.sandbox.slotwire import Task

FILENAME = "<program>"
REPORT_HEADER = struct.Struct("=I")
MAX_MESSAGE = 2000  # characters of an exception's message kept apart from the traceback
MAX_VALUE_BYTES = 192 * 1024  # fits the report with room for the exception
FILE_BYTES = 64 * 2**20  # largest file a program may write; the size of its tmpfs too
OPEN_FILES = 256
MAX_FRAMES = 1500  # the last ones; the usual recursion limit is 1,000, without one there may be a million
MEMORY_ERROR_FRAMES = 20
RESERVE_BYTES = 2**20  # of address space, given back first of all when a program has failed for want of memory
MEMORY_SLACK = 32 * 2**20  # lets a MemoryError be reported once its program is over


def pack_settings(base_memory: int, inside: Inside) -> bytes:
    """What a slot hands to each program's process; `base_memory`: address space before any program, bytes."""
    return marshal.dumps((base_memory, tuple(inside)))


def main(payload: bytes, settings: bytes, report: mmap.mmap | memoryview, later: Hooks) -> None:
    """Never returns. Standard streams are in place, other descriptors closed; stdin is empty. `later`: what libraries
    want done when the program forks."""
    status = 1
    try:
        gc.enable()
        status = run(Task(*marshal.loads(payload)), settings, report, later)
    finally:
        os._exit(status)


def tidy(payload: bytes) -> None:
    """What a fork of the slot does when the program is over: write the files to be fetched to stdout, if any, and wipe
    the working directory. Never returns."""
    status = 1
    try:
        data = memoryview(fetch.packed(slotwire.parse_fetch(payload)))
        while data:
            data = data[os.write(1, data) :]
        rootfs.empty(".")
        status = 0
    finally:
        os._exit(status)


def run(task: Task, settings: bytes, report: mmap.mmap | memoryview, later: Hooks) -> int:
    base_memory, inside = marshal.loads(settings)
    walls = Inside(*inside)
    walls.enter_call()
    if task.files:
        write_files(task.files)
    if task.stdin:
        attach_stdin(task.stdin)
    seeds.reseed(task.seed)
    hooks.restore(later)
    limit(task, base_memory, walls.processes_beside)
    return Program(task.code, report, task.output_bytes).run()


def write_files(files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def attach_stdin(stdin: str) -> None:
    source = os.open(".stdin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(".stdin")
    data = memoryview(stdin.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(source, data) :]
    os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.close(source)


@contextmanager
def own_streams() -> Iterator[None]:
    """In the nursery: give Python the standard streams that all programs will use. Within the context descriptors 0 to
    2 lead to a pipe nobody reads; afterwards to where they led before.

    The streams work on whatever the descriptors are by then. They are made on a pipe, so that they do not take
    themselves for seekable."""
    before = [os.dup(standard) for standard in range(3)]
    source, sink = os.pipe()
    for standard, end in enumerate((source, sink, sink)):
        os.dup2(end, standard)
    sys.stdin = text_stream(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = text_stream(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    sys.stderr = text_stream(io.BufferedWriter(io.FileIO(2, "w", closefd=False)))
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.path.insert(0, "")  # files put beside a program can be imported by it
    try:
        yield
    finally:
        for standard, fd in enumerate(before):
            os.dup2(fd, standard)
        for fd in (*before, source, sink):
            os.close(fd)


def text_stream(buffer: io.BufferedReader | io.BufferedWriter) -> Any:
    """Line buffered, so that a killed program's last full line is not lost."""
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="surrogatepass", line_buffering=True)


def limit(task: Task, base_memory: int, processes_beside: int | None) -> None:
    memory = base_memory + task.memory_bytes
    cpu = max(1, -int(-task.cpu_seconds // 1))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory + MEMORY_SLACK))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    if processes_beside is not None:
        processes = task.processes + processes_beside
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


class Program:
    """One program and what becomes of it."""

    def __init__(self, code: str, report: mmap.mmap | memoryview, value_bytes: int) -> None:
        self.code = code
        self.filename = FILENAME
        self.module = ModuleType("__main__")
        self.out_of_memory = False
        self.report = report
        self.value_bytes = min(value_bytes, MAX_VALUE_BYTES)
        self.pid = os.getpid()
        self.reserve = mmap.mmap(-1, RESERVE_BYTES)

    def run(self) -> int:
        """Exit status: 0, what sys.exit was given, or 1 after an exception."""
        status = self.attempt()
        finish()
        return status

    def rehearse(self) -> None:
        """Run it in this process, which goes on living."""
        self.attempt()
        self.reserve.close()

    def attempt(self) -> int:
        value, failure, status = None, None, 0
        try:
            value = self.evaluate()
        except SystemExit as error:
            status = exit_status(error)
        except BaseException as error:  # whatever the program raised is its result
            self.reserve.close()
            status = 1
            failure = self.explain(error)
        if os.getpid() == self.pid:  # a fork of the program that comes back here speaks for nobody
            self.write_report(value, failure)
        return status

    def evaluate(self) -> str | None:
        """Run it; repr of its last expression, as IPython shows it."""
        name, module = self.filename, self.module
        linecache.cache[name] = (len(self.code), None, self.code.splitlines(True), name)
        body, last = source.compiled(self.code, name)
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        exec(body, module.__dict__)
        value = eval(last, module.__dict__) if last else None
        return None if value is None else repr(value)

    def explain(self, error: BaseException) -> list[Any]:
        """Print the traceback; type, message and line of the error."""
        self.out_of_memory = isinstance(error, MemoryError)
        with suppress(MemoryError):
            if self.out_of_memory:
                allow_slack()
            return told_at_length(error, MEMORY_ERROR_FRAMES if self.out_of_memory else MAX_FRAMES)
        self.out_of_memory = True
        error.__traceback__ = error.__context__ = error.__cause__ = None  # lets go of all the program had on its stack
        allow_slack()
        write_stderr("MemoryError\n")
        return ["MemoryError", "", None]

    def write_report(self, value: str | None, failure: list[Any] | None) -> None:
        """JSON, a newline, the value's bytes; nothing when there is nothing to say."""
        if value is None and failure is None:
            return
        shown = b"" if value is None else value.encode("utf-8", "surrogatepass")
        kept = shown[: self.value_bytes]
        said = {"exception": failure, "has_value": value is not None, "dropped": len(shown) - len(kept)}
        body = json.dumps(said).encode() + b"\n" + kept
        self.report[: REPORT_HEADER.size + len(body)] = REPORT_HEADER.pack(len(body)) + body


def allow_slack() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def told_at_length(error: BaseException, frames: int) -> list[Any]:
    told = traceback.TracebackException(
        type(error), error, error.__traceback__, limit=-frames, lookup_lines=False, compact=True
    )
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else last_line(told)
    keep_own_frames(told)
    write_stderr("".join(told.format()))
    module = type(error).__module__
    name = type(error).__qualname__
    return [name if module in ("builtins", "__main__") else f"{module}.{name}", str(told)[:MAX_MESSAGE], line]


def exit_status(error: SystemExit) -> int:
    """As the interpreter does: None is 0, a number is itself, anything else is printed and is 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    write_stderr(f"{error.code}\n")
    return 1


def is_own(filename: str) -> bool:
    """Whether a line is the program's: of its only text, or of a notebook's cell (`<program, cell 2>`)."""
    return filename.startswith(FILENAME[:-1])


def last_line(told: traceback.TracebackException) -> int | None:
    lines = [frame.lineno for frame in told.stack if is_own(frame.filename)]
    return lines[-1] if lines else None


def keep_own_frames(told: traceback.TracebackException) -> None:
    """Leave only lines of the program in this traceback and in those it is chained to."""
    chain = [told]
    while chain:
        part = chain.pop()
        part.stack[:] = [frame for frame in part.stack if is_own(frame.filename)]
        chain += [other for other in (part.__cause__, part.__context__) if other is not None]
        chain += part.exceptions or []


def write_stderr(text: str) -> None:
    """Past whatever the program put into sys.stderr."""
    flush(sys.__stdout__, sys.__stderr__)
    data = text.encode("utf-8", "surrogatepass")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        pass  # the program closed it


def finish() -> None:
    """What the interpreter does at its end, without taking itself apart (which costs 50 ms with sympy)."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    finally:
        flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


def flush(*streams: Any) -> None:
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed or replaced by the program
