"""A child that sends what is no frame."""

from __future__ import annotations

import socket
import sys
import time

if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.sendall(b"\x00\x00\x00\x03abc")
    time.sleep(600)
