"""The limit of processes where programs run as a user whose other processes RLIMIT_NPROC would count with them: before
a process of the slot starts another process or a thread, the kernel asks here (`walls.seccomp.ask_before_forks`). So a
program that forks without end never has more than its call may have.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import struct
import time
from contextlib import suppress

from rocstar.sandbox.daemon import watch

QUESTION, ANSWER = struct.Struct("=Q72x"), struct.Struct("=Q8xiI")
"""The kernel's seccomp_notif, with its number first, and seccomp_notif_resp."""
RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
CONTINUE = 1
PAUSE_SECONDS = 0.005  # before a count, for those that may be started to appear
COUNTING_SHARE = 0.1  # of the daemon's time that one slot may take by being counted


class Forks:
    """Answers the questions of one slot until `close`. A call that has started as many as it may waits a moment, and
    then those alive are counted."""

    def __init__(self, listener: int, slot: int) -> None:
        """slot: its process id."""
        self.listener, self.slot = listener, slot
        self.most = self.left = 0
        """Processes and threads of the call, and how many may be started before the next count."""
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.pause = PAUSE_SECONDS
        self.waiting = select.poll()
        self.waiting.register(listener, select.POLLIN)

    def begin(self, most: int) -> None:
        """A call begins, with its first process."""
        self.most = self.left = most
        self.listen()

    def listen(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.listener >= 0:
            self.loop.add_reader(self.listener, self.on_asked)

    def on_asked(self) -> None:
        if not self.waiting.poll(0)[0][1] & select.POLLIN:  # all processes have ended
            return
        if self.left <= 0:
            self.count()
        question = bytearray(QUESTION.size)
        with suppress(OSError):  # the process that asked has been killed
            fcntl.ioctl(self.listener, RECEIVE, question)
            answer = (0, CONTINUE) if self.left > 0 else (-errno.EAGAIN, 0)
            self.left -= 1
            fcntl.ioctl(self.listener, SEND, ANSWER.pack(*QUESTION.unpack(question), *answer))
        if self.left <= 0:
            self.loop.remove_reader(self.listener)
            self.timer = self.loop.call_later(self.pause, self.listen)

    def count(self) -> None:
        started = time.monotonic()
        self.left = self.most - watch.tasks(self.slot)
        self.pause = max(PAUSE_SECONDS, (time.monotonic() - started) / COUNTING_SHARE)

    def close(self) -> None:
        """From now on no process of the slot can start another."""
        if self.timer is not None:
            self.timer.cancel()
        self.loop.remove_reader(self.listener)
        os.close(self.listener)
        self.listener = -1
