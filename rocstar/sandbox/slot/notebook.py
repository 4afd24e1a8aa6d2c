"""The process of a session: one Python process that runs cell after cell, as a notebook's kernel does.

Consumes cells from control, answers each with a report, and waits for nothing else between them; ends with control. A
failed cell keeps its effects. SIGINT ends a cell and not the process, as soon as Python checks for signals. To fork, it
packs its files and waits until the daemon has copied its memory (`daemon.snapshot`). Not here, because the daemon does
it: the limits of time and CPU, other processes of the session, output.
"""

from __future__ import annotations

import io
import marshal
import os
import resource
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from select import POLLIN, poll  # now: a cell may patch the module, as eventlet does
from types import FrameType, ModuleType
from typing import NoReturn

from rocstar.sandbox.slot import channel, program
from rocstar.sandbox.slot.channel import MAX_IMAGES_BYTES
from rocstar.sandbox.slot.program import Base, Execution

MAX_IMAGES = 16


class Notebook:
    def __init__(self, control: int, memory: int, base: Base) -> None:
        """memory: address space that the process may use, bytes."""
        self.control = control
        self.memory = memory
        self.base = base
        self.folder = os.getcwd()
        self.module = ModuleType("__main__")
        self.pid = os.getpid()
        self.is_running = False

    def serve(self) -> NoReturn:
        """Answer cells until control closes."""
        while True:
            self.wait()
            task = channel.receive(self.control)
            if not isinstance(task, channel.Fork):
                head, tail = self.answer(task)
            elif refused := self.fork():
                head, tail = {"refused": refused, "status": 1}, []
            else:
                continue
            if os.getpid() != self.pid:
                os._exit(0)  # a process that the cell forked has returned here
            try:
                channel.send_report(self.control, head, tail)
            except OSError:  # the cell has closed control, or the session is over: report the status alone
                os._exit(int(str(head["status"])))

    def wait(self) -> None:
        """Until there is something to receive. What handlers of a cell raise meanwhile ends nothing, as in Jupyter."""
        waiting = poll()
        waiting.register(self.control, POLLIN)
        while True:
            with suppress(BaseException):
                waiting.poll()
                return

    def answer(self, cell: channel.CellPayload) -> tuple[dict[str, object], list[bytes]]:
        """Run a cell; return its report. SIGINT raises an exception meanwhile, the cell's failure if uncaught."""
        execution = Execution(cell.code, f"<cell {cell.number}>", self.module, cell.output_bytes)
        refused = ""
        images: list[bytes] = []
        if signal.getsignal(signal.SIGINT) != self.interrupt:  # at first, and after a cell has set its own handler
            signal.signal(signal.SIGINT, self.interrupt)
        try:
            self.is_running = True
            refused = channel.write_files(cell.files)
            if not refused:
                execution.run()
                images = figures()
            self.is_running = False
        except BaseException as error:
            self.is_running = False
            execution.fail(error)
        program.flush_all()
        memory = self.memory, self.memory + program.MEMORY_SLACK
        resource.setrlimit(resource.RLIMIT_AS, memory)  # if the cell changed it
        if refused:
            return {"refused": refused, "status": 1}, []
        found = channel.read_files(cell.fetch)
        head = execution.head() | {"status": execution.status}
        if found:
            head["files"] = [(path, len(content)) for path, content in found.items()]
        if images:
            head["images"] = [len(image) for image in images]
        return head, [execution.value or b"", *found.values(), *images]

    def fork(self) -> str:
        """Report, and wait until this process is copied; why it cannot be, or "". The copies return from here too."""
        compiled = sys.modules.get("rocstar.sandbox.slot._fork")
        (packed,) = channel.receive_descriptors(self.control, 1)
        try:
            if refused := pack(self.folder, packed):
                return refused
        finally:
            os.close(packed)
        program.flush_all()
        if compiled.pause(self.control, channel.report_head({"status": 0})):  # type: ignore[union-attr]
            self.base.seeder.reseed(channel.receive(self.control).seed)
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)) or handler == signal.SIG_IGN:
                    with suppress(OSError):
                        signal.signal(number, handler)
            channel.send_report(self.control, {"status": 0})
        return ""

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_running:
            raise KeyboardInterrupt


