"""The daemon. Here: how it and its zygotes are started, as fresh interpreters with a clean environment and umask, each
joined to its parent by a socket.

Settings go on the command line, where every user of the machine can read them: no secret may be among them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from rocstar.sandbox.call import DaemonSettings
from rocstar.sandbox.walls.folders import ROOT, package_folders

WORKDIRS = "rocstar-sandbox-"
"""Prefix of folders of working directories; the folders of dead daemons are found by it."""
# The new process must import this same package, without its folder staying ahead of the standard library on sys.path,
# and find a user's own packages and those of PYTHONPATH, which a clean environment does not name.
BOOT = (
    "import sys; sys.path.insert(0, {root!r}); import rocstar.sandbox; del sys.path[0]; sys.path += {packages!r}; "
    "from {module} import main; main()"
)
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets of strings keep their order from run to run, so that a rollout can be repeated
    "LD_BIND_NOW": "1",  # functions are looked up once at the start, not again in each fork: 0.05 ms a call
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def start_daemon(settings: DaemonSettings, workdirs: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a daemon whose slots work below the folder `workdirs`, which it makes; it ends when the socket is closed
    or this process ends. Returns our non-blocking end of the connection, and the process. Raises OSError."""
    values = {**msgspec.to_builtins(settings), "workdirs": workdirs, "parent": os.getpid()}
    return start("rocstar.sandbox.daemon.main", values, socket.SOCK_STREAM)


def start(module: str, settings: Mapping[str, Any], kind: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run `module.main` in a new interpreter. Its first argument is JSON: `settings`, and `fd`, its end of a socket of
    this kind. Returns our end, non-blocking, and the process. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    code = BOOT.format(root=ROOT, module=module, packages=package_folders())
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-c", code, json.dumps({**settings, "fd": theirs.fileno()})],
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                umask=0o022,  # programs run as another user: they could not enter folders made with a stricter one
                start_new_session=True,  # Ctrl-C in our terminal is for us: we end it then
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return ours, process
