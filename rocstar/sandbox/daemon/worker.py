"""One slot as the daemon sees it, and one program in it.

A short program costs the event loop nothing but the one look at its end: its output and report wait in their pipes.
Only one that still runs after LISTEN_SECONDS is listened to while it runs. Every run has a deadline that needs the
cooperation of nobody, and is answered exactly once, whatever goes wrong.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rocstar.sandbox.call import Call, Limits, Response
from rocstar.sandbox.daemon import verdict, watch
from rocstar.sandbox.daemon.verdict import Seen
from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import ENDED, LENGTH, Ended, Fetch
from rocstar.sandbox.walls.cgroups import HEADROOM_BYTES, Group

LISTEN_SECONDS = 0.01  # most programs end within it: one wake-up of the loop instead of many
FETCH_SECONDS = 20.0  # for a slot to send back files; it takes milliseconds
READ_BYTES = 2**16  # no less than a page: a program can make its pipe one of packets, whose rest would be lost
READS = 64  # in a row from one pipe, which holds a megabyte at most: a program that writes on must not hold us


MISSING = {"no_memory_cgroup": "memory", "no_process_limit": "processes"}
"""What is not counted for a whole call, by what a slot says that it lacks."""


class Stream:
    """What a program wrote to its stdout or stderr, up to a cap that both share."""

    __slots__ = ("chunks", "dropped", "fd", "room")

    def __init__(self, fd: int, room: list[int]) -> None:
        """`room`: bytes that may still be kept, shared with the other stream."""
        self.fd, self.room = fd, room
        self.chunks: list[bytes] = []
        self.dropped = 0

    def read(self) -> bool:
        """Take what is there, at most READ_BYTES; whether there may be more."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        kept = data[: self.room[0]]
        if kept:
            self.chunks.append(kept)
            self.room[0] -= len(kept)
        self.dropped += len(data) - len(kept)
        return bool(data)

    def taken(self) -> tuple[bytes, int]:
        """What has been kept and how many bytes were not, since the last time."""
        data, dropped = b"".join(self.chunks), self.dropped
        self.chunks, self.dropped = [], 0
        return data, dropped


