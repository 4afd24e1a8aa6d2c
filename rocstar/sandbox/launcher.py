"""Starting a host process: a fresh interpreter with a clean environment, joined to us by one socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
# The host must run this very package, wherever it lies, without our folder staying ahead of the standard library.
BOOT = "import sys; sys.path.insert(0, {root!r}); import rocstar.sandbox; del sys.path[0]; \
from rocstar.sandbox.host_main import main; main()"
# PYTHONHASHSEED: sets of strings keep their order from run to run, so that a rollout can be repeated.
HOST_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "LD_BIND_NOW": "1",  # functions are looked up once at the start, not again in each fork: 0.05 ms a call
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def start_host(settings: Mapping[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Our end of the connection, not blocking, and the process. Raises OSError."""
    ours, theirs = socket.socketpair()
    config = {**settings, "fd": theirs.fileno(), "parent": os.getpid()}
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-c", BOOT.format(root=ROOT), json.dumps(config)],
                pass_fds=[theirs.fileno()],
                env=HOST_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return ours, process
