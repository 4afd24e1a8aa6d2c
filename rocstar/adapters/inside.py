"""The code that `inspect_ai.py` sends into the sandbox before each request. Standard library only: it runs in the
sandbox, without access to rocstar, and its reports are those of an untrusted process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import BinaryIO

INPUT = ".rocstar-input"  # bytes that come with a request, in the working directory; gone before anything else runs
OUTPUT = ".rocstar-output"  # bytes that go back with the answer; gone with the next request
DRAIN_SECONDS = 0.5  # for output of an ended command, while a process that it left behind holds the pipe
MISSING = 127  # a shell's exit code for a missing command


def run(
    command: list[str], cwd: str | None, variables: dict[str, str], timeout: float | None, keep: int
) -> tuple[int | None, bool]:
    """Run a command with INPUT as its standard input and pass its output on, at most `keep` bytes of each stream: exit
    code (None at the timeout, seconds), and whether output was dropped. Raises OSError where it can't be started."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # of the sandbox's interpreter: it is `python3`
    with open(INPUT, "rb") as stdin:
        clear(INPUT)
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env={**os.environ, "PATH": path, **variables},
            )
        except FileNotFoundError as error:
            os.write(2, f"{error}\n".encode())
            return MISSING, False
    dropped = [False]
    readers = [
        threading.Thread(target=pass_on, args=(stream, fd, keep, dropped), daemon=True)
        for fd, stream in ((1, process.stdout), (2, process.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None, dropped[0]  # all of its processes are killed with the request
    for reader in readers:
        reader.join(DRAIN_SECONDS)
    return (code if code >= 0 else 128 - code), dropped[0]


def pass_on(stream: BinaryIO, fd: int, keep: int, dropped: list[bool]) -> None:
    """Copy the first `keep` bytes and read the rest away."""
    while chunk := os.read(stream.fileno(), 65536):
        left = memoryview(chunk)[:keep]
        keep -= len(left)
        dropped[0] |= len(left) < len(chunk)
        while left:
            left = left[os.write(fd, left) :]


def write(path: str, *, append: bool) -> None:
    """Move INPUT, or its bytes to the end of, a file whose folders are made. Raises OSError."""
    with open(INPUT, "rb") as file:
        content = file.read()
    clear(INPUT)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "ab" if append else "wb") as file:
        file.write(content)


def read(path: str, start: int, count: int) -> int:
    """Copy `count` bytes of a file into OUTPUT; how many the file has. Raises OSError."""
    with open(path, "rb") as source, open(OUTPUT, "wb") as target:
        source.seek(start)
        target.write(source.read(count))
        return os.fstat(source.fileno()).st_size


def clear(*paths: str) -> None:
    for path in paths:
        if os.path.lexists(path):
            os.unlink(path)
