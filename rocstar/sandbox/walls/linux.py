"""The few Linux calls that Python's library lacks, through ctypes: one function per call, OSError on failure.

Not here: any decision which call to make.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOATIME = 1024
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

AT_FDCWD = -100
AT_RECURSIVE = 0x8000
LAST_CAPABILITY = 63  # the kernel answers EINVAL from the first one it does not know

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """The architecture, as `uname -m` names it."""
    return os.uname().machine


def checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def syscall(number: int, *arguments: object, what: str) -> int:
    return checked(libc().syscall(ctypes.c_long(number), *arguments), what)


def prctl(option: int, value: int = 0, third: int = 0, *, what: str) -> None:
    zero = ctypes.c_ulong(0)
    checked(libc().prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), zero, zero), what)


def unshare(flags: int) -> None:
    checked(libc().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = libc().mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    checked(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount and all mounts below it."""
    checked(libc().umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall(PIVOT_ROOT[machine()], new.encode(), old.encode(), what="pivot_root")


def change_mount(target: str, attributes: int, *, without: int = 0, below: bool = False) -> None:
    """Set attributes of a mount, of MS_RDONLY, MS_NOSUID and MS_NODEV, and clear those in `without`; below: of all
    mounts below it too. Since Linux 5.12. Raises OSError."""
    values = (ctypes.c_uint64 * 4)(attributes, without, 0, 0)
    where, flags = ctypes.c_int(AT_FDCWD), ctypes.c_uint(AT_RECURSIVE if below else 0)
    size = ctypes.c_size_t(ctypes.sizeof(values))
    syscall(MOUNT_SETATTR, where, target.encode(), flags, values, size, what="mount_setattr")


def drop_bounding_set() -> None:
    """Keep programs executed later from gaining a capability, set-uid or not."""
    for capability in range(LAST_CAPABILITY + 1):
        if libc().prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3) < 0:
            return  # past the last capability, or this process may not drop and so cannot pass any on


def drop_capabilities() -> None:
    """Give up all capabilities; exec can't gain privileges afterwards."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the parent ends. A later change of user clears this setting."""
    prctl(PR_SET_PDEATHSIG, signal_number, what="parent death signal")


def become_subreaper() -> None:
    """Have orphaned descendants of this process become its children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, what="child subreaper")


def map_user(inside: int, user: int, group: int) -> None:
    """In a new user namespace: map the outside `user` and `group` to the number `inside`. Raises OSError."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
