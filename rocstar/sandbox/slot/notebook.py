"""The process of a session: one live Python that runs cell after cell, as a notebook's kernel does.

Consumes cells from control, answers each with a report, and waits for nothing else between them; ends with control. A
failed cell keeps what it did. SIGINT ends a cell and not the process, wherever Python looks for signals. Asked to fork,
it packs its files and waits until the daemon has copied its memory (`daemon.snapshot`). Not here: the wall limit, other
processes of the session, output. Those are the daemon's.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import resource
import signal
import sys
import time
from _ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from rocstar.sandbox.slot import channel, files, program
from rocstar.sandbox.slot.channel import MAX_IMAGES_BYTES
from rocstar.sandbox.slot.program import Base, Execution

if TYPE_CHECKING:
    from asyncio import Runner

COROUTINE = 0x80  # `inspect.CO_COROUTINE`, without a module of 1 MB
LOOP_STARTS = ("asyncio.run(", ".run_until_complete(")
MAX_IMAGES = 16
MAX_REPORT_BYTES = 23 * 2**20  # without its head
FORK_CPU_SECONDS = 5.0  # for packing files
IDLE_CPU_SECONDS = 1.0  # what a thread may use between two cells; beyond it the session ends


class CPUTimeout(BaseException):
    """A cell has used the CPU it may use; not an Exception, because programs often catch those."""


CPUTimeout.__module__ = "builtins"  # that is how it is shown


class Cell(Execution):
    """One cell. It may await at its top level; it then runs in the event loop from its first line on, unless it starts
    a loop by itself, which Python refuses there: then only what awaits does."""

    flags = PyCF_ALLOW_TOP_LEVEL_AWAIT

    def __init__(self, cell: channel.CellPayload, notebook: Notebook) -> None:
        super().__init__(cell.code, f"<cell {cell.number}>", notebook.module, cell.output_bytes)
        self.notebook = notebook

    def execute(self, parts: Sequence[CodeType]) -> Any:
        if len(parts) > 1 and any(start in self.code for start in LOOP_STARTS):
            return [self.execute([part]) for part in parts][-1]
        if any(part.co_flags & COROUTINE for part in parts):
            return self.notebook.wait_for(self.awaited(parts))
        return self.notebook.context.run(super().execute, parts)

    async def awaited(self, parts: Sequence[CodeType]) -> Any:
        value = None
        for part in parts:
            value = super().execute([part])
            if part.co_flags & COROUTINE:
                value = await value
        return value


class Notebook:
    def __init__(self, control: int, memory: int, base: Base) -> None:
        """memory: address space the process may use, bytes."""
        self.control = control
        self.memory = memory
        self.base = base
        self.folder = os.getcwd()
        self.module = ModuleType("__main__")
        self.pid = os.getpid()
        self.is_running = False
        self.cpu_seconds = IDLE_CPU_SECONDS
        self.loop: Runner | None = None
        self.context = copy_context()
        """Of all cells, in the loop or not."""

    def serve(self) -> NoReturn:
        """Until control closes."""
        while True:
            task = channel.receive(self.control)
            if not isinstance(task, channel.Fork):
                head, tail = self.answer(task)
            elif refused := self.fork():
                head, tail = {"refused": refused, "status": 1}, []
            else:
                continue
            if os.getpid() != self.pid:
                os._exit(0)  # a fork of the cell that came back here
            try:
                channel.send_report(self.control, head, tail)
            except OSError:  # the cell has closed it, or the session is over: the status is all that can be told
                os._exit(int(str(head["status"])))

    def answer(self, cell: channel.CellPayload) -> tuple[dict[str, object], list[bytes]]:
        """Run a cell; its report. Signals raise exceptions meanwhile; one that escapes is the cell's failure."""
        execution = Cell(cell, self)
        refused = ""
        images: list[bytes] = []
        self.catch_signals()
        try:
            self.is_running = True
            self.allow_cpu(cell.cpu_seconds)
            refused = files.write(cell.files)
            if not refused:
                execution.run()
                images = figures()
            self.is_running = False
        except BaseException as error:
            self.is_running = False
            execution.fail(error)
        self.settle(execution)
        if refused:
            return {"refused": refused, "status": 1}, []
        return self.report(execution, files.read(cell.fetch), images)

    def fork(self) -> str:
        """Wait until this process has been copied, and report it, or why not. The copies come back here too."""
        compiled = sys.modules.get("rocstar.sandbox.slot._fork")
        (packed,) = channel.receive_descriptors(self.control, 1)
        self.allow_cpu(FORK_CPU_SECONDS)
        try:
            if self.loop is not None:
                import asyncio

                if any(not task.done() for task in asyncio.all_tasks(self.loop.get_loop())):
                    return "tasks of its event loop are under way; await or cancel them first"
                self.loop.close()
                self.loop = None
            if refused := files.pack(self.folder, packed):
                return refused
        finally:
            os.close(packed)
            self.allow_cpu(IDLE_CPU_SECONDS)
        program.flush_all()
        if compiled.pause(self.control, channel.report({"status": 0})):  # type: ignore[union-attr]
            self.base.seeder.reseed(channel.receive(self.control).seed)
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)) or handler == signal.SIG_IGN:
                    with suppress(OSError):
                        signal.signal(number, handler)
            self.allow_cpu(IDLE_CPU_SECONDS)
            channel.send_report(self.control, {"status": 0})
        return ""

    def settle(self, execution: Execution) -> None:
        """After a cell: flush streams and set the limits again; what the cell did stays."""
        program.flush_all()
        self.allow_cpu(IDLE_CPU_SECONDS)
        execution.reserve.close()
        resource.setrlimit(resource.RLIMIT_AS, (self.memory, self.memory + program.MEMORY_SLACK))

    def report(
        self, execution: Execution, found: dict[str, bytes], images: list[bytes]
    ) -> tuple[dict[str, object], list[bytes]]:
        tail = [execution.value or b"", *found.values()]
        while images and sum(map(len, (*tail, *images))) > MAX_REPORT_BYTES:
            images.pop()
        head = execution.head() | {"status": execution.status}
        if found:
            head["files"] = files.sizes(found)
        if images:
            head["images"] = [len(image) for image in images]
        return head, [*tail, *images]

    def catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGXCPU):
            if signal.getsignal(number) != self.interrupt:  # at first, and where a cell has set its own
                signal.signal(number, self.interrupt)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_running and number == signal.SIGXCPU:
            raise CPUTimeout(f"the cell has used its {self.cpu_seconds:g} s of CPU")
        if self.is_running:
            raise KeyboardInterrupt
        if number == signal.SIGXCPU:
            os._exit(1)

    def allow_cpu(self, seconds: float) -> None:
        """From now on; rounded up to a whole second of the process's clock."""
        self.cpu_seconds = seconds
        whole = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (whole, resource.RLIM_INFINITY))

    def wait_for(self, cell: Coroutine[Any, Any, Any]) -> Any:
        """What it returns. One event loop for all cells, made for the first that needs it; a cell that is interrupted
        is cancelled, or it would go on in the next one."""
        import asyncio

        self.loop = self.loop or asyncio.Runner()
        loop = self.loop.get_loop()
        task = loop.create_task(cell, context=self.context)
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.wait([task]))


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
        os._exit(1)  # or the report of a cell could not be made: that is no success


