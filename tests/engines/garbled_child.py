"""A child that sends what is no frame."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    connection = socket.socket(fileno=int(arguments[0]))
    connection.sendall(b"\x00\x00\x00\x03abc")
    time.sleep(600)
