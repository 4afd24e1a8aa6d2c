"""Walls around an agent's program: `main` CHANNEL PORT HOME PATH... -- COMMAND...

Covered, and set up as a whole or not at all: a network that contains only the gateway, whose socket is made in it and
sent to the run through CHANNEL; files only below HOME, the PATHs and files that the command names, the interpreter and
the system's libraries; no access to processes or local sockets of others, and no change to their files; only system
calls that programs are known to need; all processes that the command starts end with it, and with the run.
Not covered: use of CPU, memory, disk and processes; whether a path exists, and its `stat`; kernel exploits. Source:
ours."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from rocstar.sandbox.walls import folders, linux, plans, rootfs

SET_FLAGS, UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
NAMESPACES = linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWNS
SETTINGS = ("/etc/hosts", "/etc/gitconfig", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf")
"""The definition of `localhost`, and files that Git and Node must be able to read if they exist, or they fail."""


def command(words: Sequence[str], channel: int, port: int, home: str, readable: Sequence[str]) -> tuple[str, ...]:
    """A command line that runs the command `words` behind the walls. It may also read the paths named by `words` and
    PYTHONPATH, its program as found in PATH, and the certificates that clients load even without TLS."""
    boot = f"import sys; sys.path.insert(0, {folders.ROOT!r}); from {__name__} import main; main()"
    certificates = filter(None, ssl.get_default_verify_paths())
    program = shutil.which(words[0]) or ""
    named = (*os.environ.get("PYTHONPATH", "").split(os.pathsep), *certificates, *SETTINGS, program, *words)
    paths = map(os.path.abspath, (*readable, *filter(os.path.exists, named)))
    return (sys.executable, "-P", "-s", "-c", boot, str(channel), str(port), home, *paths, "--", *words)


def why_not() -> str:
    """Why walls can't be built on this machine; empty if they can."""
    ours, theirs = socket.socketpair()
    with ours, theirs, TemporaryDirectory() as home:
        words = command(("true",), theirs.fileno(), 1, home, ())
        trial = subprocess.run(words, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    reason = trial.stderr.strip().rpartition("\n")[2] or f"true ended with {trial.returncode} behind them"
    return reason if trial.returncode else ""


def enter(channel: int, port: int, home: str, readable: Sequence[str]) -> None:
    """Returns in a new process behind the walls. Raises OSError if they can't be built."""
    user, group = os.geteuid(), os.getegid()
    try:
        linux.unshare(NAMESPACES)
    except PermissionError:  # an ordinary user, or root in a container, without CAP_SYS_ADMIN
        linux.unshare(NAMESPACES | linux.CLONE_NEWUSER)
        linux.map_user(user, user, group)
    linux.die_with_parent(signal.SIGKILL)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # when memory runs out the kernel kills it, and not the run
    keep_files(home)
    with socket.socket() as gateway, socket.socket(fileno=channel) as run:
        fcntl.ioctl(gateway, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))
        gateway.bind(("127.0.0.1", port))
        gateway.listen(socket.SOMAXCONN)
        follow_child()
        follow_child()  # called by the namespace's first process, which reaps orphans and ends last
        linux.drop_bounding_set()
        rootfs.confine_files((*rootfs.sources(), *readable), home, network=True)
        if failed := plans.confine(private_files=False, own_files=False, slot=None, network=True):
            raise OSError(", ".join(failed))
        socket.send_fds(run, [b"."], [gateway.fileno()])


def keep_files(home: str) -> None:
    """In our own mount namespace: make everything outside `home` read-only, modes and times included, and hide all
    processes; Landlock covers neither. Shared memory lies in `home` too."""
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    for place in (home, rootfs.SHARED_MEMORY):
        linux.mount(home, place, flags=linux.MS_BIND)
    linux.change_mount("/", linux.MS_RDONLY | linux.MS_NOSUID, below=True)
    for place in (home, rootfs.SHARED_MEMORY):
        linux.change_mount(place, linux.MS_NOSUID | linux.MS_NODEV, without=linux.MS_RDONLY)
    linux.mount("tmpfs", "/proc", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY, "size=4k,mode=755")


def follow_child() -> None:
    """Returns in a child that ends with this process. This process waits for the child, and so for all processes in
    the child's namespace, and exits with its code; SIGTERM kills the child."""
    if not (child := os.fork()):
        linux.die_with_parent(signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    while (ended := os.wait())[0] != child:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)  # as shells encode a signal


def main() -> None:
    channel, port, home, *rest = sys.argv[1:]
    cut = rest.index("--")
    try:
        enter(int(channel), int(port), home, rest[:cut])
        os.execvp(rest[cut + 1], rest[cut + 1 :])
    except OSError as error:
        sys.exit(f"it can't be started behind walls: {error}")
