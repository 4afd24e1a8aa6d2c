"""What a slot in Python holds of a program's output, or of the files it sends back: bytes that can be wiped."""

from __future__ import annotations

import os


class Stream:
    """One output of the program: a pipe, and a buffer that is filled up to the call's cap."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.used = 0
        self.dropped = 0
        self.read_end = self.write_end = -1

    def open(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)

    def reserve(self, size: int) -> None:
        if len(self.buffer) < size:
            self.buffer = bytearray(size)

    def hold(self, data: bytes) -> None:
        """What comes from elsewhere than the pipe."""
        self.reserve(len(data))
        self.buffer[: len(data)] = data
        self.used = len(data)

    def wipe(self) -> None:
        if self.read_end >= 0:
            os.close(self.read_end)
        self.read_end = -1
        self.buffer[: self.used] = bytes(self.used)
        self.used = self.dropped = 0
