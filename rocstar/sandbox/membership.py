"""How a slot enters its group (`groups`), and how it stays alive where the group's memory runs out.

Not here: making groups and their limits, which is the host's."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

FIRST_TO_KILL = 1000  # oom_score_adj, the highest there is


@dataclass(frozen=True, slots=True)
class Shield:
    """Where memory runs out, the kernel kills programs before their slot: what they inherit at the fork tells it so."""

    fd: int = -1
    """Of this process's oom_score_adj, opened while /proc can still be written; -1 without."""
    ordinary: int = 0
    """What stands there for the slot."""

    @classmethod
    def open(cls) -> Shield:
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
            return cls(fd, int(os.pread(fd, 16, 0)))
        except OSError:
            return cls()

    def lower(self) -> None:
        self._write(FIRST_TO_KILL)

    def lift(self) -> None:
        self._write(self.ordinary)

    def _write(self, score: int) -> None:
        if self.fd >= 0:
            with suppress(OSError):  # nothing is lost but the order
                os.pwrite(self.fd, b"%d" % score, 0)


@dataclass(frozen=True, slots=True)
class Membership:
    """The groups a slot shall be in with all its programs."""

    files: tuple[int, ...] = ()
    """Descriptors to write to. Only the slot itself must be in, not its guardian, which the kernel could kill."""
    controllers: tuple[str, ...] = ()

    def join(self) -> tuple[str, ...]:
        """What is counted from now on; nothing where that was not permitted."""
        joined = self.controllers
        for file in self.files:
            try:
                os.write(file, b"0")
            except OSError:
                joined = ()
            os.close(file)
        return joined
