"""The system-call filter, run here as the kernel would: by a small interpreter of its programs."""

from __future__ import annotations

import errno
import functools
import struct
from collections.abc import Mapping

import pytest

from rocstar.sandbox.walls import linux, seccomp

MACHINES = ("x86_64", "aarch64")
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003}
ALLOW, KILL, DONE = "allow", "kill", 0
SLOT = 77
POINTER = 0x7FFF12345678
IN_NAMESPACES = {"private_files": True, "own_files": False, "slot": SLOT}
BESIDE = {"private_files": False, "own_files": True, "slot": None, "counted": False}
WITH_ALL_ZERO: Mapping[str, str | int] = {
    "fcntl": ALLOW, "ioctl": errno.ENOTTY, "setsockopt": errno.EPERM, "open": ALLOW, "openat": ALLOW,
    "statx": ALLOW, "madvise": ALLOW, "setpgid": ALLOW, "rt_sigaction": ALLOW, "clone": ALLOW, "clone3": errno.ENOSYS,
    "socket": errno.EPERM, "socketpair": errno.EPERM, "setpriority": ALLOW, "prctl": errno.EINVAL,
    "getsockopt": errno.EPERM, "setrlimit": ALLOW, "prlimit64": ALLOW, "mmap": ALLOW,
    "landlock_add_rule": errno.ENOSYS,
}  # fmt: skip
"""What is said of the calls whose arguments decide when all of them are 0."""


