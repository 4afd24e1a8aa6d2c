"""The daemon's side of one slot, and of one program in it.

A short program wakes the event loop once, at its end: until then its output and report wait in their pipes. Pipes are
read during the run only if it lasts longer than LISTEN_SECONDS. Every run has a deadline that depends neither on the
program nor on the slot, and is answered exactly once, also after any failure.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import signal
import socket
import struct
import termios
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import structs

from rocstar.sandbox.call import Call, Limits, Response, fault
from rocstar.sandbox.daemon import verdict, watch
from rocstar.sandbox.daemon.snapshot import Lineage
from rocstar.sandbox.daemon.verdict import Seen
from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import ENDED, LENGTH, Ended, Program
from rocstar.sandbox.walls.cgroups import HEADROOM_BYTES, ControlGroup

LISTEN_SECONDS = 0.03  # most programs end within it; one that fills its pipe is delayed by as much
READ_BYTES = 2**16  # more than a page: in a pipe's packet mode, the rest of a longer packet would be lost
TICKS = 10  # of a wall limit: all that a daemon which was stopped itself can charge a program for is one of them
OWN_SHARE = 0.9  # of one CPU: a program whose processes wait for each other alone has more
MOST_WAITS = 3  # wall limits that a program may have in addition because it waited for a CPU
READS = 32  # in a row from one pipe of at most a megabyte: a program that keeps writing must not block the daemon


class Stream:
    """The output of one pipe, up to a limit."""

    __slots__ = ("data", "dropped", "fd", "room")

    def __init__(self, fd: int, room: list[int]) -> None:
        """room: bytes that may still be kept, in a list because stdout and stderr share it."""
        os.set_blocking(fd, False)
        self.fd, self.room, self.data, self.dropped = fd, room, bytearray(), 0

    def read(self) -> int | None:
        """Read what is available, at most READ_BYTES: the number of bytes, 0 at the end, None if there are none now."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # on control: the process has ended without reading its payload
            return 0
        if not data:
            return 0
        kept = data[: self.room[0]]
        self.data += kept
        self.room[0] -= len(kept)
        self.dropped += len(data) - len(kept)
        return len(data)

    def drain(self) -> tuple[bytes, int]:
        """Read everything available; the bytes kept since the last call, and the number of bytes dropped."""
        for _ in range(READS):
            if not self.read():
                break
        data, dropped = bytes(self.data), self.dropped
        self.data, self.dropped = bytearray(), 0
        return data, dropped