class Pipes:
    """The daemon's ends of the pipes of one process: its output, and control, which its payload goes into and its
    report comes out of. Nothing is registered with the event loop before `listen`, or payload that has to wait."""

    __slots__ = ("control", "err", "loop", "most", "out", "report", "room", "theirs", "unsent", "watched")

    def __init__(self, loop: asyncio.AbstractEventLoop, cap: int, most: int) -> None:
        """cap: bytes of output to keep. most: bytes of a report that are read. Raises OSError."""
        self.loop, self.most, self.room = loop, most, [cap]
        self.control, control = socket.socketpair()
        self.theirs = [-1, -1, control.detach()]
        self.report = bytearray()
        self.unsent = memoryview(b"")
        self.watched: set[int] = set()
        self.out = self.err = Stream(-1, self.room)
        try:
            self.out, self.theirs[0] = self._pipe()
            self.err, self.theirs[1] = self._pipe()
        except OSError:
            self.close()
            raise

    def _pipe(self) -> tuple[Stream, int]:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        return Stream(ours, self.room), theirs

    def hand_over(self, slot: socket.socket, command: bytes, payload: bytes) -> None:
        """Have the slot start a process on the other ends, with this payload in control. Raises OSError."""
        self.send(payload)
        slot.sendmsg([command], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self.theirs))])
        self._close_theirs()

    def send(self, payload: bytes) -> None:
        """Into control; what it does not take now goes out when it can."""
        self.unsent = memoryview(payload)[self._sent(payload) :]
        if self.unsent:
            self.loop.add_writer(self.control.fileno(), self._send_more)

    def _sent(self, data: bytes | memoryview) -> int:
        """Bytes taken; a process that is gone takes all."""
        try:
            return self.control.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _send_more(self) -> None:
        self.unsent = self.unsent[self._sent(self.unsent) :]
        if not self.unsent:
            self.loop.remove_writer(self.control.fileno())

    def was_read(self) -> bool:
        """Whether the process has taken all of its payload: then it runs."""
        unread = struct.unpack("i", fcntl.ioctl(self.control, termios.TIOCOUTQ, bytes(4)))[0]
        return not self.unsent and unread == 0

    def listen_to_output(self, on_dropped: Callable[[], None]) -> None:
        """Read it while the process runs; `on_dropped`: called when some of it was more than is kept."""
        for stream in (self.out, self.err):
            self._watch(stream.fd, partial(self._on_output, stream, on_dropped))

    def listen_for_report(self, on_report: Callable[[], None] | None) -> None:
        """Read it while the process runs; `on_report`: called when it is complete."""
        self._watch(self.control.fileno(), partial(self._on_control, on_report))

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.loop.add_reader(fd, callback)
        self.watched.add(fd)

    def rest(self) -> None:
        """Stop listening."""
        for fd in self.watched:
            self.loop.remove_reader(fd)
        self.watched.clear()

    def _on_output(self, stream: Stream, on_dropped: Callable[[], None]) -> None:
        if not stream.read():
            self.loop.remove_reader(stream.fd)
        if stream.dropped:
            on_dropped()

    def _on_control(self, on_report: Callable[[], None] | None) -> None:
        complete = self.read_report()
        if complete is not False:
            self.loop.remove_reader(self.control.fileno())
        if complete and on_report is not None:
            on_report()

    def read_report(self) -> bool | None:
        """Take what is there of the report. True: it is complete, or will never be; None: the other end is closed."""
        for _ in range(READS):
            try:
                data = self.control.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return None
            self.report += data
            if len(self.report) >= self.wanted():
                return True
            if not data:
                return None
        return False

    def wanted(self) -> int:
        """Bytes of the report with its length, as far as is known."""
        if len(self.report) < LENGTH.size:
            return LENGTH.size
        size = int(LENGTH.unpack_from(self.report)[0])
        return LENGTH.size + size if size <= self.most else 0

    def drain(self) -> tuple[tuple[bytes, int], tuple[bytes, int]]:
        """All output that is there: of stdout and stderr, what was kept and how many bytes were not."""
        for stream in (self.out, self.err):
            for _ in range(READS):
                if not stream.read():
                    break
        return self.out.taken(), self.err.taken()

    def taken_report(self) -> bytes:
        """The report without its length, empty unless it is complete."""
        self.read_report()
        end = self.wanted()
        whole, self.report = self.report, bytearray()
        return bytes(whole[LENGTH.size : end]) if LENGTH.size < end <= len(whole) else b""

    def _close_theirs(self) -> None:
        for fd in self.theirs:
            if fd >= 0:
                os.close(fd)
        self.theirs = []

    def close(self) -> None:
        self.rest()
        if self.unsent:
            self.loop.remove_writer(self.control.fileno())
        self._close_theirs()
        self.control.close()
        for stream in (self.out, self.err):
            if stream.fd >= 0:
                os.close(stream.fd)
                stream.fd = -1


