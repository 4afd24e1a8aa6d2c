"""Walls around an agent's program: `main` CHANNEL PORT HOME PATH... -- COMMAND...

Covered, and set up as a whole or not at all: a network that holds nothing but the gateway, whose socket is made in it
and sent to the run through CHANNEL; files only below HOME, what the command is told to read, the interpreter and the
system's libraries; no process, local socket or file's mode of others; the system calls that programs are known to
need; all that it starts ends with it. Not covered: how much CPU and memory it takes; kernel exploits. Source: ours."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from rocstar.sandbox.walls import landlock, linux, plans, rootfs

SET_FLAGS, UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP


def command(words: Sequence[str], channel: int, port: int, home: str, readable: Sequence[str]) -> tuple[str, ...]:
    """These words of a command behind the walls. It may read what they and PYTHONPATH name too, and the certificates
    that clients load even for an address without TLS."""
    boot = f"import sys; sys.path.insert(0, {rootfs.ROOT!r}); from {__name__} import main; main()"
    certificates = filter(None, ssl.get_default_verify_paths())
    named = (*os.environ.get("PYTHONPATH", "").split(os.pathsep), *certificates, *words)
    paths = map(os.path.abspath, (*readable, *filter(os.path.exists, named)))
    return (sys.executable, "-P", "-s", "-c", boot, str(channel), str(port), home, *paths, "--", *words)


def why_not() -> str:
    """Why there can be no walls on this machine; empty where there can."""
    ours, theirs = socket.socketpair()
    with ours, theirs, TemporaryDirectory() as home:
        words = command(("true",), theirs.fileno(), 1, home, ())
        said = subprocess.run(words, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    return said.stderr.strip().rpartition("\n")[2] if said.returncode else ""


def enter(channel: int, port: int, home: str, readable: Sequence[str]) -> None:
    """Returns in a process of its own behind the walls. Raises OSError where they can't be built."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | (linux.CLONE_NEWUSER if user else 0))
    if user:
        linux.map_user(user, user, group)
    with socket.socket() as gateway, socket.socket(fileno=channel) as run:
        fcntl.ioctl(gateway, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))
        gateway.bind(("127.0.0.1", port))
        gateway.listen(socket.SOMAXCONN)
        follow_child()  # in the first process of the namespace, which collects what others leave
        follow_child()
        linux.drop_bounding_set()
        landlock.confine((*rootfs.sources(), *readable), home, network=True)
        if failed := plans.confine(private_files=False, own_files=True, slot=None, network=True):
            raise OSError(", ".join(failed))
        socket.send_fds(run, [b"."], [gateway.fileno()])


def follow_child() -> None:
    """Go on in a child that ends with us; here, end as it does."""
    if not (child := os.fork()):
        linux.die_with_parent(signal.SIGKILL)
        return
    while (ended := os.wait())[0] != child:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)  # as shells tell a signal


def main() -> None:
    channel, port, home, *rest = sys.argv[1:]
    cut = rest.index("--")
    try:
        enter(int(channel), int(port), home, rest[:cut])
        os.execvp(rest[cut + 1], rest[cut + 1 :])
    except OSError as error:
        sys.exit(f"it can't be started behind walls: {error}")
