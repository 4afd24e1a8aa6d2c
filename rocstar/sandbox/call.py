"""One run of one program, as the slot in Python keeps count of it."""

from __future__ import annotations

import resource
import time

from rocstar.sandbox.slotwire import Ended

QUIET_SECONDS = 0.01  # short programs end within it, and their output waits in the pipe: one wake-up instead of many
AGE_SECONDS = 0.1  # a program that runs longer makes way for those that may be short


class Call:
    """Its deadline, its cap, what is known of its end."""

    def __init__(self, pid: int, wall_seconds: float, output_bytes: int) -> None:
        self.pid = pid
        self.started = time.monotonic()
        self.deadline = self.started + wall_seconds
        self.quiet_until = self.started + QUIET_SECONDS
        self.age_at = self.started + AGE_SECONDS
        self.listening = self.aged = False
        self.output_left = output_bytes
        self.ended = Ended.ITSELF
        self.run_seconds = 0.0
        self.cpu_seconds = 0.0
        self.peak_memory = 0

    def seconds_to_wake(self) -> float:
        wake = self.deadline if self.listening else min(self.deadline, self.quiet_until)
        return max(0.0, (wake if self.aged else min(wake, self.age_at)) - time.monotonic())

    def add_usage(self, usage: resource.struct_rusage) -> None:
        self.cpu_seconds += usage.ru_utime + usage.ru_stime
        self.peak_memory = max(self.peak_memory, usage.ru_maxrss * 1024)