class Worker:
    """A slot: idle, busy with one process, or dead. It runs what `start` gives it and calls back with how that ended,
    or with None when the slot is no more; `owner` hears that it is idle again or lost."""

    def __init__(self, number: int, slot: socket.socket, hello: Mapping[str, Any], group: Group | None) -> None:
        """`hello`: what the slot said of itself. `group`: counts memory and processes of whole calls."""
        self.number, self.slot, self.group = number, slot, group
        missing = {MISSING[name] for name in hello["failed"] if name in MISSING}
        self.process, self.keeper = int(hello["slot"]), int(hello["keeper"])
        self.handles = {pid: pidfd(pid) for pid in (self.process, self.keeper)}
        self.uncounted = frozenset(missing if watch.can_see(self.process) else ())
        self.loop = asyncio.get_running_loop()
        self.on_ended: Callable[[Ended | None], None] | None = None
        self.on_idle: Callable[[Worker], None] = lambda worker: None
        self.on_lost: Callable[[Worker], None] = lambda worker: None
        self.on_passed: Callable[[str], None] | None = None
        """To be called with the limit of the whole call that `watch` sees passed."""
        self.started = math.inf
        """When its call began, by the monotonic clock; infinite while idle."""
        self.limits = Limits()
        self.cpu_seconds = 0.0
        """Of the slot and all that ran in it, as of its last answer."""
        self.dead = False
        self.loop.add_reader(slot.fileno(), self._on_readable)

    def limit(self, limits: Limits) -> None:
        """Of the whole of the next call. Raises OSError where the kernel does not take them: what is left of earlier
        calls in the slot is more than this one may use."""
        self.limits = limits
        if self.group is not None:
            self.group.limit(limits.memory_bytes + HEADROOM_BYTES, limits.processes + 1)  # the slot is one more

    def start(self, pipes: Pipes, command: bytes, payload: bytes, on_ended: Callable[[Ended | None], None]) -> None:
        """Run one process. Raises OSError where the slot does not even take the command."""
        pipes.hand_over(self.slot, command, payload)
        self.on_ended, self.started = on_ended, time.monotonic()

    def _on_readable(self) -> None:
        try:
            data = self.slot.recv(ENDED.size + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        on_ended, self.on_ended, self.started = self.on_ended, None, math.inf
        if len(data) != ENDED.size or on_ended is None:
            self.on_ended = on_ended
            self._lost()
            return
        ended = channel.parse_ended(data)
        self.cpu_seconds = ended.slot_cpu_seconds
        on_ended(ended)

    def passed(self) -> bool:
        """Whether the kernel has killed for want of memory since it was last asked."""
        return self.group is not None and self.group.killed()

    def stop(self) -> None:
        """End what runs; the slot answers as ever."""
        self._signal(self.process, signal.SIGUSR1)

    def give_up(self) -> None:
        """End the slot, without waiting for it. Nothing will be called back for what runs in it."""
        self.on_ended, self.dead = None, True
        self._signal(self.keeper, signal.SIGKILL)

    def _signal(self, pid: int, number: int) -> None:
        handle = self.handles.get(pid)
        with suppress(OSError):  # gone
            if handle is not None:
                signal.pidfd_send_signal(handle, number) if handle >= 0 else os.kill(pid, number)

    def _lost(self) -> None:
        self.loop.remove_reader(self.slot.fileno())
        self.slot.close()
        for handle in self.handles.values():
            if handle >= 0:
                os.close(handle)
        self.handles.clear()
        on_ended, self.on_ended, self.dead = self.on_ended, None, True
        self.on_lost(self)
        if on_ended is not None:
            on_ended(None)


def pidfd(pid: int) -> int:
    """-1 where the kernel has none (before Linux 5.3)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


class Run:
    """A program or a cell while it runs: when it is listened to, when and how it is stopped. `ended` makes the answer;
    `measures` are what is done to stop it, each with the seconds it is given to work."""

    measures: tuple[tuple[Callable[[], None], float], ...]

    def __init__(self, call: Call, worker: Worker, done: Callable[[Response | None], None]) -> None:
        """done: called once with the answer, or with None when nothing was run and another slot should be tried."""
        self.call, self.worker, self.done = call, worker, done
        self.reason = ""
        """Why it is being stopped: see `verdict.ENDED_BY`."""
        self.steps = iter(self.measures)
        self.listening = self.answered = False

    def begin(self, pipes: Pipes) -> None:
        """The clock runs from now."""
        self.pipes, self.begun = pipes, time.monotonic()
        self.worker.on_passed = self.stop
        self._wake_after(min(LISTEN_SECONDS, self.call.limits.wall_seconds))

    def _wake_after(self, seconds: float) -> None:
        self.timer = self.worker.loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        left = self.begun + self.call.limits.wall_seconds - time.monotonic()
        if self.reason:
            self._next_measure()
        elif left <= 0:
            self.stop("wall")
        else:
            self.listen()
            self._wake_after(left)

    def listen(self) -> None:
        if not self.listening:
            self.listening = True
            self.pipes.listen_to_output(partial(self.stop, "output"))
            self.pipes.listen_for_report(None)

    def stop(self, reason: str) -> None:
        """End it; the first reason counts."""
        if not self.reason and not self.answered:
            self.reason = reason
            self._next_measure()

    def _next_measure(self) -> None:
        self.timer.cancel()
        measure, seconds = next(self.steps, (self._give_up, math.inf))
        if seconds < math.inf:
            self._wake_after(seconds)
        measure()

    def _give_up(self) -> None:
        """Nothing helped: the slot itself is stuck, or what it runs cannot be ended."""
        self.worker.give_up()
        self.on_ended(None)

    def on_ended(self, ended: Ended | None) -> None:
        """The process has ended; None: nobody can say how. An answer leaves even if making it fails."""
        self.timer.cancel()
        self.guarded(partial(self.ended, ended))

    def guarded(self, make: Callable[[], None]) -> None:
        try:
            make()
        except Exception as error:
            traceback.print_exc()
            self.worker.give_up()
            self.answer(verdict.fault(self.call.id, f"the answer could not be made ({type(error).__name__}: {error})"))

    def ended(self, ended: Ended | None) -> None:
        raise NotImplementedError

    def answer(self, response: Response | None) -> None:
        if not self.answered:
            self.answered, self.worker.on_passed = True, None
            self.done(response)

    def seen(self, reason: str, *usage: float) -> Seen:
        """All that is known of it, its last output included. reason: why we ended it; usage: see Seen."""
        (out, dropped_out), (err, dropped_err) = self.pipes.drain()
        if reason not in ("output", "cancelled") and self.worker.passed():
            reason = "memory"
        if not reason and dropped_out + dropped_err:
            reason = "output"
        return Seen(out, err, (dropped_out, dropped_err), self.pipes.taken_report(), reason, *usage)

    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun


class ProgramRun(Run):
    """One plain call in a slot: the program, and then the files it is to send back."""

    def __init__(
        self, call: Call, worker: Worker, grace_seconds: float, done: Callable[[Response | None], None]
    ) -> None:
        """grace_seconds: a slot that has not ended its program so long after it was told to is stuck itself."""
        self.measures = ((worker.stop, grace_seconds),)
        self.program: tuple[Seen, Ended] | None = None
        """Set while its files are fetched."""
        super().__init__(call, worker, done)

    def start(self, payload: bytes) -> None:
        """Run it; whatever happens, `done` is called."""
        try:
            self.worker.limit(self.call.limits)
            self.begin(Pipes(self.worker.loop, self.call.limits.output_bytes, verdict.MAX_REPORT_BYTES))
        except OSError:  # the slot holds too much memory of earlier calls, or we have no descriptors left
            self.worker.give_up()
            super().answer(None)
            return
        try:
            command = channel.RUN_AND_KEEP if self.call.fetch else channel.RUN
            self.worker.start(self.pipes, command, payload, self.on_ended)
        except OSError:  # the slot is dead
            self.worker.give_up()
            self.answer(None)

    def answer(self, response: Response | None) -> None:
        self.timer.cancel()
        self.pipes.close()
        super().answer(response)

    def ended(self, ended: Ended | None) -> None:
        if self.program is not None:
            self._fetched(*self.program, ended)
            return
        if ended is not None and ended.stale:
            self.answer(None)
            return
        if ended is None:
            seen = self.seen(self.reason if self.pipes.was_read() else "", self.age())
        else:
            usage = (ended.run_seconds, ended.cpu_seconds, ended.peak_memory_bytes)
            seen = self.seen(self.reason if ended.stopped else "", *usage)
        if ended is None and not seen.reason:
            self.answer(verdict.fault(self.call.id, "the slot that ran it died, or did not answer"))
        elif ended is not None and ended.reusable and self.call.fetch:
            self._fetch(seen, ended)
        else:
            self._judge(seen, ended, ended)

    def _fetch(self, seen: Seen, ended: Ended) -> None:
        self.pipes.close()
        self.program = seen, ended
        self.pipes = Pipes(self.worker.loop, 0, verdict.MAX_LONG_REPORT_BYTES)
        self.pipes.listen_for_report(None)
        self.timer = self.worker.loop.call_later(FETCH_SECONDS, self._give_up)
        self.worker.start(self.pipes, channel.RUN, channel.pack(Fetch(list(self.call.fetch))), self.on_ended)

    def _fetched(self, seen: Seen, program: Ended, ended: Ended | None) -> None:
        if ended is None:
            self.answer(verdict.fault(self.call.id, "the slot died, or did not answer, before it sent the files back"))
        else:
            self._judge(seen, program, ended, self.pipes.taken_report())

    def _judge(self, seen: Seen, program: Ended | None, last: Ended | None, fetched: bytes = b"") -> None:
        response = verdict.program(self.call, seen, program, fetched)
        if last is not None and last.reusable:
            self.worker.on_idle(self.worker)
        self.answer(response)