def verdict(code: bytes, machine: str, number: int, *arguments: int) -> str | int:
    """What the filter says of one call: ALLOW, KILL, or the error."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, AUDIT[machine], 0, *given)
    program, at, register = list(struct.iter_unpack("HBBI", code)), 0, 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        match operation:
            case 0x20:
                (register,) = struct.unpack_from("=I", data, value)
            case 0x54:
                register &= value
            case 0x05:
                at += value
            case 0x15:
                at += if_true if register == value else if_false
            case 0x35:
                at += if_true if register >= value else if_false
            case 0x45:
                at += if_true if register & value else if_false
            case 0x06:
                return meaning(value)
            case _:
                raise AssertionError(f"instruction {operation:#x} is none the filter uses")


def meaning(value: int) -> str | int:
    if value == 0x7FFF0000:
        return ALLOW
    if value == 0x80000000:
        return KILL
    assert value >> 16 == 0x0005, hex(value)
    return value & 0xFFFF


@functools.cache
def numbers(table: str, machine: str) -> dict[str, int]:
    return seccomp.tables(machine)[table]


def expected(machine: str, *, private_files: bool, own_files: bool) -> Mapping[int, str | int]:
    said: dict[str, str | int] = {
        "allowed": ALLOW,
        "attributes": errno.EOPNOTSUPP,
        "on-itself": ALLOW,
        "no-op": DONE,
        "changing-modes": errno.EPERM if own_files else ALLOW,
        "on-private-files": ALLOW if private_files else errno.EPERM,
        "on-private-attributes": ALLOW if private_files else errno.EOPNOTSUPP,
        "naming-sockets": ALLOW if private_files else errno.EPERM,
        "signalling": ALLOW,
    }
    table: dict[int, str | int] = dict.fromkeys(range(1024), errno.ENOSYS)
    for name in said:
        table |= dict.fromkeys(numbers(name, machine).values(), said[name])
    return table | {number: WITH_ALL_ZERO[name] for name, number in numbers("inspected", machine).items()}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("walls", [IN_NAMESPACES, BESIDE])
def test_every_number_is_treated_as_the_tables_say(machine: str, walls: dict[str, bool]) -> None:
    code = seccomp.build(machine, **walls)
    wanted = expected(machine, private_files=walls["private_files"], own_files=walls["own_files"])
    assert {number: verdict(code, machine, number) for number in range(1024)} == wanted


@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_stands_in_two_tables(machine: str) -> None:
    found = [number for table in seccomp.tables(machine).values() for number in table.values()]
    assert len(found) == len(set(found)) > 200


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architectures_and_numbers_get_nowhere(machine: str) -> None:
    other = "i386" if machine == "x86_64" else "x86_64"
    foreign = KILL if machine == "x86_64" else errno.ENOSYS
    for code in (
        seccomp.build(machine, private_files=True, own_files=False, slot=1),
        seccomp.build_without_signals(machine),
    ):
        some = [*range(0, 1024, 31), 1023]
        assert {verdict(code, other, number) for number in some} == {KILL}
        assert {verdict(code, machine, 0x40000000 + number) for number in some} == {foreign}
        assert verdict(code, machine, 0xFFFFFFFF) == errno.ENOSYS


@functools.cache
def filters(machine: str) -> list[bytes]:
    return [seccomp.build(machine, **walls) for walls in (IN_NAMESPACES, BESIDE)]


@pytest.mark.parametrize(
    ("name", "arguments", "inside", "beside"),
    [
        ("clone", (0x3D0F00,), ALLOW, ALLOW),  # what threads are made with
        *(("clone", (1 << bit,), errno.EPERM, errno.EPERM) for bit in (15, 17, 25, 26, 27, 28, 29, 30)),
        ("clone", (linux.CLONE_NEWUSER | 17,), errno.EPERM, errno.EPERM),
        ("socket", (1, 1), ALLOW, errno.EPERM),
        *(("socket", (family,), errno.EPERM, errno.EPERM) for family in (2, 10, 16, 17, 40)),
        ("socketpair", (1, 2), ALLOW, errno.EPERM),
        ("socketpair", (1, 1 | 0o2004000), ALLOW, ALLOW),
        ("socketpair", (1, 2 | 0o2004000), ALLOW, errno.EPERM),
        ("socketpair", (30, 1), errno.EPERM, errno.EPERM),
        *(("socketpair", (1, kind), ALLOW, ALLOW) for kind in (1, 5, 5 | 0o2000000)),
        *((call, (1, kind), errno.EPERM, errno.EPERM) for call in ("socket", "socketpair") for kind in (3, 4, 6, 10)),
        *(("prctl", (option,), ALLOW, ALLOW) for option in (1, 15, 16, 38)),
        *(("prctl", (option,), errno.EINVAL, errno.EINVAL) for option in (4, 36, 59, 78, 0x59616D61)),
        ("prctl", (22, 2), errno.EINVAL, ALLOW),  # the filter that keeps signals in, where no namespace does
        *(("getsockopt", (1, 1, option), ALLOW, ALLOW) for option in (3, 4, 7, 8, 17, 39)),
        *(("getsockopt", (1, 1, option), errno.EPERM, errno.EPERM) for option in (55, 57, 71, 77)),
        ("getsockopt", (1, 6, 4), errno.EPERM, errno.EPERM),
        ("setrlimit", (4, POINTER), errno.EPERM, errno.EPERM),
        ("prlimit64", (0, 4, POINTER), errno.EPERM, errno.EPERM),
        ("prlimit64", (0, 4, 0, POINTER), ALLOW, ALLOW),
        ("prlimit64", (0, 7), ALLOW, ALLOW),
        ("prlimit64", (1, 7), errno.EPERM, errno.EPERM),
        ("setpriority", (0, 0, 5), ALLOW, ALLOW),
        ("setpriority", (0, SLOT, 5), errno.EPERM, errno.EPERM),
        ("setpriority", (0, 5, 5), ALLOW, errno.EPERM),
        ("setpriority", (1, 0, 5), errno.EPERM, errno.EPERM),
        ("setpriority", (1, SLOT, 5), errno.EPERM, errno.EPERM),
        ("setpriority", (1, 5, 5), ALLOW, errno.EPERM),
        ("setpriority", (2, 5, 5), errno.EPERM, errno.EPERM),
        *(("fcntl", (1, command), DONE, DONE) for command in (6, 7, 37, 38)),  # locks
        *(("fcntl", (1, command), ALLOW, ALLOW) for command in (1, 2, 3, 5, 36, 1030)),
        *(("fcntl", (1, command), errno.EINVAL, errno.EINVAL) for command in (8, 10, 15, 1024, 1026, 1031, 1036)),
        ("fcntl", (1, 4, 0o4000), ALLOW, ALLOW),  # F_SETFL, O_NONBLOCK
        *(("ioctl", (1, request), ALLOW, ALLOW) for request in (0x5401, 0x541B, 0x5421)),
        *(
            ("ioctl", (1, request), errno.ENOTTY, errno.ENOTTY)
            for request in (0x40086602, 0x401C5820, 0x5452, 0x8901, 0x8902, 0x5412, 0x8912)
        ),
        *(("setsockopt", (1, 1, option), errno.EPERM, errno.EPERM) for option in (7, 8, 26, 32, 33, 50)),
        *(("setsockopt", (1, 1, option), ALLOW, ALLOW) for option in (2, 16, 20)),
        ("setsockopt", (1, 6, 2), errno.EPERM, errno.EPERM),
        ("rt_sigaction", (17, POINTER), DONE, DONE),
        ("rt_sigaction", (17, 0x7F00000000), DONE, DONE),  # whose low half is zero
        ("rt_sigaction", (17, 0, POINTER), ALLOW, ALLOW),
        ("rt_sigaction", (2, POINTER), ALLOW, ALLOW),
        ("openat", (3, POINTER, 0o20200002), errno.EOPNOTSUPP, errno.EOPNOTSUPP),
        ("openat", (3, POINTER, 0o2102), ALLOW, ALLOW),
        ("openat", (3, POINTER, 0o1101), ALLOW, ALLOW),  # a file made anew, to write to
        *(("openat", (3, POINTER, 0o1000 | mode), errno.EPERM, errno.EPERM) for mode in (0, 3, 0o100)),
        ("statx", (3, POINTER, 0, 0x4000), errno.EINVAL, errno.EINVAL),
        ("madvise", (POINTER, 4096, 4), ALLOW, ALLOW),
        *(("madvise", (POINTER, 4096, advice), errno.EINVAL, errno.EINVAL) for advice in (12, 20, 21)),
        *(("mmap", (0, 4096, 3, flags), ALLOW, ALLOW) for flags in (0x01, 0x02, 0x22, 0x20022)),
        ("mmap", (0, 4096, 3, 0x8021), ALLOW, errno.EPERM),
        ("setpgid", (0, SLOT), errno.EPERM, ALLOW),
        ("setpgid", (5, 0), ALLOW, ALLOW),
        *(
            (name, (SLOT, 10), errno.EPERM, ALLOW)
            for name in numbers("signalling", "x86_64")
            if name != "pidfd_send_signal"
        ),
        ("kill", (2**32 - SLOT, 10), errno.EPERM, ALLOW),
        ("kill", (2**64 - SLOT, 10), errno.EPERM, ALLOW),
        ("kill", (2**32 - 1, 9), ALLOW, ALLOW),
        ("tgkill", (5, SLOT, 10), errno.EPERM, ALLOW),
    ],
)
def test_arguments_decide_where_they_must(
    name: str, arguments: tuple[int, ...], inside: str | int, beside: str | int
) -> None:
    for machine in MACHINES:
        (known,) = (table[name] for table in seccomp.tables(machine).values() if name in table)
        assert [verdict(code, machine, known, *arguments) for code in filters(machine)] == [inside, beside], machine


def test_a_network_is_tcp_and_udp_and_its_programs_hear_of_their_children() -> None:
    for machine in MACHINES:
        code = seccomp.build(machine, private_files=False, own_files=False, slot=None, network=True)
        known = numbers("inspected", machine)
        asked = [(family, kind, protocol) for family in (2, 10) for kind in (1, 2) for protocol in (0, 6, 17, 136, 262)]
        said = {given: verdict(code, machine, known["socket"], *given) for given in asked}
        assert said == {given: ALLOW if given[2] in (0, 6, 17) else errno.EPERM for given in asked}
        assert verdict(code, machine, known["rt_sigaction"], 17, POINTER) == ALLOW
        free = (known["landlock_add_rule"], *numbers("naming-sockets", machine).values())
        assert {verdict(code, machine, number) for number in free} == {ALLOW}


def test_in_a_pid_namespace_everybody_but_the_slot_can_be_signalled() -> None:
    code = seccomp.build("x86_64", private_files=True, own_files=False, slot=1)
    kill = numbers("signalling", "x86_64")["kill"]
    said = [verdict(code, "x86_64", kill, target, 9) for target in (1, 2**32 - 1, 0, 2, 2**32 - 2)]
    assert said == [errno.EPERM, ALLOW, ALLOW, ALLOW, ALLOW]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_second_filter_refuses_signals_and_nothing_else(machine: str) -> None:
    code = seccomp.build_without_signals(machine)
    refused = {number for number in range(1024) if verdict(code, machine, number) != ALLOW}
    assert refused == set(numbers("signalling", machine).values())


@pytest.mark.parametrize("machine", MACHINES)
def test_a_jump_too_long_for_one_instruction_is_made_by_two(machine: str) -> None:
    known = {4 * number: tuple([seccomp.load_argument(0)] * 60 + [seccomp.ALLOWING]) for number in range(8)}
    code = seccomp.assembled(machine, known, (seccomp.MISSING,))
    assert [verdict(code, machine, number) for number in range(29)] == [
        ALLOW if number % 4 == 0 else errno.ENOSYS for number in range(29)
    ]
