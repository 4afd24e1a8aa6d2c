"""The files that a slot can reach: with namespaces a file system of its own, which has the interpreter and system
libraries read-only, and one small tmpfs to work in, which the keeper replaces by a fresh one between calls; without
them the rules of Landlock, which a process sets for itself.

Nothing in that file system carries state from one call to the next: the tmpfs restarts its inode numbers and ignores
access times, and files shared with the machine (libraries, devices) are mounted read-only, so that no mode, owner or
time can be set there. Not here: working folders of slots without namespaces (`folders`).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rocstar.sandbox.walls import linux
from rocstar.sandbox.walls.folders import ROOT, package_folders

STAGE = "/tmp"  # any folder that always exists: the new root is mounted on it and then moved away
OLD = "/.old"
WORKDIR, OTHER_WORKDIR = "/tmp", "/mnt"
"""Working directory of programs; the second if the interpreter is installed below the first. Otherwise the second is a
link to the first, because programs written for other services use it."""
SHARED_MEMORY = "/dev/shm"
"""A link to the working directory: POSIX semaphores are made there."""
WORKDIR_FLAGS = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOATIME
WORKDIR_OPTIONS = "size=64m,nr_inodes=2048,mode=1777"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEVICES = ("null", "zero", "full", "random", "urandom")
COPIED = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime")
READ_ONLY = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV

# Of Landlock.
GET_VERSION = 1  # flag: return the ABI version instead of making a ruleset
PATH_BENEATH = 1  # kind of rule
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
ABI1_ACCESS = (1 << 13) - 1
ACCESS_OF_ABI = {1: ABI1_ACCESS, 2: ABI1_ACCESS | 1 << 13, 3: ABI1_ACCESS | 1 << 13 | 1 << 14}
IOCTL_DEVICE = 1 << 15  # since ABI 5
TCP = 3  # bind and connect, since ABI 4
SCOPES = 3  # abstract sockets and signals, since ABI 6
LIBRARY_CACHES = ("/etc/ld.so.cache", "/etc/localtime")


def sources() -> list[str]:
    """Folders that a program may read, none inside another."""
    expected = {*SYSTEM, *package_folders()}
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix):
        expected |= {prefix, os.path.realpath(prefix)}
    kept: list[str] = []
    for path in sorted(expected):
        if path != "/" and os.path.lexists(path) and not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def readable_by_all() -> bool:
    """Whether a user without special rights can reach the interpreter and its libraries: they and the folders above
    them, as written and with symbolic links resolved."""
    paths = {Path(path) for source in sources() for path in (source, os.path.realpath(source))}
    return all(folder.stat().st_mode & stat.S_IXOTH for path in paths for folder in (path, *path.parents[:-1]))


def workdir() -> str:
    """The working directory of programs; to be called while the old root is mounted."""
    return OTHER_WORKDIR if any(path.startswith(f"{WORKDIR}/") for path in sources()) else WORKDIR


def build(workdir: str) -> None:
    """Make the new root and move into it; the old one is gone afterwards. Needs our own mount namespace.

    Raises OSError."""
    readable = {path: os.path.realpath(path) for path in sources()}
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=8m,mode=755")
    os.mkdir(STAGE + OLD)
    os.chdir(STAGE)
    linux.pivot_root(".", OLD[1:])
    os.chdir("/")
    for path, place in readable.items():
        show(path, place)
    make_devices()
    make_etc(workdir)
    for name in {SHARED_MEMORY, OTHER_WORKDIR} - {workdir}:
        os.symlink(workdir, name)
    os.mkdir(workdir)
    if os.path.isdir(package := f"{ROOT}/rocstar"):  # hides our source code if it is installed among the libraries
        linux.mount("tmpfs", package, "tmpfs", READ_ONLY, "size=4k,mode=755")
    mount_workdir(workdir)
    linux.unmount(OLD)
    os.rmdir(OLD)
    linux.change_mount("/", READ_ONLY)


def show(path: str, place: str) -> None:
    """Mount a path of the old root at the same path of the new one, read-only. place: the path without links, which
    lead elsewhere below OLD."""
    old = OLD + path
    if os.path.islink(old):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(old), path)
        return
    os.makedirs(path, exist_ok=True)
    linux.mount(OLD + place, path, flags=linux.MS_BIND | linux.MS_REC)
    linux.change_mount(path, READ_ONLY, below=True)


def mount_workdir(workdir: str) -> None:
    linux.mount("tmpfs", workdir, "tmpfs", WORKDIR_FLAGS, WORKDIR_OPTIONS)


def renew_workdir(workdir: str) -> None:
    """Replace the working directory, together with anything that a program made in it. Raises OSError."""
    linux.unmount(workdir)
    mount_workdir(workdir)


def make_devices() -> None:
    """Mount the harmless devices of the machine; as `zero` the one that reads like it and cannot be mapped as shared
    memory, which only a control group counts. A read-only mount allows writing to a device, but not setting its
    mode, owner and times."""
    os.mkdir("/dev")
    for name in DEVICES:
        path = f"/dev/{name}"
        with suppress(OSError):  # a missing device is the operator's choice; urandom also has a system call
            Path(path).touch()
            linux.mount(f"{OLD}{path.replace('zero', 'full')}", path, flags=linux.MS_BIND)
            linux.change_mount(path, linux.MS_RDONLY | linux.MS_NOSUID)


def make_etc(home: str) -> None:
    os.mkdir("/etc")
    Path("/etc/passwd").write_text(f"sandbox:x:{os.geteuid()}:{os.getegid()}::{home}:/bin/false\n")
    for path in COPIED:
        with suppress(OSError):  # optional: libraries have default folders
            Path(path).write_bytes(Path(OLD + path).read_bytes())


def confine_files(readable: Sequence[str], workdir: str, *, network: bool = False) -> bool:
    """By Landlock, allow this process and all it starts to read and execute below `readable`, all access below
    `workdir`, nothing elsewhere; no TCP (ABI 4), unless it has its own `network`. Returns True if it cannot signal
    others either (ABI 6). Raises OSError if the kernel has no Landlock."""
    version = ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint(GET_VERSION)
    abi = linux.syscall(linux.LANDLOCK_CREATE_RULESET, *version, what="landlock")
    access = ACCESS_OF_ABI[min(abi, 3)] | (IOCTL_DEVICE if abi >= 5 else 0)
    ruleset = make_ruleset(access, TCP if abi >= 4 and not network else 0, SCOPES if abi >= 6 else 0)
    for path in readable:
        permit(ruleset, path, READ_FILE | EXECUTE | (READ_FOLDER if os.path.isdir(path) else 0))
    for path in LIBRARY_CACHES:
        permit(ruleset, path, READ_FILE)
    for name in DEVICES:
        permit(ruleset, f"/dev/{name}", READ_FILE if name == "zero" else READ_FILE | WRITE_FILE)
    permit(ruleset, workdir, access)
    restrict(ruleset)
    return abi >= 6


def scope_signals() -> None:
    """From now on, signals reach only what this process starts."""
    restrict(make_ruleset(0, 0, SCOPES))


def restrict(ruleset: int) -> None:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
    linux.syscall(linux.LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0), what="landlock_restrict_self")
    os.close(ruleset)


def make_ruleset(files: int, network: int, scopes: int) -> int:
    """A ruleset's descriptor. Fields that the kernel does not know are zero, which it accepts."""
    attributes = (ctypes.c_uint64 * 3)(files, network, scopes)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    return linux.syscall(linux.LANDLOCK_CREATE_RULESET, attributes, size, ctypes.c_uint(0), what="landlock ruleset")


def permit(ruleset: int, path: str, access: int) -> None:
    """A path that does not exist needs no rule."""
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = ctypes.c_char_p(struct.pack("=Qi", access, parent))  # the kernel's landlock_path_beneath_attr
    arguments = ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint(0)
    linux.syscall(linux.LANDLOCK_ADD_RULE, *arguments, what=f"landlock rule for {path}")
    os.close(parent)
