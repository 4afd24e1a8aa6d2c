"""Starting our processes: fresh interpreters with a clean environment, each joined to its parent by one socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKDIRS = "rocstar-sandbox-"  # how folders of working directories begin; dead hosts' are found by it
ROOT = str(Path(__file__).resolve().parents[2])
# They must run this very package, wherever it lies, without our folder staying ahead of the standard library.
BOOT = "import sys; sys.path.insert(0, {root!r}); import rocstar.sandbox; del sys.path[0]; \
from rocstar.sandbox.{module} import main; main()"
# PYTHONHASHSEED: sets of strings keep their order from run to run, so that a rollout can be repeated.
ENVIRONMENT = {
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
    return start("host_main", {**settings, "parent": os.getpid()}, socket.SOCK_STREAM)


def start_nursery(settings: Mapping[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Same; this connection keeps the borders of messages."""
    return start("nursery", settings, socket.SOCK_SEQPACKET)


def start(module: str, settings: Mapping[str, Any], kind: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    code = BOOT.format(root=ROOT, module=module)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-c", code, json.dumps({**settings, "fd": theirs.fileno()})],
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return ours, process
