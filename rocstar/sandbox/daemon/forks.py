"""The limit of processes where programs run as a user who has other processes too, whom RLIMIT_NPROC would count with
them, and no control group counts: before a process of the slot starts another process or a thread, the kernel asks here
(`walls.seccomp.ask_before_forks`). So a program that forks without end never has more than its call may have.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from rocstar.sandbox.daemon import watch

QUESTION, ANSWER = struct.Struct("=QI68x"), struct.Struct("=QqiI")
"""The kernel's seccomp_notif (its number, and the process that asks) and seccomp_notif_resp."""
RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
CONTINUE = 1
COUNTING_SHARE = 0.1  # of the daemon's time that one slot may take by being counted


class Forks:
    """Answers the questions of one slot until `close`."""

    def __init__(self, listener: int, slot: int, exceeded: Callable[[], None]) -> None:
        """slot: its process id. exceeded: called when a call is refused another process."""
        self.listener, self.slot, self.exceeded = listener, slot, exceeded
        self.most = 1
        """Processes and threads of the call."""
        self.left = 0
        """How many may be started before they are counted again."""
        self.loop = asyncio.get_running_loop()
        self.waiting = select.poll()
        self.waiting.register(listener, select.POLLIN)
        self.listen()

    def listen(self) -> None:
        if self.listener >= 0:
            self.loop.add_reader(self.listener, self.on_asked)

    def on_asked(self) -> None:
        if not self.waiting.poll(0)[0][1] & select.POLLIN:  # all processes have ended
            return
        question = bytearray(QUESTION.size)
        with suppress(OSError):  # the process that asked has been killed
            fcntl.ioctl(self.listener, RECEIVE, question)
            number, asking = QUESTION.unpack(question)
            may = self.may_start(asking)
            answer = (0, CONTINUE) if may else (-errno.EAGAIN, 0)
            fcntl.ioctl(self.listener, SEND, ANSWER.pack(number, 0, *answer))
            if not may:
                self.exceeded()

    def may_start(self, asking: int) -> bool:
        if asking == self.slot:  # the first process of a call
            self.left = self.most
        elif self.left < 1:
            self.count()
        self.left -= 1
        return self.left >= 0

    def count(self) -> None:
        """Count the processes, and answer no question for a while, so that no program can occupy the daemon by this."""
        started = time.monotonic()
        self.left = self.most - watch.tasks(self.slot)
        self.loop.remove_reader(self.listener)
        self.loop.call_later((time.monotonic() - started) / COUNTING_SHARE, self.listen)

    def close(self) -> None:
        """From now on no process of the slot can start another."""
        self.loop.remove_reader(self.listener)
        os.close(self.listener)
        self.listener = -1
