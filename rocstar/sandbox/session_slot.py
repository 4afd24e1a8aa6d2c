"""The slot of a session: its first process keeps the states of a notebook stopped and lets one cell run at a time.

Promises: when a cell is answered, every process is dead but the stopped states; a cell that is not committed has
changed neither the state it started from nor the files. Where it cannot keep that (a state was killed or does not
fork, files cannot be read back, something cannot be found to be killed), the slot exits, and the host runs the history
in another. Not here: walls (`jail`), anything that executes a program's code (`session_state`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from rocstar.sandbox import fetch, session_files, session_state, slotwire
from rocstar.sandbox import session_wire as sw
from rocstar.sandbox.call import Call
from rocstar.sandbox.hooks import Hooks
from rocstar.sandbox.jail import Jail, kill_children
from rocstar.sandbox.session_files import Tree
from rocstar.sandbox.session_processes import cpu_seconds, kill_group
from rocstar.sandbox.session_sweep import LOOK_SECONDS, Sweeper
from rocstar.sandbox.session_wire import Order
from rocstar.sandbox.slot import Slot
from rocstar.sandbox.slotwire import Ended

START_SECONDS = 10.0  # for a state to fork; it takes a millisecond
CREDENTIALS = struct.Struct("=iII")


class Unfit(Exception):
    """The slot cannot go on."""


@dataclass(slots=True)
class State:
    """A stopped process."""

    pid: int
    control: socket.socket
    files: Tree
    """Working directory as the cell left it."""


class CellCall(Call):
    """One run of one cell."""

    def __init__(self, pid: int, wall_seconds: float, output_bytes: int, control: socket.socket) -> None:
        super().__init__(pid, wall_seconds, output_bytes)
        self.aged = True  # niceness would stay with all cells to come
        self.control = control
        self.status = 0
        self.fit = self.done = False


class SessionSlot(Slot):
    def __init__(self, channel: socket.socket, jail: Jail, report: int, base_memory: int, later: Hooks) -> None:
        super().__init__(channel, jail, report, base_memory, later)
        self.states = {sw.ROOT: self.first_state(later)}
        self.on_disk: Tree | None = {}
        self.sweeper = Sweeper(jail)
        self.running = 0

    def first_state(self, later: Hooks) -> State:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours.detach())
                os.close(self.channel.detach())
                session_state.State(self.report, self.settings, later).begin(theirs.detach())
            finally:
                os._exit(1)
        theirs.close()
        ours.settimeout(START_SECONDS)
        return State(pid, ours, {})

    def end_all(self) -> None:
        """Before the slot exits: where it is not the first process of a namespace, nothing else ends them."""
        for pid in {*self.known(), self.running} - {0}:
            kill_group(pid)
        kill_children(self.jail.children)

    def obey(self, kind: bytes) -> bool:
        if kind == sw.RESET:
            self.reset()
        return super().obey(kind)

    def reset(self) -> None:
        """As before any cell, for another session. Raises OSError or Unfit."""
        for number in self.states.keys() - {sw.ROOT}:
            self.drop(number)
        root = self.states[sw.ROOT]
        if os.getpriority(os.PRIO_PROCESS, root.pid) != os.getpriority(os.PRIO_PROCESS, 0):
            raise Unfit("a cell has made the first state wait for others")
        self.jail.clean()
        self.on_disk = root.files

    def answer_one(self) -> bool:
        size, wall_seconds, output_bytes, fetch_bytes = slotwire.REQUEST.unpack(self.receive(slotwire.REQUEST.size))
        self.receive_payload(size)
        payload = memoryview(self.payload)[:size]
        order = sw.parse_order(bytes(payload[: size - fetch_bytes]))
        wanted = slotwire.parse_fetch(bytes(payload[size - fetch_bytes :]))
        payload.release()
        for stream in (self.out, self.err):
            stream.open()
            stream.reserve(output_bytes)
        base = self.states[order.base]
        self.show_files(base.files)
        call = self.launch(base, order, wall_seconds, output_bytes)
        self.watch(call)
        alive, swept = self.settle(call)
        if wanted:
            self.files.hold(fetch.packed(wanted))
        committed = self.keep_or_forget(call, order, alive, swept)
        reusable = swept and 0 not in self.known()
        self.send(call, call.status, reusable, committed)
        return reusable

    def show_files(self, tree: Tree) -> None:
        if self.on_disk is not tree:
            session_files.put(".", tree)
        self.on_disk = None

    def launch(self, base: State, order: Order, wall_seconds: float, output_bytes: int) -> CellCall:
        """Let the base fork; the fork waits until it is known here. Raises OSError or Unfit."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.settimeout(START_SECONDS)
        if not base.pid:
            raise Unfit("a state was killed")
        self.sweeper.begin()
        os.kill(base.pid, signal.SIGCONT)
        with theirs:
            fds = [theirs.fileno(), self.out.write_end, self.err.write_end]
            socket.send_fds(base.control, [sw.LENGTH.pack(len(order.task))], fds)
        base.control.sendall(order.task)
        for stream in (self.out, self.err):
            os.close(stream.write_end)
        pid = self.running = self.sender(ours)
        if not self.stopped(base.pid):
            raise Unfit("a state died")
        ours.send(b"G")
        return CellCall(pid, wall_seconds, output_bytes, ours)

    def sender(self, control: socket.socket) -> int:
        """The process that says it is the new state: the kernel tells which, and that it is a child of ours."""
        said, extra, _, _ = control.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        if not said or not extra:
            raise Unfit("a state did not fork")
        pid = int(CREDENTIALS.unpack(extra[0][2][: CREDENTIALS.size])[0])
        if pid in self.known():
            raise Unfit("a state speaks for another")
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return pid
        raise Unfit("what speaks for the new state is no child of the slot")

    def known(self) -> set[int]:
        return {state.pid for state in self.states.values()}

    def stopped(self, pid: int) -> bool:
        """Stop it and all of its group, in one go; False when it is dead."""
        os.killpg(pid, signal.SIGSTOP)
        seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return seen is not None and seen.si_code == os.CLD_STOPPED

    # While the cell runs

    def watch_with(self, call: Call, poller: select.poll, pidfd: int) -> None:
        assert isinstance(call, CellCall)
        poller.register(call.control, select.POLLIN)
        while call.ended is Ended.ITSELF and not call.done:
            for fd, event in poller.poll(1000 * min(call.seconds_to_wake(), LOOK_SECONDS)):
                if fd == pidfd:
                    return
                self.handle(call, poller, fd, event)
            self.sweeper.look_now_and_then()
            self.mind_the_clock(call, poller)

    def handle(self, call: Call, poller: select.poll, fd: int, event: int) -> None:
        assert isinstance(call, CellCall)
        if fd != call.control.fileno():
            super().handle(call, poller, fd, event)
            return
        said = call.control.recv(sw.DONE.size) if event & select.POLLIN else b""
        if len(said) == sw.DONE.size:
            status, call.fit, call.peak_memory = sw.DONE.unpack(said)
            call.status = status << 8
            call.done = True
        poller.unregister(fd)

    # When it is over

    def settle(self, call: CellCall) -> tuple[bool, bool]:
        """Stop it, kill all it has started, read its last output. Whether it can be a state, and whether it is certain
        that the rest is dead."""
        call.run_seconds = time.monotonic() - call.started
        alive = call.done and call.ended is Ended.ITSELF and self.stopped(call.pid)
        if alive:
            call.cpu_seconds += cpu_seconds(call.pid)
        else:
            call.status = self.kill(call)
        swept = self.sweep(call.pid if alive else 0)
        self.drain(call)
        if call.ended is Ended.OUTPUT and alive:
            alive = False
            self.kill(call)
        return alive, swept

    def drain(self, call: CellCall) -> None:
        for stream in (self.out, self.err):
            while self.read_some(call, stream):
                pass
        if (self.out.dropped or self.err.dropped) and call.ended is Ended.ITSELF:
            call.ended = Ended.OUTPUT

    def keep_or_forget(self, call: CellCall, order: Order, alive: bool, swept: bool) -> bool:
        """Whether it is committed. A cell whose files cannot be put back later is not."""
        tree: Tree | None = None
        if alive and swept and call.fit and order.commit:
            with suppress(OSError):
                tree = session_files.take(".")
        if tree is not None:
            self.commit(call, order, tree)
        elif alive:
            self.kill(call)
        return tree is not None

    def commit(self, call: CellCall, order: Order, tree: Tree) -> None:
        call.control.settimeout(START_SECONDS)
        self.states[order.new] = State(call.pid, call.control, tree)
        self.on_disk = tree
        for number in order.drop:
            self.drop(number)

    def drop(self, number: int) -> None:
        state = self.states.pop(number)
        state.control.close()
        if state.pid:
            kill_group(state.pid)
            os.waitpid(state.pid, 0)

    def kill(self, call: CellCall) -> int:
        """The wait status."""
        kill_group(call.pid)
        _, status, usage = os.wait4(call.pid, 0)
        call.add_usage(usage)
        call.control.close()
        return status

    def sweep(self, running: int) -> bool:
        """Kill what the cell has started; `running`: the new state, or 0. False when it is not certain that all of it
        is dead."""
        return self.sweeper.sweep({*self.known(), running}, running, self.collect_orphans)

    def collect_orphans(self) -> None:
        """And states that a cell has killed: their number is 0 from then on."""
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                for state in self.states.values():
                    state.pid = 0 if state.pid == pid else state.pid

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() + sum(cpu_seconds(pid) for pid in self.known() if pid)


def main(channel: socket.socket, jail: Jail, report: int, base_memory: int, later: Hooks) -> None:
    """Serve until the host goes away, or until the slot is unfit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # PID 1 is immune to every signal it has no handler for
    serving = SessionSlot(channel, jail, report, base_memory, later)
    try:
        serving.serve()
    except (EOFError, OSError, Unfit):
        pass  # the host is gone, or this slot cannot go on: either way it has run its last cell
    finally:
        serving.end_all()
