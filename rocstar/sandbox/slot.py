"""A slot: one long-lived process, alone with its programs, that forks once per call. This is its loop in Python, for
where the compiled one (`_fork.c`) cannot be had; both speak the bytes of `slotwire` and make the same promises.

Promises: at most one program at a time; when a call is answered, every process it left is dead, what it wrote is
gone from the working directory, and none of its bytes are left in the slot's memory. Where it cannot keep that, the
slot exits and the host replaces it.

Not here: building the jail (`jail`), running the program (`program`).
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress

from rocstar.sandbox import fetch, linux, program, slotwire
from rocstar.sandbox.call import Call
from rocstar.sandbox.hooks import Hooks
from rocstar.sandbox.jail import Jail
from rocstar.sandbox.slotwire import Answer, Ended
from rocstar.sandbox.stream import Stream

PIPE_CHUNK = 65536
UNWATCHED_SECONDS = 0.005  # between looks at a child where the kernel has no pidfd (before Linux 5.3)
AGED_NICE = 10  # a tenth of a young one's share; 19 would be a seventieth, and starve honest work


class Slot:
    def __init__(self, channel: socket.socket, jail: Jail, report: int, base_memory: int, later: Hooks) -> None:
        self.channel = channel
        self.jail = jail
        self.later = later
        jail.shield.lower()  # a session's first state is forked before it serves
        self.settings = program.pack_settings(base_memory, jail.inside)
        self.payload = bytearray(PIPE_CHUNK)
        self.scratch = bytearray(PIPE_CHUNK)
        self.report = mmap.mmap(report, slotwire.REPORT_BYTES)
        self.out, self.err, self.files = Stream(), Stream(), Stream()

    def serve(self) -> None:
        """Answer requests until the host goes away. Consumes requests from the channel, waits on it and on nothing
        else between calls; ended by end of file."""
        self.jail.shield.lift()
        while (kind := self.channel.recv(1)) and self.obey(kind):
            pass

    def obey(self, kind: bytes) -> bool:
        """Whether the slot can go on. What is not to be run is a cancellation that came too late."""
        return kind != slotwire.RUN or self.answer_one()

    def answer_one(self) -> bool:
        """Whether the slot can serve another call."""
        size, wall_seconds, output_bytes, fetch_bytes = slotwire.REQUEST.unpack(self.receive(slotwire.REQUEST.size))
        self.receive_payload(size)
        for stream in (self.out, self.err):
            stream.open()
            stream.reserve(output_bytes)
        task_bytes = size - fetch_bytes
        call = Call(self.fork(slice(0, task_bytes), self.out, self.err), wall_seconds, output_bytes)
        for stream in (self.out, self.err):
            os.close(stream.write_end)
        self.watch(call)
        status = self.end(call)
        reusable = (not fetch_bytes or self.fetch(slice(task_bytes, size))) and self.clean()
        self.payload[:size] = bytes(size)
        self.send(call, status, reusable)
        return reusable

    def clean(self) -> bool:
        try:
            self.jail.clean()
        except OSError:
            return False
        return True

    def receive(self, size: int) -> bytes:
        data = self.channel.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise EOFError
        return data

    def receive_payload(self, size: int) -> None:
        if len(self.payload) < size:
            self.payload = bytearray(size)
        view = memoryview(self.payload)[:size]
        while view:
            got = self.channel.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]

    def fetch(self, part: slice) -> bool:
        """Have the files that this part of the payload names read in a fork; whether all went well."""
        self.files.open()
        self.files.reserve(fetch.MAX_PACKED_BYTES)
        pid = self.fork(part, self.files, None)
        os.close(self.files.write_end)
        os.set_blocking(self.files.read_end, True)
        while got := os.readv(self.files.read_end, [memoryview(self.files.buffer)[self.files.used :]]):
            self.files.used += got
        return os.waitpid(pid, 0)[1] == 0

    def fork(self, part: slice, out: Stream, err: Stream | None) -> int:
        """For the program, or, without `err`, to fetch files: this part of the payload says which."""
        self.jail.shield.lower()
        pid = os.fork()
        if pid == 0:
            try:
                payload = bytes(memoryview(self.payload)[part])
                self.drop_buffers()
                os.setpgid(0, 0)
                if not self.jail.inside.private_processes:
                    linux.die_with_parent(signal.SIGKILL)
                os.dup2(out.write_end, 1)
                if err is None:
                    program.tidy(payload)
                else:
                    os.dup2(err.write_end, 2)
                os.closerange(3, 64)  # a slot holds fewer than that
                program.main(payload, self.settings, self.report, self.later)
            finally:
                os._exit(1)
        self.jail.shield.lift()
        return pid

    def drop_buffers(self) -> None:
        """In the fork: a limit on address space counts from before there were any."""
        self.payload = self.scratch = bytearray()
        for stream in (self.out, self.err, self.files):
            stream.buffer = bytearray()

    def watch(self, call: Call) -> None:
        """Until the program ends or has to be ended. Wakes on its death, its output, the host, the clock."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        try:
            pidfd = os.pidfd_open(call.pid)
        except OSError:
            pidfd = -1
        else:
            poller.register(pidfd, select.POLLIN)
        try:
            self.watch_with(call, poller, pidfd)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def watch_with(self, call: Call, poller: select.poll, pidfd: int) -> None:
        while call.ended is Ended.ITSELF:
            wait = call.seconds_to_wake()
            ready = poller.poll(1000 * (wait if pidfd >= 0 else min(wait, UNWATCHED_SECONDS)))
            for fd, event in ready:
                if fd == pidfd:
                    return
                self.handle(call, poller, fd, event)
            if pidfd < 0 and os.waitid(os.P_PID, call.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            self.mind_the_clock(call, poller)

    def mind_the_clock(self, call: Call, poller: select.poll) -> None:
        now = time.monotonic()
        if now >= call.deadline and call.ended is Ended.ITSELF:
            call.ended = Ended.WALL
        if not call.listening and now >= call.quiet_until:
            call.listening = True
            poller.register(self.out.read_end, select.POLLIN)
            poller.register(self.err.read_end, select.POLLIN)
        if not call.aged and now >= call.age_at:
            call.aged = True
            self.make_way(call.pid)

    def make_way(self, pid: int) -> None:
        if self.jail.may_age:
            for which in (os.PRIO_PGRP, os.PRIO_PROCESS):
                with suppress(OSError):  # it is about to end
                    os.setpriority(which, pid, AGED_NICE)

    def handle(self, call: Call, poller: select.poll, fd: int, event: int) -> None:
        if fd == self.channel.fileno():
            if not self.channel.recv(1):
                raise EOFError
            call.ended = Ended.CANCELLED
            return
        stream = self.out if fd == self.out.read_end else self.err
        if event & select.POLLIN:
            self.read_some(call, stream)
            if stream.dropped:
                call.ended = Ended.OUTPUT
        else:
            poller.unregister(fd)  # closed by the program; it may well run on

    def read_some(self, call: Call, stream: Stream) -> int:
        """Bytes read: into the buffer while the cap allows, else counted and forgotten. 0 at the end."""
        room = call.output_left
        target = memoryview(stream.buffer)[stream.used : stream.used + room] if room else memoryview(self.scratch)
        try:
            got = os.readv(stream.read_end, [target])
        except BlockingIOError:
            return 0
        if room:
            stream.used += got
            call.output_left -= got
        else:
            self.scratch[:got] = bytes(got)
            stream.dropped += got
        return got

    def end(self, call: Call) -> int:
        """Kill what is left, collect every process and the last output; the program's wait status."""
        if call.ended is not Ended.ITSELF:
            self.jail.kill_all(call.pid)
        _, status, usage = os.wait4(call.pid, 0)
        call.run_seconds = time.monotonic() - call.started
        call.add_usage(usage)
        self.reap_rest(call)
        for stream in (self.out, self.err):
            while self.read_some(call, stream):
                pass
        if (self.out.dropped or self.err.dropped) and call.ended is Ended.ITSELF:
            call.ended = Ended.OUTPUT
        return status

    def reap_rest(self, call: Call) -> None:
        """Orphans come to the slot when their parents die, so "no child" means nothing of the call is left."""
        waiting = os.WNOHANG
        while True:
            try:
                pid, _, usage = os.wait4(-1, waiting)
            except ChildProcessError:
                return
            if pid:
                call.add_usage(usage)
                waiting = os.WNOHANG
            else:
                self.jail.kill_all(call.pid)
                waiting = 0

    def send(self, call: Call, status: int, reusable: bool, committed: bool = False) -> None:
        (claimed,) = program.REPORT_HEADER.unpack_from(self.report)
        start = program.REPORT_HEADER.size
        report = memoryview(self.report)[start : start + min(claimed, slotwire.REPORT_BYTES - start)]
        answer = Answer(
            wait_status=status,
            ended=call.ended,
            reusable=reusable,
            run_seconds=call.run_seconds,
            cpu_seconds=call.cpu_seconds,
            peak_memory_bytes=call.peak_memory,
            dropped_stdout=self.out.dropped,
            dropped_stderr=self.err.dropped,
            slot_cpu_seconds=self.cpu_seconds(),
            committed=committed,
            stdout_bytes=self.out.used,
            stderr_bytes=self.err.used,
            report_bytes=len(report),
            files_bytes=self.files.used,
        )
        out, err, files = (memoryview(stream.buffer)[: stream.used] for stream in (self.out, self.err, self.files))
        self.channel.sendmsg([slotwire.ANSWER.pack(*answer), out, err, report, files])
        del out, err, report, files
        self.forget()

    def cpu_seconds(self) -> float:
        """Of the slot and of all that has run in it."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    def forget(self) -> None:
        """The next program is a fork of this process and must find nothing of the last one."""
        self.report.madvise(mmap.MADV_REMOVE)
        for stream in (self.out, self.err, self.files):
            stream.wipe()


def main(channel: socket.socket, jail: Jail, report: int, base_memory: int, later: Hooks) -> None:
    """Serve until the host goes away."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # PID 1 is immune to every signal it has no handler for
    try:
        Slot(channel, jail, report, base_memory, later).serve()
    except (EOFError, OSError):
        return  # the host is gone, or something could not be reset: either way this slot has served its last call