class Pipes:
    """The daemon's ends of the pipes of one process: stdout, stderr, and control, which carries its payload and its
    report. Registered with the event loop only by `watch`, or while payload waits to be sent."""

    __slots__ = ("control", "err", "loop", "most", "out", "room", "theirs", "unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop, cap: int, most: int) -> None:
        """cap: bytes of output to keep. most: bytes of a report. Raises OSError, with all descriptors closed."""
        fds: list[int] = []
        try:
            fds += os.pipe()
            fds += os.pipe()
            fds += (end.detach() for end in socket.socketpair())
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        self.loop, self.most, self.room = loop, most, [cap]
        self.out, self.err = Stream(fds[0], self.room), Stream(fds[2], self.room)
        self.control = Stream(fds[4], [LENGTH.size + most])
        self.theirs = [fds[1], fds[3], fds[5]]
        self.unsent = memoryview(b"")

    def hand_over(self, slot: socket.socket, payload: bytes) -> None:
        """Have the slot start a process on the other ends, with this payload in control. Raises OSError."""
        self.send(payload)
        slot.sendmsg([channel.RUN], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self.theirs))])
        self._close_theirs()

    def send(self, payload: bytes) -> None:
        """Write to control; the rest is written as soon as control accepts it."""
        self.unsent = memoryview(payload)
        self._send_more()
        if self.unsent:
            self.loop.add_writer(self.control.fd, self._send_more)

    def _send_more(self) -> None:
        try:
            self.unsent = self.unsent[os.write(self.control.fd, self.unsent) :]
        except BlockingIOError:
            return
        except OSError:  # the process is gone
            self.unsent = self.unsent[:0]
        if not self.unsent:
            self.loop.remove_writer(self.control.fd)

    def was_read(self) -> bool:
        """Whether the process has read all of its payload, and so runs."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self.control.fd, termios.TIOCOUTQ, bytes(4)))
        return not self.unsent and unread == 0

    def watch(self, stream: Stream, on_read: Callable[[], None]) -> None:
        """Read the stream while the process runs."""
        self.loop.add_reader(stream.fd, self._on_readable, stream, on_read)

    def _on_readable(self, stream: Stream, on_read: Callable[[], None]) -> None:
        if stream.read() == 0:
            self.loop.remove_reader(stream.fd)
        on_read()

    def unwatch(self) -> None:
        """Stop reading all streams."""
        for stream in (self.out, self.err, self.control):
            self.loop.remove_reader(stream.fd)

    def has_report(self) -> bool:
        """Whether the report is complete, or too long to be accepted."""
        data = self.control.data
        if len(data) < LENGTH.size:
            return False
        size = int(LENGTH.unpack_from(data)[0])
        return size > self.most or len(data) >= LENGTH.size + size

    def taken_reports(self) -> list[bytes]:
        """The first two reports without their lengths; an incomplete or missing one is empty."""
        data, _ = self.control.drain()
        self.control.room[0] = LENGTH.size + self.most
        reports = []
        for _ in range(2):
            end = LENGTH.size + LENGTH.unpack_from(data)[0] if len(data) >= LENGTH.size else 0
            reports.append(data[LENGTH.size : end] if end <= len(data) else b"")
            data = data[end:]
        return reports

    def _close_theirs(self) -> None:
        for fd in self.theirs:
            os.close(fd)
        self.theirs = []

    def close(self) -> None:
        """May be called twice."""
        if self.control.fd < 0:
            return
        self.unwatch()
        if self.unsent:
            self.loop.remove_writer(self.control.fd)
        self._close_theirs()
        for stream in (self.out, self.err, self.control):
            os.close(stream.fd)
            stream.fd = -1


class Worker:
    """A slot: idle, busy with one process, or dead. `start` runs a process and calls back with an Ended, or with None
    when the slot is dead."""

    def __init__(
        self,
        number: int,
        slot: socket.socket,
        hello: Mapping[str, Any],
        group: ControlGroup,
        shortages: watch.Shortages,
    ) -> None:
        """hello: the slot's first message. group: counts the memory of whole calls."""
        self.number, self.slot, self.group, self.shortages = number, slot, group, shortages
        self.process, self.keeper = int(hello["slot"]), int(hello["keeper"])
        self.handles = {pid: pidfd(pid) for pid in (self.process, self.keeper)}
        sees = watch.can_see(self.process)
        lacking = [*([] if "memory" in group.folders else ["no_memory_cgroup"]), *hello["failed"]]
        if hello["attached"] and not sees:  # `Forks` could not count
            lacking.append("no_process_limit")
        self.watched = watch.RESOURCES.intersection(lacking) if sees else frozenset[str]()
        """Resources that nothing else limits for a whole call, so that `watch` must check them."""
        self.failed = tuple(name for name in lacking if name != "no_process_limit" or not sees)
        """Properties that its walls should have and lack; not the process limit, if `watch` enforces it."""
        self.forks = watch.Forks(hello["attached"][0], self.process) if hello["attached"] else None
        self.loop = asyncio.get_running_loop()
        self.on_ended: Callable[[Ended | None], None] | None = None
        self.on_idle: Callable[[Worker], None] = lambda worker: None
        self.on_lost: Callable[[Worker], None] = lambda worker: None
        self.on_exceeded: Callable[[str], None] | None = None
        """Called by `watch` with the limit that the whole call exceeds."""
        self.started = math.inf
        """Start of its call, by the monotonic clock; infinite while idle."""
        self.limits = Limits()
        self.fair_share = 1.0
        """The slot's share of one core when all slots compute."""
        self.disk = ""
        """Folder on the machine's disk that the programs of all slots write to; empty if the slot has its own."""
        self.origin: Lineage | None = None
        """Set if a notebook in this slot can be copied, or become a copy."""
        self.cpu_seconds = 0.0
        """CPU of the slot and of everything that ran in it, until its last answer."""
        self.keeper_cpu_seconds = 0.0
        """CPU of its keeper when last read: the keeper may end with the slot before the next reading."""
        self.dead = False
        self.loop.add_reader(slot.fileno(), self._on_readable)

    def limit(self, limits: Limits) -> None:
        """Set the limits of the next call as a whole. Raises OSError if the kernel refuses them, because the slot holds
        more memory from earlier calls than this one may use."""
        self.limits = limits
        if self.forks is not None:
            self.forks.begin(limits.processes)
        self.group.limit(limits.memory_bytes + HEADROOM_BYTES)

    def start(self, pipes: Pipes, payload: bytes, on_ended: Callable[[Ended | None], None]) -> None:
        """Run one process. Raises OSError if the slot does not accept the command."""
        pipes.hand_over(self.slot, payload)
        self.on_ended, self.started = on_ended, time.monotonic()

    def _on_readable(self) -> None:
        try:
            data = self.slot.recv(ENDED.size + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        on_ended, self.on_ended, self.started = self.on_ended, None, math.inf
        if len(data) == ENDED.size and on_ended is not None:
            ended = Ended(*ENDED.unpack(data))
            self.cpu_seconds = ended.slot_cpu_seconds
            on_ended(ended)
            return
        self.dead = True
        self.loop.remove_reader(self.slot.fileno())
        self.slot.close()
        for handle in filter(None, self.handles.values()):
            os.close(handle)
        self.handles.clear()
        if self.forks is not None:
            self.forks.close()
        self.on_lost(self)
        if on_ended is not None:
            on_ended(None)

    def blamed(self, response: Response, before: tuple[int, int]) -> str:
        """As `Shortages.blamed`, for a program that ran here."""
        return self.shortages.blamed(response, before, self.disk, lost=self.group.lost)

    def stop(self) -> None:
        """End the running program; the slot answers as usual."""
        self._signal(self.process, signal.SIGUSR1)

    def give_up(self) -> None:
        """Kill the slot without waiting for it; `on_ended` is not called for the program in it."""
        self.on_ended, self.dead = None, True
        self._signal(self.keeper, signal.SIGKILL)

    def _signal(self, pid: int, number: int) -> None:
        handle = self.handles.get(pid)
        with suppress(OSError):  # gone
            if handle is not None:
                signal.pidfd_send_signal(handle, number)


def pidfd(pid: int) -> int | None:
    """A descriptor of the process; None if it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


class RunningCall:
    """A program or a cell while it runs: when its pipes are read, when and how it is stopped. `finish` makes the
    answer; `measures` are the ways to stop it, in order, each with the seconds to wait for its effect."""

    def __init__(
        self,
        call: Call,
        worker: Worker,
        measures: Iterable[tuple[Callable[[], None], float]],
        done: Callable[[Response | None], None],
    ) -> None:
        """done: called once with the answer, or with None if nothing was run and another slot should be tried."""
        self.call, self.worker, self.done = call, worker, done
        self.measures = iter(measures)
        self.reason = ""
        """Why it is being stopped: see `verdict.ENDED_BY`."""
        self.has_begun = False
        """Whether its process had read its payload when it was stopped; if not, the slot is at fault."""
        self.listening = self.answered = False
        self.waited_before: dict[int, float] = {}
        """See `watch.waits`."""

    def begin(self, pipes: Pipes) -> None:
        """Start the clock."""
        self.pipes, self.begun, self.counts = pipes, time.monotonic(), self.worker.shortages.counts
        self.worker.on_exceeded = self.stop
        self.left, self.granted = self.call.limits.wall_seconds, 0.0
        self.tick(LISTEN_SECONDS)

    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun

    def wake_after(self, seconds: float) -> None:
        self.timer = self.worker.loop.call_later(seconds, self.on_timer)

    def tick(self, seconds: float) -> None:
        """Let at most so much of its wall time pass. However late the timer is, no more is charged: what has ended by
        then may not be known yet."""
        seconds = min(seconds, self.left)
        self.left -= seconds
        self.wake_after(seconds)

    def on_timer(self) -> None:
        wall = self.call.limits.wall_seconds
        if self.reason:
            self.next_measure()
        elif self.left <= 0 and (reason := self.timeout_reason(wall)):
            self.stop(reason)
        else:
            if not self.listening:
                self.listen()
            self.tick(wall / TICKS)

    def timeout_reason(self, wall: float) -> str:
        """The reason to stop it at its wall limit; empty where it goes on, for as long as others had its CPU."""
        age, (waited, cpu) = self.age(), watch.waits(self.worker, self.waited_before)
        more = min(waited, MOST_WAITS * wall) - self.granted if cpu < OWN_SHARE * age else 0.0
        if more > wall / TICKS:
            self.granted, self.left = self.granted + more, more
            return ""
        return "starved" if watch.is_starved(waited, cpu, age, self.worker.fair_share) else "wall"

    def listen(self) -> None:
        self.listening = True
        for stream in (self.pipes.out, self.pipes.err, self.pipes.control):
            self.pipes.watch(stream, self.on_read)

    def on_read(self) -> None:
        if self.pipes.out.dropped or self.pipes.err.dropped:
            self.stop("output")

    def stop(self, reason: str) -> None:
        """Stop the program or cell; the first reason counts."""
        if not self.reason and not self.answered:
            self.reason, self.has_begun = reason, self.pipes.was_read()
            self.next_measure()

    def next_measure(self) -> None:
        self.timer.cancel()
        measure, seconds = next(self.measures, (None, 0.0))
        if measure is not None:
            self.wake_after(seconds)
            measure()
        else:  # the slot itself is stuck, or its program cannot be ended
            self.worker.give_up()
            self.on_ended(None)

    def on_ended(self, ended: Ended | None) -> None:
        """The process has ended; None: in an unknown way."""
        self.timer.cancel()
        self.guarded(self.finish, ended)

    def guarded(self, finish: Callable[..., None], *arguments: object) -> None:
        """Call `finish`; if that raises, answer INTERNAL, so that every call is answered."""
        try:
            finish(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.worker.give_up()
            self.answer(fault(self.call.id, f"the answer could not be made ({type(error).__name__}: {error})"))

    def finish(self, ended: Ended | None) -> None:
        raise NotImplementedError

    def answer(self, response: Response | None) -> None:
        if not self.answered:
            self.answered, self.worker.on_exceeded = True, None
            self.timer.cancel()
            if response is not None and (shortage := self.worker.blamed(response, self.counts)):
                response = structs.replace(fault(self.call.id, shortage), state_lost=response.state_lost)
            self.done(response)

    def seen(self, reason: str, run_seconds: float, cpu_seconds: float, peak_memory_bytes: int) -> Seen:
        """All observations, the last output included. reason: why the daemon ended it."""
        (out, dropped_out), (err, dropped_err) = self.pipes.out.drain(), self.pipes.err.drain()
        out_of_memory = self.worker.group.killed()  # always read, or it would count for the slot's next call
        if out_of_memory and reason not in ("output", "cancelled"):
            reason = "memory"
        if not reason and dropped_out + dropped_err:
            reason = "output"
        report, files = self.pipes.taken_reports()
        usage = run_seconds, cpu_seconds, peak_memory_bytes
        return Seen(out, err, dropped_out + dropped_err, report, reason, *usage, files or report)


class ProgramRun(RunningCall):
    """One plain call in a slot."""

    def __init__(self, call: Call, worker: Worker, grace: float, done: Callable[[Response | None], None]) -> None:
        """grace: seconds that a slot has to end its program after `stop`; then it is treated as stuck."""
        super().__init__(call, worker, ((worker.stop, grace),), done)

    def start(self) -> None:
        """Run the program; `done` is called in every case."""
        try:
            self.worker.limit(self.call.limits)
            most = verdict.MAX_LONG_REPORT_BYTES if self.call.fetch else verdict.MAX_REPORT_BYTES
            pipes = Pipes(self.worker.loop, self.call.limits.output_bytes, most)
        except OSError:  # the slot holds too much memory of earlier calls, or the daemon has no descriptors left
            self.worker.give_up()
            self.done(None)
            return
        self.begin(pipes)
        try:
            self.worker.start(pipes, payload(self.call), self.on_ended)
        except OSError:  # the slot is dead
            self.worker.give_up()
            self.answer(None)

    def timeout_reason(self, wall: float) -> str:
        return super().timeout_reason(wall) if self.pipes.was_read() else "starved"  # its slot has not started it

    def answer(self, response: Response | None) -> None:
        self.pipes.close()
        super().answer(response)

    def finish(self, ended: Ended | None) -> None:
        if ended is None:
            seen = self.seen(self.reason if self.has_begun else "", self.age(), 0.0, 0)
            died = fault(self.call.id, "the slot that ran it died, or did not answer")
            self.answer(verdict.program(self.call, seen, None) if seen.reason else died)
        elif ended.stale:
            self.answer(None)
        else:
            overtaken = bool(self.reason) and not ended.stopped
            usage = ended.run_seconds, ended.cpu_seconds, ended.peak_memory_bytes
            response = verdict.program(self.call, self.seen("" if overtaken else self.reason, *usage), ended)
            if overtaken:  # the process ended before the signal arrived, which would end the next one
                self.worker.give_up()
            elif ended.reusable:
                self.worker.on_idle(self.worker)
            self.answer(response)


def payload(call: Call) -> bytes:
    """The payload for the program's process."""
    limits = call.limits
    bounds = (limits.cpu_seconds, limits.memory_bytes, limits.output_bytes, limits.processes)
    return channel.pack(Program(call.code, call.stdin, call.files, call.fetch, seed(call), *bounds))


def seed(call: Call) -> int:
    """The call's seed; a fresh one if it has none."""
    return int.from_bytes(os.urandom(8)) if call.seed is None else call.seed
