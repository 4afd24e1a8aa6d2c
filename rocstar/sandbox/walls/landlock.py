"""Landlock: file access rules that a process sets for itself, for slots without namespaces of their own."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from rocstar.sandbox.walls import linux, rootfs

GET_VERSION = 1  # flag: return the ABI version instead of making a ruleset
PATH_BENEATH = 1  # kind of rule
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
ABI1_ACCESS = (1 << 13) - 1
ACCESS_OF_ABI = {1: ABI1_ACCESS, 2: ABI1_ACCESS | 1 << 13, 3: ABI1_ACCESS | 1 << 13 | 1 << 14}
IOCTL_DEVICE = 1 << 15  # since ABI 5
TCP = 3  # bind and connect, since ABI 4
SCOPES = 3  # abstract sockets and signals, since ABI 6
LIBRARY_CACHES = ("/etc/ld.so.cache", "/etc/localtime")


def confine(readable: Sequence[str], workdir: str, *, network: bool = False) -> bool:
    """Allow this process and all it starts to read and execute below `readable`, all access below `workdir`, nothing
    elsewhere; no TCP (ABI 4), unless it has its own `network`. Returns True if it cannot signal others either (ABI 6).
    Raises OSError if the kernel has no Landlock."""
    abi = version()
    access = ACCESS_OF_ABI[min(abi, 3)] | (IOCTL_DEVICE if abi >= 5 else 0)
    ruleset = create(access, TCP if abi >= 4 and not network else 0, SCOPES if abi >= 6 else 0)
    for path in readable:
        allow(ruleset, path, READ_FILE | EXECUTE | (READ_FOLDER if os.path.isdir(path) else 0))
    for path in LIBRARY_CACHES:
        allow(ruleset, path, READ_FILE)
    for name in rootfs.DEVICES:
        allow(ruleset, f"/dev/{name}", READ_FILE | WRITE_FILE)
    allow(ruleset, workdir, access)
    restrict(ruleset)
    return abi >= 6


def scope_signals() -> None:
    """From now on, signals reach only what this process starts."""
    restrict(create(0, 0, SCOPES))


def restrict(ruleset: int) -> None:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
    linux.syscall(linux.LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0), what="landlock_restrict_self")
    os.close(ruleset)


def version() -> int:
    """Version of the kernel's Landlock ABI. Raises OSError if there is none."""
    null = ctypes.c_void_p(None)
    size, flag = ctypes.c_size_t(0), ctypes.c_uint(GET_VERSION)
    return linux.syscall(linux.LANDLOCK_CREATE_RULESET, null, size, flag, what="landlock")


def create(files: int, network: int, scopes: int) -> int:
    """A ruleset's descriptor. Fields that the kernel does not know are zero, which it accepts."""
    attributes = (ctypes.c_uint64 * 3)(files, network, scopes)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    return linux.syscall(linux.LANDLOCK_CREATE_RULESET, attributes, size, ctypes.c_uint(0), what="landlock ruleset")


def allow(ruleset: int, path: str, access: int) -> None:
    """A path that does not exist needs no rule."""
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = ctypes.c_char_p(struct.pack("=Qi", access, parent))  # the kernel's landlock_path_beneath_attr
    arguments = ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint(0)
    linux.syscall(linux.LANDLOCK_ADD_RULE, *arguments, what=f"landlock rule for {path}")
    os.close(parent)
