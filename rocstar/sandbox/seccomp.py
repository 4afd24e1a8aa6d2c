"""The system-call filter: an allow-list, built here as a program for the kernel and loaded through prctl.

Covered: only calls that programs are known to need are made (`syscalls`), and of those that could do harm only with
harmless arguments: no namespaces through clone, no sockets other than local ones, no limits or priorities of others.
A call through another architecture or the x32 numbers ends the process.
Not covered: bugs in the calls that remain. What a path names is for the mount namespace or Landlock to decide.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Mapping

from rocstar.sandbox import linux
from rocstar.sandbox.syscalls import (
    ALLOWED,
    CHANGING_MODES,
    CLONE,
    CLONE3,
    COLUMN,
    ON_ONESELF,
    REFUSED,
    SETPRIORITY,
    SIGNALLING,
    SOCKET,
    SOCKETPAIR,
    SYNC,
    TRUNCATE,
)

LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST = 0x05, 0x15, 0x45, 0x35
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
AT_NUMBER, AT_ARCHITECTURE, AT_ARGUMENTS = 0, 4, 16
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
NO_NUMBER = 0xFFFFFFFF  # -1, which libraries and tracers use for "no call at all"
FARTHEST = 255  # instructions a conditional jump can pass over
AF_UNIX = 1
SOCK_DGRAM = 2
SOCK_TYPE_MASK = 0xF  # the rest are flags
PRIO_USER = 2
NEW_NAMESPACE = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
)

Code = tuple[bytes, ...]
"""Instructions, one after the other, that end in a return whichever way they are run."""


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse(error: int) -> bytes:
    """An error of 0 is a success in which nothing was done."""
    return instruction(RETURN, ERRNO | error)


def load_argument(index: int) -> bytes:
    """The low half: all arguments looked at here are 32 bits wide."""
    return instruction(LOAD, AT_ARGUMENTS + 8 * index)


ALLOWING = instruction(RETURN, ALLOW)
KILLING = instruction(RETURN, KILL)
REFUSING = refuse(errno.EPERM)
MISSING = refuse(errno.ENOSYS)


def only_zero(*arguments: int) -> Code:
    """Allowed when each of these arguments is 0."""
    body: list[bytes] = []
    for index in arguments:
        body += [load_argument(index), instruction(JUMP_EQUAL, 0, 1, 0), REFUSING]
    return (*body, ALLOWING)


def clone_rule() -> Code:
    return (load_argument(0), instruction(JUMP_SET, NEW_NAMESPACE, 0, 1), REFUSING, ALLOWING)


def priority_rule(slot: int) -> Code:
    """Processes and groups may be told to be nicer, but neither the slot nor, by naming none, a group it may be in."""
    which, who = load_argument(0), load_argument(1)
    return (
        which,
        instruction(JUMP_AT_LEAST, PRIO_USER, 4, 0),
        who,
        instruction(JUMP_EQUAL, slot, 2, 0),
        instruction(JUMP_EQUAL, 0, 2, 0),
        ALLOWING,
        REFUSING,
        which,
        instruction(JUMP_EQUAL, 0, 0, 1),
        ALLOWING,
        REFUSING,
    )


def socket_rule(local_sockets: bool) -> Code:
    if not local_sockets:
        return (REFUSING,)
    return (load_argument(0), instruction(JUMP_EQUAL, AF_UNIX, 1, 0), REFUSING, ALLOWING)


def pair_rule(local_sockets: bool) -> Code:
    """A connected pair reaches nobody else, unless it is of datagrams: those may name any receiver in sight."""
    family = load_argument(0), instruction(JUMP_EQUAL, AF_UNIX, 1, 0), REFUSING
    if local_sockets:
        return (*family, ALLOWING)
    kind = load_argument(1), instruction(AND, SOCK_TYPE_MASK), instruction(JUMP_EQUAL, SOCK_DGRAM, 0, 1), REFUSING
    return (*family, *kind, ALLOWING)


def rules(machine: str, *, local_sockets: bool, own_files: bool, slot: int | None) -> dict[int, Code]:
    """What is done about each call, by number. Arguments are those of `build`."""
    column = COLUMN[machine]
    change = REFUSING if own_files else ALLOWING
    tables = ((ALLOWED, (ALLOWING,)), (REFUSED, (REFUSING,)), (CHANGING_MODES, (change,)), (ON_ONESELF, only_zero(0)))
    found = {pair[column]: body for table, body in tables for pair in table.values()}
    special: Mapping[tuple[int, int], Code] = {
        CLONE: clone_rule(),
        CLONE3: (MISSING,),  # its flags lie in memory; libc falls back to clone
        SOCKET: socket_rule(local_sockets),
        SOCKETPAIR: pair_rule(local_sockets),
        SETPRIORITY: only_zero(0, 1) if slot is None else priority_rule(slot),
        SYNC: (refuse(0),),
        TRUNCATE: (ALLOWING if local_sockets else REFUSING,),
    }
    found |= {pair[column]: body for pair, body in special.items()}
    return {number: body for number, body in found.items() if number is not None}


def build(machine: str, *, local_sockets: bool, own_files: bool, slot: int | None) -> bytes:
    """The filter as an array of sock_filter. `local_sockets`: AF_UNIX may be made, because only the program's own files
    are in sight; `own_files`: the program runs as the user who started us and may see their files, so modes and times
    may not be changed; `slot`: process id of the slot, where
    every other process under its user is one of the program's, else None.

    Raises KeyError for a machine other than x86_64 and aarch64."""
    found = rules(machine, local_sockets=local_sockets, own_files=own_files, slot=slot)
    return assembled(machine, found, (MISSING,))


def build_without_signals(machine: str) -> bytes:
    """A second, small filter on top: no signal may be sent, not even to oneself. Raises KeyError like `build`."""
    numbers = (ALLOWED[name][COLUMN[machine]] for name in SIGNALLING)
    return assembled(machine, {number: (REFUSING,) for number in numbers if number is not None}, (ALLOWING,))


def assembled(machine: str, found: Mapping[int, Code], others: Code) -> bytes:
    architecture = (
        instruction(LOAD, AT_ARCHITECTURE),
        instruction(JUMP_EQUAL, ARCHITECTURE[machine], 1, 0),
        KILLING,
        instruction(LOAD, AT_NUMBER),
    )
    foreign = KILLING if machine == "x86_64" else MISSING
    ends = [(X32_BIT, (foreign,)), (NO_NUMBER, (MISSING,))]
    return b"".join((*architecture, *tree([*spans(found, others), *ends])))


def spans(found: Mapping[int, Code], others: Code) -> list[tuple[int, Code]]:
    """First number of each run of calls that are treated alike, and how; from 0 on, without gaps."""
    runs: list[tuple[int, Code]] = []
    for number in range(max(found) + 2):
        body = found.get(number, others)
        if not runs or runs[-1][1] != body:
            runs.append((number, body))
    return runs


def tree(runs: list[tuple[int, Code]]) -> Code:
    """A balanced search for the run that the loaded number is in: as many comparisons as the list's length has binary
    digits, whichever call it is."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    first, below, above = runs[middle][0], tree(runs[:middle]), tree(runs[middle:])
    if len(below) <= FARTHEST:
        return (instruction(JUMP_AT_LEAST, first, len(below), 0), *below, *above)
    return (instruction(JUMP_AT_LEAST, first, 0, 1), instruction(JUMP, len(below)), *below, *above)


def install(code: bytes) -> None:
    """Loads a filter for this process and all it starts. Needs no_new_privs. Raises OSError."""
    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    linux.prctl(linux.PR_SET_SECCOMP, 2, ctypes.addressof(head), what="seccomp")
