"""A system-call filter, built here and loaded through prctl. It denies; it does not list what is allowed.

Covered: making namespaces (the flag argument of clone too), mounting, tracing, keys, bpf, io_uring, userfaultfd,
shared memory between calls, sockets other than local ones, touching the limits of other processes, and calls made
through another architecture or the x32 numbers.
Not covered: bugs in the calls that remain.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from rocstar.sandbox import linux

LOAD, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
AT_NUMBER, AT_ARCHITECTURE, AT_ARGUMENTS = 0, 4, 16
X32_BIT = 0x40000000
COLUMN = {"x86_64": 0, "aarch64": 1}  # in the tables of call numbers below
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AF_UNIX = 1
NEW_NAMESPACE = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
)
CLONE3 = 435

# name: (x86-64, aarch64); None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),  # memory that no limit on address space counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "setxattr": (188, 5),  # an attribute on the working directory would reach the next call
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
}
# These may be used on oneself (first argument 0) and on nobody else: the slot runs under the same user.
ON_ONESELF = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
              "sched_setparam": (142, 118), "sched_setattr": (314, 274)}  # fmt: skip
SETPRIORITY = (141, 140)
PRIO_USER = 2
SOCKET = (41, 198)
CLONE = (56, 220)
SIGNALLING = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
              "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424)}  # fmt: skip

# What Landlock does not cover: a program that runs as the user who started us could change the modes of their files.
CHANGING_MODES = {"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
                  "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
                  "truncate": (76, 45), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
                  "utimensat": (280, 88)}  # fmt: skip


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse(error: int) -> bytes:
    return instruction(RETURN, ERRNO | error)


def when_number(number: int, body: list[bytes]) -> list[bytes]:
    """`body` for this call; it must end in a return. The call's number is loaded before and after."""
    return [instruction(JUMP_EQUAL, number, 0, len(body)), *body]


def load_argument(index: int) -> bytes:
    """The low half: all arguments looked at here are 32 bits wide."""
    return instruction(LOAD, AT_ARGUMENTS + 8 * index)


def only_zero(*arguments: int) -> list[bytes]:
    """Allowed when each of these arguments is 0."""
    body: list[bytes] = []
    for index in arguments:
        body += [load_argument(index), instruction(JUMP_EQUAL, 0, 1, 0), refuse(errno.EPERM)]
    return [*body, instruction(RETURN, ALLOW)]


def clone_rule() -> list[bytes]:
    flags = load_argument(0)
    return [flags, instruction(JUMP_SET, NEW_NAMESPACE, 0, 1), refuse(errno.EPERM), instruction(RETURN, ALLOW)]


def priority_rule(slot: int) -> list[bytes]:
    """Processes and groups may be told to be nicer, but neither the slot nor, by naming none, a group it may be in."""
    which, who = load_argument(0), load_argument(1)
    return [
        which,
        instruction(JUMP_AT_LEAST, PRIO_USER, 4, 0),
        who,
        instruction(JUMP_EQUAL, slot, 2, 0),
        instruction(JUMP_EQUAL, 0, 2, 0),
        instruction(RETURN, ALLOW),
        refuse(errno.EPERM),
        which,
        instruction(JUMP_EQUAL, 0, 0, 1),
        instruction(RETURN, ALLOW),
        refuse(errno.EPERM),
    ]


def socket_rule(local_sockets: bool) -> list[bytes]:
    if not local_sockets:
        return [refuse(errno.EPERM)]
    allowed = instruction(JUMP_EQUAL, AF_UNIX, 1, 0)
    return [load_argument(0), allowed, refuse(errno.EPERM), instruction(RETURN, ALLOW)]


def build(machine: str, *, local_sockets: bool, own_files: bool, slot: int | None) -> bytes:
    """The filter as an array of sock_filter. `local_sockets`: AF_UNIX may be made; `own_files`: files of the user who
    started us may be in sight, so modes and times of files may not be changed; `slot`: process id of the slot, where
    every other process under its user is one of the program's, else None.

    Raises KeyError for a machine other than x86_64 and aarch64."""
    column = COLUMN[machine]
    program = [
        *only_this_architecture(machine),
        *when_number(CLONE[column], clone_rule()),
        *when_number(CLONE3, [refuse(errno.ENOSYS)]),  # its flags lie in memory; libc falls back to clone
        *when_number(SOCKET[column], socket_rule(local_sockets)),
        *when_number(SETPRIORITY[column], only_zero(0, 1) if slot is None else priority_rule(slot)),
    ]
    for numbers in ON_ONESELF.values():
        program += when_number(numbers[column], only_zero(0))
    for entry in [*DENIED.values(), *(CHANGING_MODES.values() if own_files else ())]:
        if (number := entry[column]) is not None:
            program += when_number(number, [refuse(errno.EPERM)])
    return b"".join([*program, instruction(RETURN, ALLOW)])


def build_without_signals(machine: str) -> bytes:
    """A second, small filter on top: no signal may be sent, not even to oneself. Raises KeyError like `build`."""
    program = only_this_architecture(machine)
    for numbers in SIGNALLING.values():
        program += when_number(numbers[COLUMN[machine]], [refuse(errno.EPERM)])
    return b"".join([*program, instruction(RETURN, ALLOW)])


def only_this_architecture(machine: str) -> list[bytes]:
    """Ends with the call's number loaded."""
    return [
        instruction(LOAD, AT_ARCHITECTURE),
        instruction(JUMP_EQUAL, ARCHITECTURE[machine], 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, AT_NUMBER),
        instruction(JUMP_AT_LEAST, X32_BIT, 0, 1),
        refuse(errno.ENOSYS),
    ]


def install(code: bytes) -> None:
    """Loads a filter for this process and all it starts. Needs no_new_privs. Raises OSError."""
    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    linux.prctl(linux.PR_SET_SECCOMP, 2, ctypes.addressof(head), what="seccomp")
