"""The system-call filter, run here as the kernel would: by a small interpreter of its programs."""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping

import pytest

from rocstar.sandbox import linux, seccomp, syscalls

MACHINES = ("x86_64", "aarch64")
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003}
ALLOW, KILL = "allow", "kill"
SOME_SLOT = 77


def verdict(code: bytes, machine: str, number: int, *arguments: int) -> tuple[str | int, int]:
    """What the filter says of one call (ALLOW, KILL, or the error), and how many instructions it took."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, AUDIT[machine], 0, *given)
    program, at, taken, register = list(struct.iter_unpack("HBBI", code)), 0, 0, 0
    while True:
        operation, if_true, if_false, value = program[at]
        at, taken = at + 1, taken + 1
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
                return meaning(value), taken
            case _:
                raise AssertionError(f"instruction {operation:#x} is none the filter uses")


def meaning(value: int) -> str | int:
    if value == 0x7FFF0000:
        return ALLOW
    if value == 0x80000000:
        return KILL
    assert value >> 16 == 0x0005, hex(value)
    return value & 0xFFFF


def named(table: syscalls.Numbers, machine: str) -> set[int]:
    column = MACHINES.index(machine)
    return {numbers[column] for numbers in table.values() if numbers[column] is not None}  # type: ignore[misc]


def expected(machine: str, *, own_files: bool, local_sockets: bool) -> Mapping[int, str | int]:
    """With arguments that are all 0, which name no one and no family."""
    column = MACHINES.index(machine)
    table: dict[int, str | int] = dict.fromkeys(range(1024), errno.ENOSYS)
    table |= dict.fromkeys(named(syscalls.ALLOWED, machine) | named(syscalls.ON_ONESELF, machine), ALLOW)
    table |= dict.fromkeys(named(syscalls.REFUSED, machine), errno.EPERM)
    table |= dict.fromkeys(named(syscalls.CHANGING_MODES, machine), errno.EPERM if own_files else ALLOW)
    for numbers in (syscalls.SOCKET, syscalls.SOCKETPAIR):
        table[numbers[column]] = errno.EPERM
    table[syscalls.CLONE[column]] = ALLOW
    table[syscalls.SYNC[column]] = 0
    table[syscalls.TRUNCATE[column]] = ALLOW if local_sockets else errno.EPERM
    table[syscalls.SETPRIORITY[column]] = ALLOW
    return table


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("namespaced", [True, False])
def test_every_number_is_treated_as_the_tables_say(machine: str, namespaced: bool) -> None:
    slot = SOME_SLOT if namespaced else None
    code = seccomp.build(machine, local_sockets=namespaced, own_files=not namespaced, slot=slot)
    wanted = expected(machine, own_files=not namespaced, local_sockets=namespaced)
    seen = {number: verdict(code, machine, number)[0] for number in range(1024)}
    assert seen == wanted


@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_stands_in_two_tables(machine: str) -> None:
    column = MACHINES.index(machine)
    tables = (syscalls.ALLOWED, syscalls.REFUSED, syscalls.ON_ONESELF, syscalls.CHANGING_MODES)
    special = ("CLONE", "CLONE3", "SOCKET", "SOCKETPAIR", "SETPRIORITY", "SYNC", "TRUNCATE")
    numbers = [row[column] for table in tables for row in table.values() if row[column] is not None]
    numbers += [getattr(syscalls, name)[column] for name in special]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("machine", MACHINES)
def test_the_search_is_as_short_as_a_balanced_tree_allows(machine: str) -> None:
    code = seccomp.build(machine, local_sockets=True, own_files=False, slot=SOME_SLOT)
    runs = len(seccomp.spans(seccomp.rules(machine, local_sockets=True, own_files=False, slot=1), (seccomp.MISSING,)))
    longest_rule, before_the_search = 6, 3
    # A comparison is one instruction, two where its jump is too far for it; one more is the return.
    deepest = max(verdict(code, machine, number)[1] for number in range(1024))
    assert deepest <= before_the_search + (runs + 2).bit_length() + 2 + longest_rule


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architectures_and_numbers_get_nowhere(machine: str) -> None:
    other = "i386" if machine == "x86_64" else "x86_64"
    foreign = KILL if machine == "x86_64" else errno.ENOSYS
    for code in (
        seccomp.build(machine, local_sockets=True, own_files=False, slot=1),
        seccomp.build_without_signals(machine),
    ):
        assert {verdict(code, other, number)[0] for number in range(1024)} == {KILL}
        assert {verdict(code, machine, 0x40000000 + number)[0] for number in range(1024)} == {foreign}
        assert verdict(code, machine, 0xFFFFFFFF)[0] == errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_they_must(machine: str) -> None:
    column = MACHINES.index(machine)
    inside = seccomp.build(machine, local_sockets=True, own_files=False, slot=SOME_SLOT)
    beside = seccomp.build(machine, local_sockets=False, own_files=True, slot=None)
    limits = syscalls.ON_ONESELF["prlimit64"][column]
    assert limits is not None
    calls: list[tuple[bytes, int, tuple[int, ...], str | int]] = [
        (inside, syscalls.CLONE[column], (0x3D0F00,), ALLOW),  # what threads are made with
        *((inside, syscalls.CLONE[column], (1 << bit,), errno.EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
        (inside, syscalls.CLONE[column], (linux.CLONE_NEWUSER | 17,), errno.EPERM),
        (inside, syscalls.SOCKET[column], (1, 1), ALLOW),
        (inside, syscalls.SOCKETPAIR[column], (1, 2), ALLOW),
        *((code, syscalls.SOCKET[column], (family,), errno.EPERM) for code in (inside, beside) for family in (2, 16)),
        *((code, syscalls.SOCKETPAIR[column], (30, 1), errno.EPERM) for code in (inside, beside)),
        (beside, syscalls.SOCKET[column], (1, 1), errno.EPERM),
        (beside, syscalls.SOCKETPAIR[column], (1, 1 | 0o2004000), ALLOW),
        (beside, syscalls.SOCKETPAIR[column], (1, 2 | 0o2004000), errno.EPERM),
        (inside, limits, (0, 7), ALLOW),
        (inside, limits, (1, 7), errno.EPERM),
        (inside, syscalls.SETPRIORITY[column], (0, 0, 5), ALLOW),
        (inside, syscalls.SETPRIORITY[column], (0, SOME_SLOT, 5), errno.EPERM),
        (inside, syscalls.SETPRIORITY[column], (0, 5, 5), ALLOW),
        (inside, syscalls.SETPRIORITY[column], (1, 0, 5), errno.EPERM),
        (inside, syscalls.SETPRIORITY[column], (1, 5, 5), ALLOW),
        (inside, syscalls.SETPRIORITY[column], (2, 5, 5), errno.EPERM),
        (beside, syscalls.SETPRIORITY[column], (0, 5, 5), errno.EPERM),
    ]
    seen = [verdict(code, machine, number, *arguments)[0] for code, number, arguments, _ in calls]
    assert seen == [wanted for *_, wanted in calls]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_second_filter_refuses_signals_and_nothing_else(machine: str) -> None:
    code = seccomp.build_without_signals(machine)
    refused = {number for number in range(1024) if verdict(code, machine, number)[0] != ALLOW}
    column = MACHINES.index(machine)
    assert refused == {syscalls.ALLOWED[name][column] for name in syscalls.SIGNALLING}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_jump_too_long_for_one_instruction_is_made_by_two(machine: str) -> None:
    known = {4 * number: tuple([seccomp.load_argument(0)] * 60 + [seccomp.ALLOWING]) for number in range(8)}
    code = seccomp.assembled(machine, known, (seccomp.MISSING,))
    assert [verdict(code, machine, number)[0] for number in range(29)] == [
        ALLOW if number % 4 == 0 else errno.ENOSYS for number in range(29)
    ]
