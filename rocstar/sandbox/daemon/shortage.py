"""Shortages of disk, memory or processes on this machine, or in its container, while a program ran. If the program
failed, it might have ended otherwise, so its failure is no evidence about it. Not here: the program's own limits
(`walls`, `watch`)."""

from __future__ import annotations

import os
from contextlib import suppress

from rocstar.sandbox import container
from rocstar.sandbox.call import ProgramOutcome, Response
from rocstar.sandbox.walls.folders import FILE_BYTES

FAILED = (ProgramOutcome.EXCEPTION, ProgramOutcome.EXIT_NONZERO)


class Shortages:
    """How often the kernel has killed a process because memory ran out, and refused one. `look` must be called
    regularly."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        self.counts = container.kills(), container.refused_processes()

    def blamed(self, response: Response, before: tuple[int, int], disk: str, *, lost: bool) -> str:
        """A sentence on the resource that ran out and may have made this program fail; empty if none did. before:
        `counts` when it began. disk: the folder on the machine's disk that the program could write to, or empty. lost:
        whether the kernel may have killed a process of this call; a program that kills itself while another one exceeds
        its limit has lost none."""
        is_killed = response.signal == "SIGKILL" and not response.kill_reason  # not by the sandbox
        if not is_killed and response.outcome not in FAILED:
            return ""
        if disk and not is_killed and is_full(disk):
            return f"the disk of {disk} is full; free it, or use isolation L3"
        self.look()
        has_killed, has_refused = (now > then for now, then in zip(self.counts, before, strict=True))
        if is_killed and lost and has_killed:
            return (
                "the kernel killed it because the machine or its container was out of memory, though the program kept "
                "its limit; give the container more memory, or run fewer slots"
            )
        if not is_killed and has_refused:
            return (
                "the container has as many processes and threads as it may have; raise its limit (pids.max: Docker's "
                "--pids-limit, Kubernetes' podPidsLimit), or run fewer slots"
            )
        return ""


def is_full(folder: str) -> bool:
    """Whether the folder's disk has less room than one program may write to a file."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        no_room = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < FILE_BYTES  # some file systems report 0 blocks
        return no_room or (disk.f_files > 0 and not disk.f_favail)
    return False
