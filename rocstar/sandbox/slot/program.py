"""The forked process of a call: runs one program as `__main__` and ends. Everything here runs behind the walls.

The program can forge the report of this process (value, exception); it cannot forge whether it ran, failed or was
killed, which the kernel reports.
"""

from __future__ import annotations

import _ast as ast  # without the rest of `ast`, which would cost every program memory
import _thread
import atexit
import builtins
import gc
import importlib.util
import io
import linecache
import os
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from resource import RLIMIT_AS, setrlimit  # where a program may have replaced them
from types import CodeType, GeneratorType, ModuleType
from typing import Any, NamedTuple, NoReturn

from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import MAX_MESSAGE, MAX_TYPE, MAX_VALUE_BYTES
from rocstar.sandbox.walls.plans import Inside

FILENAME = "<program>"
FUTURE_FLAGS = 0x1FE0000  # those of a code object's flags that `from __future__` sets
MAX_FRAMES = 1500  # the last ones; the usual recursion limit is 1,000, without one there may be a million
MEMORY_ERROR_FRAMES = 20
MEMORY_SLACK = 32 * 2**20  # lets a failure be reported when its program has used up its memory
MOST_FILES, FEWEST_FILES = 256, 32  # open at once
WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
PIPE_BYTES, PIPES_BYTES = 256 * 2**10, 128 * 2**20  # kernel memory: behind one descriptor; of a call, uncharged
SEEDED = ("random", "numpy.random", "sympy.core.random")
NUMPY_SEEDS = 2**32
BUILTINS = dict(vars(builtins))  # a program may have replaced those that its report needs


Limit = tuple[int, int, int]
"""Number of a resource, soft and hard limit."""


class Seeder:
    """Makes random numbers of programs with equal seeds equal: those of `random`, and of the global generators of numpy
    and sympy; not those of generators that draw entropy from the system (`secrets`, `numpy.random.default_rng()`).

    Seeds the loaded generators, and others when they are imported: it is a module finder that leaves the search to the
    other finders. Created in the zygote after a tier's modules have been loaded."""

    def __init__(self) -> None:
        self.loaded = [sys.modules[name] for name in SEEDED if name in sys.modules]
        self.awaited = {name for name in SEEDED if name not in sys.modules}
        self.seed = 0
        if self.awaited:
            sys.meta_path.insert(0, self)

    def reseed(self, seed: int) -> None:
        self.seed = seed
        for module in self.loaded:
            self.seed_module(module)

    def seed_module(self, module: Any) -> None:
        module.seed(self.seed % NUMPY_SEEDS if module.__name__ == "numpy.random" else self.seed)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        self.awaited.remove(name)  # first, because the search below calls this method again
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_seed(module: ModuleType) -> None:
                load(module)
                self.loaded.append(module)
                self.seed_module(module)

            spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec


class Base(NamedTuple):
    """The state of the zygote that a program's process inherits."""

    memory: int
    """Address space in use before any program, bytes."""
    inside: Inside
    seeder: Seeder


def main(task: channel.Program, control: int, base: Base) -> NoReturn:
    """Run the program and end the process. Standard streams are in place, stdin is empty, other descriptors closed."""
    status, process, folder = 1, os.getpid(), os.getcwd() if task.fetch else ""
    try:
        status = perform(task, control, begin(task, base))
        finish()
        if task.fetch and os.getpid() == process:  # a process that the program forked may return here
            send_files(task.fetch, folder, control)
    finally:
        os._exit(status)


def send_files(paths: Sequence[str], folder: str, control: int) -> None:
    """After the program has ended. folder: the working directory, which the program may have left."""
    with suppress(OSError, ValueError):  # the program has closed control, or may not raise its memory limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        os.closerange(control + 1, MOST_FILES)
        os.chdir(folder)
        found = channel.read_files(paths)
        sizes = [(path, len(content)) for path, content in found.items()]
        channel.send_report(control, {"files": sizes}, found.values())


def perform(task: channel.Program, control: int, bounds: Sequence[Limit]) -> int:
    """Run the program and send its report over control; the exit status."""
    refused = channel.write_files(task.files)
    if task.stdin and not refused:
        refused = attach_stdin(task.stdin)
    if refused:  # the disk is full: `check` refuses other faults earlier
        write_stderr(f"{refused}\n")
        return 1
    limit(bounds)
    execution = Execution(task.code, FILENAME, ModuleType("__main__"), task.output_bytes)
    pid = os.getpid()
    execution.run()
    if execution.failure is not None:
        vars(builtins).update(BUILTINS)
    if os.getpid() == pid and (head := execution.head()):  # a process that the program forked does not report
        with suppress(OSError):  # the program has closed control
            channel.send_report(control, head, [execution.value or b""])
    return execution.status