def main(task: channel.NotebookPayload, control: int, base: Base) -> NoReturn:
    """Serve, and end the process. Descriptors are as for `program.main`."""
    try:
        os.environ["MPLBACKEND"] = "Agg"
        program.enter(base, task.seed)
        program.limit(program.limits(base, task.memory_bytes, task.processes))
        Notebook(control, base.memory + task.memory_bytes, base).serve()
    except (EOFError, OSError):
        pass  # the session is over
    finally:
        os._exit(1)  # also if the report of a cell could not be made: a failure


def become(task: channel.Become, control: int, base: Base) -> NoReturn:
    """Turn this process into the copy of another notebook and continue there."""
    memory, packed = channel.receive_descriptors(control, 2)
    program.limit(program.limits(base, task.memory_bytes, task.processes))
    try:
        unpack(os.getcwd(), packed)
        os.chdir(task.folder)
        os.umask(task.umask)
        os.close(packed)
    except (OSError, ValueError, EOFError, TypeError) as error:  # malformed entries of a hostile notebook too
        channel.send_report(control, {"refused": f"a file could not be copied: {error}", "status": 1})
    else:
        sys.modules["rocstar.sandbox.slot._fork"].restore(memory, task.offset, task.steps)
    os._exit(1)


def figures() -> list[bytes]:
    """matplotlib's open figures as PNG; closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    images: list[bytes] = []
    if pyplot is None:
        return images
    room = MAX_IMAGES_BYTES
    with suppress(Exception):  # the cell may have changed the module in any way
        for number in pyplot.get_fignums()[:MAX_IMAGES]:
            buffer = io.BytesIO()
            with suppress(Exception):
                pyplot.figure(number).savefig(buffer, format="png", bbox_inches="tight")
                if len(image := buffer.getvalue()) <= room:
                    images.append(image)
                    room -= len(image)
    with suppress(Exception):
        pyplot.close("all")
    return images


def pack(folder: str, target: int) -> str:
    """Write everything in a folder to an empty file; a sentence if something cannot be copied, else ""."""
    path = folder
    try:
        with open(target, "wb", closefd=False) as out:
            for path in below(folder, os.lstat(folder).st_dev):
                state = os.lstat(path)
                kind, link = stat.S_IFMT(state.st_mode), os.readlink(path) if stat.S_ISLNK(state.st_mode) else ""
                if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                    return f"{path!r:.200} is neither a file nor a folder nor a link; remove it first"
                size = state.st_size if kind == stat.S_IFREG else 0
                marshal.dump((os.path.relpath(path, folder), state.st_mode, state.st_mtime_ns, link, size), out)
                out.flush()
                if size:
                    with open(path, "rb") as file:
                        send(target, file.fileno(), size)
            marshal.dump(None, out)
    except OSError as error:
        return f"{path!r:.200} could not be copied: {error}"
    return ""


def unpack(folder: str, source: int) -> None:
    """Restore what `pack` has written. Raises OSError."""
    folders = []
    with open(source, "rb", 0, closefd=False) as packed:
        while entry := marshal.load(packed):
            name, mode, modified, link, size = entry
            path = f"{folder}/{name}"
            if link:
                os.symlink(link, path)
            elif stat.S_ISDIR(mode):
                os.mkdir(path)
                folders.append((path, mode, modified))
            else:
                with open(path, "wb", 0) as file:
                    send(file.fileno(), source, size)
                finish(path, mode, modified)
    for each in reversed(folders):
        finish(*each)


def finish(path: str, mode: int, modified: int) -> None:
    os.chmod(path, stat.S_IMODE(mode))
    os.utime(path, ns=(modified, modified))


def send(target: int, source: int, size: int) -> None:
    while size > 0:
        sent = os.sendfile(target, source, None, size)
        if not sent:
            raise OSError("it became shorter")
        size -= sent


def below(folder: str, device: int) -> Iterator[str]:
    """All paths on the folder's own file system, folders before their contents. Raises OSError."""
    waiting = [*os.scandir(folder)]  # no recursion: a cell may nest folders deeper than Python's calls
    while waiting:
        entry = waiting.pop()
        if entry.stat(follow_symlinks=False).st_dev == device:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                waiting += os.scandir(entry.path)