def become(task: channel.Become, control: int, base: Base) -> NoReturn:
    """Go on as the copy of another notebook, whose files are open at the same numbers, each anew."""
    memory, packed = channel.receive_descriptors(control, 2)
    opened = [channel.Opened(*each) for each in task.opened]
    memory = fcntl.fcntl(memory, fcntl.F_DUPFD, max([control, *(each.number for each in opened)]) + len(opened) + 2)
    program.limit(program.limits(base, task.memory_bytes, task.processes))
    try:
        files.unpack(os.getcwd(), packed)
        os.chdir(task.folder)
        os.umask(task.umask)
        os.closerange(control + 1, memory)
        for each in opened:
            open_anew(each)
    except (OSError, ValueError, EOFError, TypeError) as error:  # ill-made things of a hostile notebook too
        channel.send_report(control, {"refused": f"a file could not be opened anew: {error}", "status": 1})
    else:
        sys.modules["rocstar.sandbox.slot._fork"].restore(memory, task.offset, task.steps)
    os._exit(1)


def open_anew(file: channel.Opened) -> None:
    fd = os.open(file.path, file.flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
    if fd != file.number:
        os.dup2(fd, file.number)
        os.close(fd)
    os.set_inheritable(file.number, not file.flags & os.O_CLOEXEC)
    if file.position:
        os.lseek(file.number, file.position, os.SEEK_SET)


def figures() -> list[bytes]:
    """Those that matplotlib holds open, as PNG; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    images: list[bytes] = []
    if pyplot is None:
        return images
    room = MAX_IMAGES_BYTES
    with suppress(Exception):  # the cell may have made anything of the module
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
