"""The working directory of a session as a value: taken after a cell, put back when a cell is undone.

Runs in the slot while every program in it is stopped, so nothing changes underneath. Links are kept as links and never
followed. Not covered: times, and files that are open across an undone cell (they lead to the undone file)."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from rocstar.sandbox import rootfs

MAX_BYTES = 64 * 2**20  # what a slot's own file system holds
MAX_ENTRIES = 2048
KEPT = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


@dataclass(frozen=True, slots=True)
class Entry:
    mode: int
    """As `os.lstat` gives it."""
    content: bytes
    """Of a file; a link's target; empty for a folder."""


Tree = Mapping[str, Entry]
"""Relative path to entry, folders before what is in them."""


def take(folder: str) -> Tree:
    """Files, folders and links; pipes and the like are left out. Raises OSError where one cannot be read, or where it
    is too much."""
    tree: dict[str, Entry] = {}
    device, room = os.lstat(folder).st_dev, MAX_BYTES
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        for name in sorted(os.listdir(f"{folder}/{parent}")):
            path = f"{parent}{name}"
            state = os.lstat(f"{folder}/{path}")
            if state.st_dev != device or stat.S_IFMT(state.st_mode) not in KEPT:
                continue  # another device: the interpreter, where it is mounted below the working directory
            tree[path] = read(f"{folder}/{path}", state, room)
            room -= len(tree[path].content)
            if stat.S_ISDIR(state.st_mode):
                waiting.append(f"{path}/")
            if len(tree) > MAX_ENTRIES:
                raise OSError(f"the working directory holds more than {MAX_ENTRIES} entries")
    return tree


def read(path: str, state: os.stat_result, room: int) -> Entry:
    if stat.S_ISDIR(state.st_mode):
        return Entry(state.st_mode, b"")
    if stat.S_ISLNK(state.st_mode):
        return Entry(state.st_mode, os.fsencode(os.readlink(path)))
    if state.st_size > room:
        raise OSError(f"{path} holds more than {room} bytes")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return Entry(state.st_mode, file.read())


def put(folder: str, tree: Tree) -> None:
    """Make the folder hold `tree` and nothing else. Raises OSError."""
    with suppress(OSError):  # what cannot be read can be removed
        if take(folder) == tree:
            return
    rootfs.empty(folder)
    before = os.umask(0)  # rights are given when a file is made: they may not be changed everywhere
    try:
        for path, entry in tree.items():
            write(f"{folder}/{path}", entry)
    finally:
        os.umask(before)
    for path, entry in reversed(list(tree.items())):  # after all that is in it was written
        if stat.S_ISDIR(entry.mode) and stat.S_IMODE(entry.mode) & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"{folder}/{path}", stat.S_IMODE(entry.mode))


def write(path: str, entry: Entry) -> None:
    mode = stat.S_IMODE(entry.mode)
    if stat.S_ISDIR(entry.mode):
        os.mkdir(path, mode | stat.S_IRWXU)
    elif stat.S_ISLNK(entry.mode):
        os.symlink(entry.content, path)
    else:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(entry.content)
