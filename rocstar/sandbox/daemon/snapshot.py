"""A copy of a waiting notebook (`_fork.pause`), from which branches continue in their own slots.

    memory   a sealed file: the pages that the notebook has written, then the steps that turn a process of the same
             zygote into it (`_fork.restore`). All branches map it copy on write; the last branch to end frees it.
    files    a sealed file: the working directory, packed by the notebook itself

The facts come from the kernel (`/proc`). A hostile notebook can only spoil its own copies, which run in the branches,
behind their own walls. Nothing is copied through which two processes could communicate.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from typing import NamedTuple, Self

from rocstar.sandbox.call import ForkRefused
from rocstar.sandbox.slot.channel import CONTROL

PAGE = os.sysconf("SC_PAGE_SIZE")
LOWEST = 2**16  # lowest mapped address
STEP = struct.Struct("=6Q")
"""`struct step` of `_fork.c`."""
UNMAP, ZERO, DATA, COPY, HEAP, FILED = range(6)
"""Kinds of steps, as in `_fork.c`."""
MAX_STEPS_BYTES = 2**20  # `STEPS_BYTES` of `_fork.c`
CHUNK_BYTES = 2**18  # stays in the processor's cache between reading and writing
KERNEL, STACK, DELETED = ("[vdso]", "[vvar]", "[vvar_vclock]"), "[stack]", " (deleted)"
WRITTEN = bytes(top & 0xC0 != 0 and top & 0x20 == 0 for top in range(256))
"""By the top byte of a page's entry in `pagemap`: whether the page is present or swapped out, and not a file's page."""
PIECES = re.compile(rb"\x01(?:\x00{0,16}\x01)*")
"""Written pages, with small gaps: each piece becomes a mapping."""
SEAL_TRIES = 12  # two seconds; while the notebook can write to the file, each fails at once
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Lineage(NamedTuple):
    """The facts that two processes must share for one to become the other's copy."""

    zygote: int
    arena: int
    arena_bytes: int


class Mapping(NamedTuple):
    """A line of `maps`."""

    line: str
    start: int
    end: int
    flags: str
    offset: int
    is_file: bool
    path: str

    @property
    def protection(self) -> int:
        return sum(bit for bit, flag in ((1, "r"), (2, "w"), (4, "x")) if flag in self.flags)


