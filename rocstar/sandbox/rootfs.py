"""The file system a namespaced slot sees: the interpreter and system libraries read-only, one small tmpfs, nothing
else. Also emptying that tmpfs between calls, whatever was made of it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rocstar.sandbox import linux

STAGE = "/tmp"  # any folder that is always there; the new root is mounted on it and then moved away
OLD = "/.old"
WORKDIR = "/tmp"
WORKDIR_OPTIONS = "size=64m,nr_inodes=2048,mode=1777"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEVICES = ("null", "zero", "full", "random", "urandom")
COPIED = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime")
# statvfs flag: mount flag. A user namespace may not take any of these off a mount it inherited.
KEPT_FLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: linux.MS_NOATIME, 2048: linux.MS_NODIRATIME, 4096: linux.MS_RELATIME}
READ_ONLY = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV


def sources() -> list[str]:
    """Folders a program may read, parents before children and none inside another."""
    wanted = {*SYSTEM}
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix):
        wanted |= {prefix, os.path.realpath(prefix)}
    kept: list[str] = []
    for path in sorted(wanted):
        if path != "/" and os.path.lexists(path) and not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def readable_by_all() -> bool:
    """Whether a user without rights of its own can reach the interpreter and its libraries where they lie."""
    folders = [folder for path in sources() for folder in (Path(path), *Path(path).resolve().parents)]
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


def build() -> None:
    """Make the new root and move into it; the old one is gone afterwards. Needs a mount namespace of our own."""
    shown = sources()
    covered = {path: os.path.realpath(path) for path in shown if path.startswith(f"{WORKDIR}/")}
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=8m,mode=755")
    os.mkdir(STAGE + OLD)
    os.chdir(STAGE)
    linux.pivot_root(".", OLD[1:])
    os.chdir("/")
    for path in shown:
        if path not in covered:
            show(path)
    make_devices()
    make_etc()
    os.mkdir(WORKDIR, 0o1777)
    linux.mount("tmpfs", WORKDIR, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, WORKDIR_OPTIONS)
    show_inside_workdir(covered)
    hide_package()
    linux.unmount(OLD)
    os.rmdir(OLD)
    linux.mount("none", "/", flags=READ_ONLY)


def show(path: str) -> None:
    """The same path in the new root, read-only."""
    old = OLD + path
    if os.path.islink(old):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(old), path)
        return
    os.makedirs(path, exist_ok=True)
    bind_read_only(old, path)


def bind_read_only(old: str, path: str) -> None:
    linux.mount(old, path, flags=linux.MS_BIND | linux.MS_REC)
    try:
        linux.make_read_only(path)
    except OSError:
        remount_read_only(path)


def show_inside_workdir(covered: Mapping[str, str]) -> None:
    """An interpreter that lies below the working directory (path: where it really is), where it lies.

    The first folder on the way is a mount of its own, which a program can neither move nor write to."""
    tops = {"/".join(path.split("/")[: WORKDIR.count("/") + 2]) for path in covered}
    for top in tops:
        os.mkdir(top)
        linux.mount("tmpfs", top, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path, real in covered.items():
        os.makedirs(path, exist_ok=True)
        bind_read_only(OLD + real, path)
    for top in tops - covered.keys():
        linux.mount("none", top, flags=READ_ONLY)


def remount_read_only(path: str) -> None:
    """Before Linux 5.12: this mount alone; what is mounted below it keeps its own flags."""
    now = os.statvfs(path).f_flag
    kept = sum(flag for seen, flag in KEPT_FLAGS.items() if now & seen)
    wanted = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("none", path, flags=linux.MS_REMOUNT | linux.MS_BIND | wanted | kept)


def hide_package() -> None:
    """Our own source, where it was installed among the libraries."""
    package = str(Path(__file__).resolve().parents[1])
    if os.path.isdir(package):
        linux.mount("tmpfs", package, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY, "size=4k,mode=755")


def make_devices() -> None:
    os.mkdir("/dev")
    for name in DEVICES:
        with suppress(OSError):  # a missing device is the operator's choice; urandom has a system call beside it
            Path("/dev", name).touch()
            linux.mount(f"{OLD}/dev/{name}", f"/dev/{name}", flags=linux.MS_BIND)
    os.symlink(WORKDIR, "/dev/shm")  # semaphores of multiprocessing; wiped with the rest


def make_etc() -> None:
    os.mkdir("/etc")
    user = f"sandbox:x:{os.geteuid()}:{os.getegid()}::/tmp:/bin/false\n"
    Path("/etc/passwd").write_text(user)
    for path in COPIED:
        with suppress(OSError):  # libraries are found by their default folders without it
            Path(path).write_bytes(Path(OLD + path).read_bytes())


def inodes_in_use(path: str) -> int:
    state = os.statvfs(path)
    return state.f_files - state.f_ffree


def empty(folder: str) -> None:
    """Remove everything in `folder`, whatever its depth or permissions; links are removed, never followed, and what is
    mounted there stays.

    Folders are moved up before they are entered: a path can be longer than any call accepts."""
    waiting, device = [folder], os.stat(folder).st_dev
    while waiting:
        current = waiting[-1]
        subfolders = []
        for entry in os.listdir(current):
            path = f"{current}/{entry}"
            state = os.lstat(path)
            mode = state.st_mode
            if state.st_dev != device:
                continue
            if not stat.S_ISDIR(mode):
                os.unlink(path)
                continue
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(path, 0o700)
            subfolders.append(moved_up(path, folder))
        if subfolders:
            waiting += subfolders
        else:
            waiting.pop()
            if current != folder:
                os.rmdir(current)


def moved_up(path: str, folder: str) -> str:
    target = f"{folder}/.wipe-{os.urandom(8).hex()}"
    os.rename(path, target)
    return target
