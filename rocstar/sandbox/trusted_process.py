"""One worker process of the trusted lane, seen from the parent: lines in, lines out, its memory, its end.

Knows nothing of calls, deadlines or retries; `trusted.py` does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocstar.sandbox.outbox import Outbox

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 262144
_BOOT = """import sys, json
config = json.loads(sys.argv[2])
sys.path[:] = config["path"]
from rocstar.sandbox.trusted_worker import main
main(int(sys.argv[1]), config)"""
# A fixed hash seed lets the order of sets repeat; one thread per worker, since the pool is the parallelism.
_FIXED = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerProcess:
    """A running child and the not blocking socket to it. Used by one thread."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start a child that imports from where this process does. Raises OSError when it cannot be started."""
        config = {**settings, "path": [entry or os.getcwd() for entry in sys.path]}
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._outbox = Outbox(self.socket)
        self._partial = b""
        with theirs:
            try:
                # Its own session keeps a Ctrl-C in the terminal away from it: the parent ends it in an orderly way.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-s", "-c", _BOOT, str(theirs.fileno()), json.dumps(config)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | _FIXED,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> bool:
        """Write what the socket takes and keep the rest; call again with b"" when it is writable. True: all is out.
        Where the child is gone the bytes are dropped: `receive` tells."""
        return self._outbox.push(data)

    def receive(self) -> list[bytes] | None:
        """Whole lines that have arrived; None when the child is gone."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines

    def resident_bytes(self) -> int:
        """Resident memory now; 0 where the system does not tell (no /proc) or the child is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def kill(self) -> None:
        """End the child and reap it."""
        self._process.kill()
        self._process.wait()
        self.socket.close()