class Snapshot:
    """Empty until `take`; must be closed."""

    def __init__(self, notebook: int, origin: Lineage) -> None:
        """notebook: process id. Raises OSError."""
        self.handle = os.open(f"/proc/{notebook}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.process = f"/proc/self/fd/{self.handle}"
        """The folder of this process in /proc, even if another process gets its id."""
        self.origin = origin
        self.memory, self.files = new_file("rocstar-branch"), new_file("rocstar-files")
        self.size = 0
        """Bytes of the pages copied so far; the steps follow them."""
        self.steps: list[tuple[int, int, int, int, int, int]] = []
        self.paths = b""
        self.folder, self.umask = "/", 0o022

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (self.handle, self.memory, self.files):
            os.close(fd)

    def take(self, most: int) -> None:
        """Copy the waiting notebook, at most `most` bytes. Raises ForkRefused; OSError if it or the zygote has died."""
        with open(f"{self.process}/status", errors="replace", newline="\n") as file:
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
        if (threads := int(status["Threads"])) > 1:
            raise ForkRefused(f"the notebook runs {threads} threads and a fork would keep one; end the others first")
        self.folder, self.umask = os.readlink(f"{self.process}/cwd"), int(status["Umask"], 8)
        for number in sorted(map(int, os.listdir(f"{self.process}/fd"))):
            link = f"{self.process}/fd/{number}"
            if number > CONTROL or stat.S_ISREG(os.stat(link).st_mode):
                path = os.readlink(link)
                raise ForkRefused(f"descriptor {number} ({path:.100}) is open, and a fork would not have it; close it")
        known = {mapping.line for mapping in mappings(f"/proc/{self.origin.zygote}/maps")}
        if not known:  # a zombie: the mappings that it shares with the notebook would be taken for the cell's own
            raise ProcessLookupError(f"zygote {self.origin.zygote} has died")
        with open(f"{self.process}/pagemap", "rb", 0) as pages, open(f"{self.process}/mem", "rb", 0) as memory:
            (heap,) = struct.unpack("=Q", os.pread(memory.fileno(), 8, self.origin.arena))
            self.add(HEAP, heap, heap)
            theirs = [each for each in mappings(f"{self.process}/maps") if each.path != "[vsyscall]"]
            self.clear([(each.start, each.end) for each in theirs])
            first, last = self.arena()
            for mapping in theirs:
                if mapping.path not in KERNEL and not (mapping.start < last and first < mapping.end):
                    self.copy(mapping, mapping.line in known, pages.fileno(), memory.fileno(), most)
        self.end()

    def arena(self) -> tuple[int, int]:
        """Start and end of `_fork.c`'s arena, with its guard pages."""
        return self.origin.arena - PAGE, self.origin.arena + self.origin.arena_bytes + PAGE

    def clear(self, taken: list[tuple[int, int]]) -> None:
        """Unmap everything between these ranges."""
        last = LOWEST
        for start, end in sorted([*taken, self.arena()]):
            if start > last:
                self.add(UNMAP, last, start)
            last = max(last, end)

    def copy(self, mapping: Mapping, is_known: bool, pages: int, memory: int, most: int) -> None:
        """is_known: the zygote has the same mapping. pages, memory: descriptors of `pagemap` and `mem`. most: bytes."""
        _, start, end, flags, offset, is_file, path = mapping
        if flags.endswith("s"):
            if is_known:  # a table of the operating system
                return
            raise ForkRefused(f"the notebook shares memory or a file ({path:.100}) by a mapping; close that first")
        tops = os.pread(pages, 8 * (end - start) // PAGE, 8 * start // PAGE)[7::8].translate(WRITTEN)
        pieces = [(start + each.start() * PAGE, start + each.end() * PAGE) for each in PIECES.finditer(tops)]
        if is_file and not pieces and not path.endswith(DELETED):
            if not is_known or "w" in flags:
                self.add(FILED, start, end, mapping.protection, offset, len(self.paths))
                self.paths += os.fsencode(path) + b"\0"
            return
        if is_file:  # the other pages are the file's
            pieces = [(start, end)]
        elif path != STACK:
            self.add(ZERO, start, end, mapping.protection)
        for first, last in pieces:
            self.add(COPY if path == STACK else DATA, first, last, mapping.protection, self.size)
            self.keep(memory, first, last, most)

    def keep(self, memory: int, start: int, end: int, most: int) -> None:
        """Copy the pages from `start` to `end`."""
        if self.size + end - start > most:
            raise ForkRefused(f"the notebook takes more than the {most} bytes that are copied; make it smaller")
        while start < end:
            try:
                data = os.pread(memory, min(CHUNK_BYTES, end - start), start)
            except OSError:
                data = b""
            if not data and not mappings(f"{self.process}/maps"):
                raise ProcessLookupError("the notebook has died")
            if not data:
                raise ForkRefused("a part of the notebook's memory cannot be read; is it that of a file made shorter?")
            self.size += os.pwrite(self.memory, data, self.size)
            start += len(data)

    def add(self, kind: int, start: int, end: int, protection: int = 0, offset: int = 0, path: int = 0) -> None:
        self.steps.append((kind, start, end - start, protection, offset, path))

    def end(self) -> None:
        """Write the steps and seal both files. Raises ForkRefused."""
        table = len(self.steps) * STEP.size
        if table + len(self.paths) >= MAX_STEPS_BYTES:
            raise ForkRefused(
                f"the notebook's memory is in {len(self.steps)} pieces, which are too many; open a new one"
            )
        packed = b"".join(STEP.pack(*step[:5], table + step[5]) for step in self.steps)
        os.pwrite(self.memory, packed + self.paths, self.size)
        for fd in (self.memory, self.files):
            seal(fd)


def seal(fd: int) -> None:
    """Raises ForkRefused. At each try the kernel waits a sixth of a second for other users of the file's pages; its own
    bookkeeping uses them for a moment, which is longer on a busy machine."""
    for tries_left in reversed(range(SEAL_TRIES)):
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or not tries_left:
                raise ForkRefused(f"the notebook still writes to the copy of its files ({error})") from None


def mappings(path: str) -> list[Mapping]:
    with open(path, errors="surrogateescape", newline="\n") as file:
        return [mapping_of(line.rstrip("\n")) for line in file]


def mapping_of(line: str) -> Mapping:
    place, flags, offset, _, inode, *path = line.split(None, 5)
    start, end = (int(number, 16) for number in place.split("-"))
    return Mapping(line, start, end, flags, int(offset, 16), inode != "0", path[0] if path else "")


def new_file(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