def warm_up(control: int, base: Base) -> None:
    """Do the steps of `main` in the zygote, which continues: limits are computed but not changed."""
    task = channel.receive(control)
    perform(task, control, [(which, *resource.getrlimit(which)) for which, _, _ in begin(task, base)])
    flush_all()
    has_endings(gc.get_objects(0))
    linecache.cache.pop(FILENAME, None)


def begin(task: channel.Program, base: Base) -> list[Limit]:
    """The first steps of a program; the limits to set before its code runs."""
    enter(base, task.seed)
    cpu = max(1, -int(-task.cpu_seconds // 1))  # rounded up to the kernel's whole seconds
    return [*limits(base, task.memory_bytes, task.processes), (resource.RLIMIT_CPU, cpu, cpu + 1)]


def enter(base: Base, seed: int) -> None:
    """The first steps of programs and notebooks."""
    if base.inside.confine_signals is not None:
        base.inside.confine_signals()
    base.seeder.reseed(seed)


def attach_stdin(stdin: str) -> str:
    """Standard input becomes an unlinked file: seekable, and a program need not read it. Why it could not, or ""."""
    try:
        with open(".stdin", "x+b", 0) as source:
            os.unlink(".stdin")
            data = memoryview(stdin.encode())
            while data:
                data = data[source.write(data) :]
            source.seek(0)
            os.dup2(source.fileno(), 0)
    except OSError as error:
        return f"standard input could not be stored: {error}"
    return ""


def limits(base: Base, memory_bytes: int, processes: int) -> list[Limit]:
    """Limits of the process and all it starts: memory beyond the base, open files, processes."""
    memory = base.memory + memory_bytes
    open_files = max(FEWEST_FILES, min(MOST_FILES, (memory_bytes + PIPES_BYTES) // (processes * PIPE_BYTES)))
    bounds = [(resource.RLIMIT_AS, memory, memory + MEMORY_SLACK), (resource.RLIMIT_NOFILE, open_files, open_files)]
    if base.inside.own_user:
        bounds.append((resource.RLIMIT_NPROC, processes + 1, processes + 1))  # the slot is one more
    return bounds


def limit(bounds: Sequence[Limit]) -> None:
    for which, soft, hard in bounds:
        resource.setrlimit(which, (soft, hard))


class Execution:
    """One source text that is run in one module, and its result."""

    def __init__(self, code: str, filename: str, module: ModuleType, value_bytes: int) -> None:
        """value_bytes: most bytes of the value that are kept."""
        self.code = code
        self.filename = filename
        self.module = module
        self.value_bytes = min(value_bytes, MAX_VALUE_BYTES)
        self.value: bytes | None = None
        self.dropped = 0
        self.failure: list[Any] | None = None
        self.status = 0
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        self.all_memory = (hard, hard)  # made now, because there may be no memory for it later

    def run(self) -> None:
        try:
            value = self.evaluate()
            if value is not None:
                shown = value.encode("utf-8", "surrogatepass")
                self.value = shown[: self.value_bytes]
                self.dropped = len(shown) - len(self.value)
        except SystemExit as error:
            # As in the interpreter: 0 for None, a number itself, 255 if it is too large for C; else it is printed.
            if isinstance(error.code, int):
                self.status = error.code & 0xFF if -(2**63) <= error.code < 2**63 else 0xFF
            elif error.code is not None:
                write_stderr(f"{error.code}\n")
                self.status = 1
        except BaseException as error:  # any exception of the program is its result
            self.fail(error)

    def evaluate(self) -> str | None:
        """Run the text; repr of its last expression, as IPython shows it."""
        name, module = self.filename, self.module
        linecache.cache[name] = (len(self.code), None, self.code.splitlines(True), name)
        body, last = compiled_by_lines(self.code, name) or compiled_by_tree(self.code, name)
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        value = None
        for part in filter(None, (body, last)):
            value = eval(part, module.__dict__)
        return None if value is None else repr(value)

    def fail(self, error: BaseException) -> None:
        """Print the traceback; record type, message and line of the error."""
        self.status = 1
        try:  # noqa: SIM105, for which there may be no memory
            setrlimit(RLIMIT_AS, self.all_memory)
        except (ValueError, OSError):
            pass  # the program has lowered its limit for good
        try:
            frames = MEMORY_ERROR_FRAMES if isinstance(error, MemoryError) else MAX_FRAMES
            self.failure = explained(error, frames)
            return
        except MemoryError:
            kind = "MemoryError"
        except Exception:  # the program has given it, or `traceback`, attributes that cannot be printed
            kind = type(error).__name__[:MAX_TYPE]
        error.__traceback__ = error.__context__ = error.__cause__ = None  # frees the objects on the program's stack
        write_stderr(f"{kind}\n")
        self.failure = [kind, "", None]

    def head(self) -> dict[str, object]:
        """The head of a report."""
        head: dict[str, object] = {}
        if self.failure is not None:
            head["exception"] = self.failure
        if self.value is not None:
            head |= {"value": len(self.value), "dropped": self.dropped}
        return head


def compiled_by_lines(code: str, name: str) -> tuple[CodeType | None, CodeType] | None:
    """As `compiled_by_tree` without the syntax tree, which costs 0.2 ms: if all lines but the last are a complete
    program and the last is a complete expression, the text is that program followed by that expression."""
    head, _, last = code.rstrip().rpartition("\n")
    if not last or last[0] in " \t#)]}":
        return None
    try:
        if not head:
            return None, compile(last, name, "eval", dont_inherit=True)
        body = compile(head + "\n", name, "exec", dont_inherit=True)
        lead = "\n" * (head.count("\n") + 1)
        return body, compile(lead + last, name, "eval", body.co_flags & FUTURE_FLAGS, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def compiled_by_tree(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    """The program, and separately its last expression if it ends in one without a semicolon."""
    tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and isinstance(end := tree.body[-1], ast.Expr):
        line = code.encode("utf-8", "surrogatepass").splitlines()[(end.end_lineno or 1) - 1]
        if not line[end.end_col_offset or 0 :].lstrip().startswith(b";"):
            last = ast.Expression(tree.body.pop().value)
    body = compile(tree, name, "exec", dont_inherit=True)
    flags = body.co_flags & FUTURE_FLAGS
    return body, compile(last, name, "eval", flags, dont_inherit=True) if last else None


def explained(error: BaseException, frames: int) -> list[Any]:
    """Print the traceback; type, message and line."""
    summary = traceback.TracebackException(
        type(error), error, error.__traceback__, limit=-frames, lookup_lines=False, compact=True
    )
    chain = [summary]
    while chain:  # keep only lines of the program, in this traceback and in those chained to it
        part = chain.pop()
        part.stack[:] = [frame for frame in part.stack if frame.filename.startswith((FILENAME, "<cell "))]
        chain += [other for other in (part.__cause__, part.__context__) if other is not None]
        chain += part.exceptions or []
    last = summary.stack[-1].lineno if summary.stack else None
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else last
    write_stderr("".join(summary.format()))
    module, name = type(error).__module__, type(error).__qualname__
    kind = name if module in ("builtins", "__main__") else f"{module}.{name}"
    return [kind[:MAX_TYPE], str(summary)[:MAX_MESSAGE], line]


def write_stderr(text: str) -> None:
    """Write to descriptor 2, because the program may have replaced sys.stderr."""
    flush(sys.__stdout__, sys.__stderr__)
    data = text.encode("utf-8", "surrogatepass")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        pass  # the program closed it


def finish() -> None:
    """The interpreter's steps at exit, without its teardown (which takes 50 ms with sympy)."""
    try:
        if _thread._count():  # threads besides this one
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        flush_all()
        finalize()
    finally:
        flush_all()


def finalize() -> None:
    """Flush files that the program left open, run `__del__` methods and end generators of its remaining objects.
    Skipped if it has no such objects, because a collection takes 0.4 ms."""
    objects = gc.get_objects()
    if has_endings(objects):
        # First, because a collection may close a file whose buffer is not empty.
        flush(*(each for each in objects if issubclass(type(each), WRITERS)))
        del objects
        sys.modules.pop("__main__", None)
        gc.collect()  # functions and their module reference each other


def has_endings(objects: Sequence[object]) -> bool:
    """Whether one of them does something when it is deleted."""
    return any(kind is GeneratorType or hasattr(kind, "__del__") for kind in set(map(type, objects)))


def flush_all() -> None:
    flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


def flush(*streams: Any) -> None:
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed or replaced by the program


@contextmanager
def own_streams() -> Iterator[None]:
    """In the zygote: create the standard streams that all programs will use. Within the context descriptors 0 to 2 are
    ends of an unread pipe; afterwards they are restored.

    The streams keep using descriptors 0 to 2 when these are replaced. They are created on a pipe, so that Python does
    not treat them as seekable."""
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
