"""A state of a notebook: a process that holds the names its cells have made, and waits.

Told to run a cell, it forks; the copy runs the cell and becomes the state after it. The copy is a child of the slot,
which alone learns from the kernel how it ends: a process in between makes it and ends. With the compiled part that one
shares the state's memory, else it is a fork of its own. Between cells the slot keeps all states stopped.
Everything here is in the hands of the program: what it says is believed only where it can harm nobody but itself.
"""

from __future__ import annotations

import gc
import marshal
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rocstar.sandbox import hooks, linux, program, seeds
from rocstar.sandbox import session_wire as sw
from rocstar.sandbox.hooks import Hooks
from rocstar.sandbox.jail import Inside
from rocstar.sandbox.program import Program
from rocstar.sandbox.session_processes import compiled_part
from rocstar.sandbox.slotwire import Task

if TYPE_CHECKING:
    from threading import Thread

CONTROL_FD = 250  # above what a program opens first, below its limit on open files
ADOPTION_PAUSE = 0.0001  # seconds between looks whether the slot is the parent by now


class Cell(Program):
    """A program whose names stay."""

    def __init__(self, task: Task, report: mmap.mmap | memoryview, module: ModuleType, number: int) -> None:
        super().__init__(task.code, report, task.output_bytes)
        self.module = module
        self.filename = f"{program.FILENAME[:-1]}, cell {number}>"

    def run(self) -> int:
        """As the program's, but for exit hooks: the notebook goes on."""
        status = self.attempt()
        for thread in other_threads():
            if not thread.daemon:
                thread.join()
        program.flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        return status


class State:
    """`cells`: how many made it, the cell that is running included."""

    def __init__(self, report: mmap.mmap, settings: bytes, later: Hooks) -> None:
        base_memory, inside = marshal.loads(settings)
        self.base_memory: int = base_memory
        self.walls = Inside(*inside)
        self.report = report
        self.later = later
        self.module = ModuleType("__main__")
        self.cells = 0
        self.slot = os.getppid()
        self.turning = False

    def begin(self, control: int) -> None:
        """In the first state, before any cell. Never returns."""
        compiled = compiled_part()
        self.next_state = compiled.next_state if compiled else next_state
        gc.enable()
        os.setpgid(0, 0)
        if not self.walls.private_processes:
            linux.die_with_parent(signal.SIGKILL)
        self.walls.enter_call()
        hooks.restore([{when: self.unless_turning(hook) for when, hook in each.items()} for each in self.later])
        self.take_control(control)
        os.closerange(3, CONTROL_FD)  # what the slot holds is not for cells
        os.closerange(CONTROL_FD + 1, CONTROL_FD + 64)
        while True:
            self.wait_for_cell()

    def unless_turning(self, hook: Callable[[], Any]) -> Callable[[], None]:
        """What a fork of the program needs, and one that is the next state does not: new locks, where no thread could
        hold the old ones, and random numbers of its own."""

        def run() -> None:
            if not self.turning:
                hook()

        return run

    def take_control(self, control: int) -> None:
        os.dup2(control, CONTROL_FD, inheritable=False)
        if control != CONTROL_FD:
            os.close(control)

    def wait_for_cell(self) -> None:
        """Wait, as this state, until there is a next one, and be that: returns in it, with the cell run."""
        import random  # here, as in `seeds`: it registers what is to be done after forks

        self.turning = not other_threads()
        numbers = None if self.turning else random.getstate()
        try:
            payload, *fds = self.next_state(CONTROL_FD)
            if numbers is not None:
                random.setstate(numbers)
            self.turning = False
            self.become_next(Task(*marshal.loads(payload)), *fds)
        except BaseException:
            os._exit(1)

    def become_next(self, task: Task, control: int, out: int, err: int) -> None:
        self.take_control(control)
        for fd, standard in ((out, 1), (err, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        self.join_slot()
        os.write(CONTROL_FD, sw.READY)
        os.read(CONTROL_FD, 1)  # the slot knows us now, and the clock runs
        status, kept = self.run(task)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os.write(CONTROL_FD, sw.DONE.pack(status, kept, peak))

    def join_slot(self) -> None:
        while os.getppid() != self.slot:
            time.sleep(ADOPTION_PAUSE)
        os.setpgid(0, 0)
        if not self.walls.private_processes:
            linux.die_with_parent(signal.SIGKILL)

    def run(self, task: Task) -> tuple[int, bool]:
        """Exit status; whether this state is fit for another cell: one that ran out of memory is not."""
        self.cells += 1
        if task.files:
            program.write_files(task.files)
        if self.cells == 1:
            seeds.reseed(task.seed)
        self.limit(task)
        cell = Cell(task, self.report, self.module, self.cells)
        status = cell.run()
        if os.getpid() != cell.pid:
            os._exit(0)  # a fork of the cell that came back here: it is no state, and speaks for nobody
        kept = not cell.out_of_memory
        cell.reserve.close()
        return status, kept

    def limit(self, task: Task) -> None:
        """The same in every cell of a session, so that a hard limit never has to be raised; CPU is counted from the
        fork."""
        program.limit(task, self.base_memory, None)
        if self.walls.processes_beside is not None:
            processes = task.processes + self.walls.processes_beside + sw.MAX_STATES
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def next_state(control_fd: int) -> tuple[bytes, int, int, int]:
    """As `_fork.next_state`, where that cannot be had."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    with socket.socket(fileno=os.dup(control_fd)) as control:
        while True:
            head, fds, _, _ = socket.recv_fds(control, sw.LENGTH.size, 3)
            if not head:
                os._exit(0)
            payload = receive(control, *sw.LENGTH.unpack(head))
            collect_children()
            middle = os.fork()
            if not middle:
                if os.fork():
                    os._exit(0)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                return payload, fds[0], fds[1], fds[2]
            os.waitpid(middle, 0)
            for fd in fds:
                os.close(fd)


def other_threads() -> list[Thread]:
    """But for the main one. Where nobody has imported `threading` there are none, and it is not imported for that: what
    it registers to be done after forks costs every turn 0.25 ms."""
    threading = sys.modules.get("threading")
    return [each for each in threading.enumerate() if each is not threading.main_thread()] if threading else []


def collect_children() -> None:
    """What the cell left was killed, and counts as a process until it is collected. A fork has other children."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def receive(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        got = control.recv(min(size - len(data), 2**20))
        if not got:
            os._exit(0)
        data += got
    return bytes(data)
