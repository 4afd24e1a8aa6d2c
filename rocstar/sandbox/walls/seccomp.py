"""The system-call filter: an allow-list, built here as a program for the kernel and loaded through prctl.

Covered, for x86-64 and aarch64: only calls that programs are known to need are allowed, and those that could do harm
only with harmless arguments: no namespaces, only local sockets, no effect on limits, priorities or signals of others,
nothing that another program could observe (locks, watches, owners and flags of shared files). A call that is in no
table gets ENOSYS, as from a kernel that lacks it, so that libraries use their older fallback. A call through another
architecture or the x32 numbers ends the process.
Not covered: bugs in the allowed calls. The mount namespace or Landlock decides which paths are accessible.
"""

from __future__ import annotations

import ctypes
import errno
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from rocstar.sandbox.walls import linux

COLUMN = {"x86_64": 0, "aarch64": 1}
# Below each heading: name of a system call, its number on x86-64 and on aarch64, `-` where it has none.
TABLES = """
[allowed]
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
lseek 8 62, creat 85 -, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, sendfile 40 71,
copy_file_range 326 285, fallocate 285 47, ftruncate 77 46, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36,
unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
mknod 133 -, mknodat 259 33, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -,
eventfd2 290 19, signalfd 282 -, signalfd4 289 74, timerfd_create 283 85, timerfd_settime 286 86,
timerfd_gettime 287 87, brk 12 214, munmap 11 215, mremap 25 216, mprotect 10 226, msync 26 227,
mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231, get_mempolicy 239 236,
pkey_alloc 330 289, pkey_free 331 290, pkey_mprotect 329 288, fork 57 -, vfork 58 -, execve 59 221, execveat 322 281,
exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, getpid 39 172, getppid 110 173, gettid 186 178,
getpgid 121 155, getpgrp 111 -, getsid 124 156, setsid 112 157, set_tid_address 218 96, set_robust_list 273 99,
get_robust_list 274 100, rseq 334 293, membarrier 324 283, futex 202 98, arch_prctl 158 -, rt_sigprocmask 14 135,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, rt_sigreturn 15 139, sigaltstack 131 132,
restart_syscall 219 128, pause 34 -, alarm 37 -, time 201 -, gettimeofday 96 169, clock_gettime 228 113,
clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, times 100 153, getitimer 36 102, setitimer 38 103,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147,
setresgid 119 149, setgroups 116 159, setfsuid 122 151, setfsgid 123 152, capget 125 90, capset 126 91,
getrlimit 97 163, getrusage 98 165, getpriority 140 141, sched_yield 24 124, sched_getaffinity 204 123,
sched_getscheduler 145 120, sched_getparam 143 121, sched_getattr 315 275, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_rr_get_interval 148 127, ioprio_get 252 31, getcpu 309 168, uname 63 160,
sysinfo 99 179, getrandom 318 278, landlock_create_ruleset 444 444, landlock_restrict_self 446 446, listen 50 201,
accept 43 202, accept4 288 242,
getsockname 51 204, getpeername 52 205, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212,
sendmmsg 307 269, recvmmsg 299 243, shutdown 48 210, pipe2 293 59
# Answered as by a file system that has no attributes, which programs that copy files accept.
[attributes]
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, removexattrat 466 466
# Allowed with 0 as first argument: the calling process.
[on-itself]
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274
# Reported as successful without effect: locks, disk writes and cache contents are shared with other programs, and no
# result of a program depends on them.
[no-op]
flock 73 32, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, sync 162 81, fadvise64 221 223, readahead 187 213
# Refused if programs run as the user who started us: Landlock does not protect that user's files from these calls.
[changing-modes]
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54,
utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
# Allowed only if the program has its own file system: otherwise the free space of the disk is shared with others, and
# Landlock did not cover truncating by path before Linux 6.2.
[on-private-files]
statfs 137 43, fstatfs 138 44, truncate 76 45
# The same; refused like [attributes] above.
[on-private-attributes]
getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13
# Refused where a name would be the machine's: every other program could see that it is taken.
[naming-sockets]
bind 49 200, connect 42 203
# Refused for the slot as target: the first argument, or one of the first two.
[signalling]
kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434,
pidfd_send_signal 424 424
# Other arguments decide: see `build`.
[inspected]
fcntl 72 25, ioctl 16 29, prctl 157 167, getsockopt 55 209, setsockopt 54 208, setrlimit 160 164, prlimit64 302 261,
open 2 -, openat 257 56, statx 332 291, madvise 28 233, setpgid 109 154, rt_sigaction 13 134,
clone 56 220, clone3 435 435, socket 41 198, socketpair 53 199, setpriority 141 140, mmap 9 222,
landlock_add_rule 445 445
"""


def tables(machine: str) -> dict[str, dict[str, int]]:
    """TABLES by heading: the number of each system call that the machine has. Raises KeyError for a machine other than
    x86_64 and aarch64."""
    column, found = COLUMN[machine], {}
    for section in re.split(r"^\[", re.sub(r"#.*", "", TABLES), flags=re.MULTILINE)[1:]:
        heading, rows = section.split("]", 1)
        named = {name: numbers[column] for name, *numbers in map(str.split, rows.split(","))}
        found[heading] = {name: int(number) for name, number in named.items() if number != "-"}
    return found


LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST = 0x05, 0x15, 0x45, 0x35
ALLOW, KILL, ERRNO, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
AT_NUMBER, AT_ARCHITECTURE, AT_ARGUMENTS = 0, 4, 16
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
NO_NUMBER = 0xFFFFFFFF  # -1, which libraries and tracers use for "no call at all"
FARTHEST = 255  # instructions that a conditional jump can pass over

AF_UNIX, AF_INET, AF_INET6, SOL_SOCKET, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_IPV6, RLIMIT_CORE = 1, 2, 10, 1, 6, 17, 41, 4
SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET = 1, 2, 5
SOCK_TYPE_MASK = 0xF  # the rest are flags
CONNECTED, ANY = (SOCK_STREAM, SOCK_SEQPACKET), (SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM)
SECCOMP, SET_FILTER, NEW_LISTENER = {"x86_64": 317, "aarch64": 277}, 1, 8
SIGCHLD = 17
CLONE_PARENT = 0x8000  # the child would be the slot's own
NOT_CLONED = 0x7E020000 | CLONE_PARENT  # every kind of namespace
O_TMPFILE, O_TRUNC, O_RDONLY, O_ACCMODE = 0o20000000, 0o1000, 0, 3
STATX_MNT_ID_UNIQUE = 0x4000  # counts the mounts of the whole machine
FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030, 9, 11, 1032, 1034, 5, 36)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETOWN, F_GETSIG, F_GETPIPE_SZ, F_GET_SEALS, F_GETLK,
F_OFD_GETLK: no program can take a lock, so the last two report none, which SQLite relies on."""
FCNTL_LOCKS = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW."""
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450, 0x540F, 0x5460)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, TIOCGPGRP, FIOQSIZE."""
PRCTL_ALLOWED = (1, 2, 3, 7, 15, 16, 21, 23, 27, 29, 30, 38, 39, 41, 42)
"""PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_GET_KEEPCAPS, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP,
PR_CAPBSET_READ, PR_GET_SECUREBITS, PR_SET_TIMERSLACK, PR_GET_TIMERSLACK, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS,
PR_SET_THP_DISABLE, PR_GET_THP_DISABLE. Others take memory of the kernel that no limit counts (PR_FUTEX_HASH,
PR_SET_SECCOMP) or are for debuggers and init processes."""
SOCKET_FACTS_ALLOWED = (2, 3, 4, 6, 7, 8, 9, 13, 15, 16, 17, 18, 19, 20, 21, 30, 38, 39, 66, 67)
"""The options below, and SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_PEERCRED, SO_SNDLOWAT, SO_ACCEPTCONN, SO_PROTOCOL,
SO_DOMAIN. Cookies count the sockets and network namespaces of the machine."""
SOCKET_OPTIONS_ALLOWED = (2, 6, 9, 13, 15, 16, 18, 20, 21, 66, 67)
"""SO_REUSEADDR, SO_BROADCAST, SO_KEEPALIVE, SO_LINGER, SO_REUSEPORT, SO_PASSCRED, SO_RCVLOWAT and timeouts. Not the
sizes of buffers, which are memory that no limit counts."""
TCP_OPTIONS_ALLOWED, IPV6_OPTIONS_ALLOWED = (1, 4, 5, 6, 18), (26,)
"""TCP_NODELAY, the TCP_KEEP options, TCP_USER_TIMEOUT; IPV6_V6ONLY."""
SHARED_MAP, MAP_KIND = 0x21, 0x2F  # MAP_SHARED | MAP_ANONYMOUS; MAP_TYPE | MAP_ANONYMOUS
ADVICE_REFUSED = (12, 13, 20, 21, 25, 100, 101)
"""MADV_MERGEABLE and UNMERGEABLE, COLD, PAGEOUT, COLLAPSE, HWPOISON, SOFT_OFFLINE: they affect pages of others."""

Code = tuple[bytes, ...]
"""A sequence of instructions that ends in a return on every branch."""


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def answer(error: int) -> bytes:
    """Return this error without making the call; 0 reports success."""
    return instruction(RETURN, ERRNO | error)


ALLOWING = instruction(RETURN, ALLOW)
KILLING = instruction(RETURN, KILL)
ASKING = instruction(RETURN, ASK)
REFUSING = answer(errno.EPERM)
MISSING = answer(errno.ENOSYS)
DONE = answer(0)


def load_argument(index: int) -> bytes:
    """Load the low half: except for pointers, all arguments checked here are 32 bits wide."""
    return instruction(LOAD, AT_ARGUMENTS + 8 * index)


def switch(index: int, cases: Iterable[tuple[int, Code]], otherwise: Code, mask: int | None = None) -> Code:
    """The code to run for each value of an argument, or of its bits in `mask`."""
    body = [load_argument(index)] if mask is None else [load_argument(index), instruction(AND, mask)]
    for value, code in cases:
        body += [instruction(JUMP_EQUAL, value, 0, len(code)), *code]
    return (*body, *otherwise)


def one_of(index: int, values: Iterable[int], otherwise: bytes) -> Code:
    """Allowed with one of these values of an argument."""
    return switch(index, [(value, (ALLOWING,)) for value in values], (otherwise,))


def none_of(index: int, values: Iterable[int], otherwise: bytes) -> Code:
    return switch(index, [(value, (otherwise,)) for value in values], (ALLOWING,))


def without_bits(index: int, bits: int, otherwise: bytes) -> Code:
    return (load_argument(index), instruction(JUMP_SET, bits, 0, 1), otherwise, ALLOWING)


def only_zero(*arguments: int) -> Code:
    """Allowed when each of these arguments is 0."""
    body: list[bytes] = []
    for index in arguments:
        body += [load_argument(index), instruction(JUMP_EQUAL, 0, 1, 0), REFUSING]
    return (*body, ALLOWING)


def fcntl_rule() -> Code:
    """Report locks as taken without taking them: every program that can open the file would see them."""
    cases: list[tuple[int, Code]] = [(value, (ALLOWING,)) for value in FCNTL_ALLOWED]
    cases += [(value, (DONE,)) for value in FCNTL_LOCKS]
    return switch(1, cases, (answer(errno.EINVAL),))


def asking(index: int, otherwise: bytes) -> Code:
    """Allowed with a null pointer, with which the call only queries."""
    is_null = instruction(JUMP_EQUAL, 0, 1, 0), otherwise
    high_half = instruction(LOAD, AT_ARGUMENTS + 8 * index + 4)
    return (load_argument(index), *is_null, high_half, *is_null, ALLOWING)


def priority_rule(slot: int) -> Code:
    """Allow setting priorities, except of the slot and, by number 0, of the caller's group, which may be the slot's."""
    group = none_of(1, (slot, 0), REFUSING)
    return switch(0, [(0, none_of(1, (slot,), REFUSING)), (1, group)], (REFUSING,))


def signal_rule(slot: int) -> Code:
    """Refuse signals to the slot: SIGUSR1 makes it end a call, which only the daemon may request. A negative number
    means a group, except that -1 means all processes but the first of a pid namespace."""
    return none_of(0, {slot, 2**32 - slot} - {2**32 - 1}, REFUSING)


def open_rule(index: int) -> Code:
    """index: position of the flags. Landlock did not cover truncating without writing before Linux 6.2. A file of
    O_TMPFILE leaves no trace in its folder, but uses up an inode number."""
    otherwise = without_bits(index, O_TMPFILE, answer(errno.EOPNOTSUPP))
    truncating = [(O_TRUNC | mode, (REFUSING,)) for mode in (O_RDONLY, O_ACCMODE)]
    return switch(index, truncating, otherwise, O_TRUNC | O_ACCMODE)


def socket_rule(families: Mapping[int, Iterable[int]], types: Iterable[int]) -> Code:
    """Allow sockets of these families, each with its protocols, and of these types."""
    found = []
    for family, protocols in families.items():
        allowed = one_of(2, protocols, REFUSING)
        found.append((family, switch(1, [(kind, allowed) for kind in types], (REFUSING,), SOCK_TYPE_MASK)))
    return switch(0, found, (REFUSING,))


def options_rule(allowed: Iterable[int], network: bool) -> Code:
    """allowed: options of the level SOL_SOCKET."""
    levels = [(SOL_SOCKET, allowed)]
    if network:
        levels += [(IPPROTO_TCP, TCP_OPTIONS_ALLOWED), (IPPROTO_IPV6, IPV6_OPTIONS_ALLOWED)]
    return switch(1, [(level, one_of(2, options, REFUSING)) for level, options in levels], (REFUSING,))


def build(
    machine: str, *, private_files: bool, own_files: bool, slot: int | None, network: bool = False, counted: bool = True
) -> bytes:
    """The filter as an array of sock_filter. `private_files`: only the program's own files are visible, so AF_UNIX may
    be used; `own_files`: the program runs as the user who started us and may see their files, so modes and times may
    not be changed; `slot`: process id of the slot if every other process of its user belongs to the program, else None;
    `network`: the program has its own network, which it may use; `counted`: a control group counts its memory. Raises
    KeyError like `tables`."""
    known = tables(machine)
    local: dict[int, tuple[int, ...]] = {AF_UNIX: (0, AF_UNIX)} if private_files else {}
    protocols: tuple[int, ...] = (0, IPPROTO_TCP, IPPROTO_UDP)
    inet = dict.fromkeys((AF_INET, AF_INET6), protocols) if network else {}
    treatments: dict[str, Code] = {
        "allowed": (ALLOWING,),
        "attributes": (answer(errno.EOPNOTSUPP),),
        "on-itself": only_zero(0),
        "no-op": (DONE,),
        "changing-modes": (REFUSING if own_files else ALLOWING,),
        "on-private-files": (ALLOWING if private_files else REFUSING,),
        "on-private-attributes": (ALLOWING if private_files else answer(errno.EOPNOTSUPP),),
        "naming-sockets": (ALLOWING if private_files or network else REFUSING,),
        "signalling": (ALLOWING,) if slot is None else signal_rule(slot),
        "inspected": (MISSING,),
    }
    codes = {name: treatments[heading] for heading, table in known.items() for name in table}
    codes |= {
        "fcntl": fcntl_rule(),
        "ioctl": one_of(1, IOCTL_ALLOWED, answer(errno.ENOTTY)),
        # If no namespace confines signals, each program installs a filter of its own: see `deny_signals`.
        "prctl": one_of(0, (*PRCTL_ALLOWED, *(() if private_files else (linux.PR_SET_SECCOMP,))), answer(errno.EINVAL)),
        "getsockopt": options_rule(SOCKET_FACTS_ALLOWED, network),
        "setsockopt": options_rule(SOCKET_OPTIONS_ALLOWED, network),
        "open": open_rule(1),
        "openat": open_rule(2),
        "statx": without_bits(3, STATX_MNT_ID_UNIQUE, answer(errno.EINVAL)),
        "madvise": none_of(2, ADVICE_REFUSED, answer(errno.EINVAL)),
        # Pages that a process has filled and unmapped stay while another byte of their mapping is left.
        "mmap": (ALLOWING,) if counted else switch(3, [(SHARED_MAP, (REFUSING,))], (ALLOWING,), MAP_KIND),
        # A file keeps the rules of the process that opened it, in memory of the kernel that only a group counts.
        "landlock_add_rule": (ALLOWING if network else MISSING,),
        "setpgid": (ALLOWING,) if slot is None else none_of(1, (slot,), REFUSING),
        # SIGCHLD: report success without installing the handler, because the kernel would drop the CPU time and memory
        # of children whose parent ignores them. A program with a network is not measured, and Node needs the signal.
        "rt_sigaction": (ALLOWING,) if network else switch(0, [(SIGCHLD, asking(1, DONE))], (ALLOWING,)),
        "clone": without_bits(0, NOT_CLONED, REFUSING),
        "clone3": (MISSING,),  # its flags lie in memory; libc falls back to clone
        # Datagrams may be sent to any visible receiver; for AF_UNIX, SOCK_RAW is another name for them.
        "socket": socket_rule(local | inet, ANY),
        "socketpair": socket_rule({AF_UNIX: (0, AF_UNIX)}, ANY if private_files else CONNECTED),
        # Core files stay limited to one byte: at 0 the kernel would still start a program that handles cores.
        "setrlimit": none_of(0, [RLIMIT_CORE], REFUSING),
        "prlimit64": switch(0, [(0, switch(1, [(RLIMIT_CORE, asking(2, REFUSING))], (ALLOWING,)))], (REFUSING,)),
        "setpriority": only_zero(0, 1) if slot is None else priority_rule(slot),
    }
    if slot is not None:
        codes["tgkill"] = codes["rt_tgsigqueueinfo"] = switch(0, [(slot, (REFUSING,))], none_of(1, (slot,), REFUSING))
    found = {number: codes[name] for table in known.values() for name, number in table.items()}
    return assembled(machine, found, (MISSING,))


def build_without_signals(machine: str) -> bytes:
    """A second, small filter: the process may send no signal, not even to itself. Raises KeyError like `tables`."""
    return assembled(machine, dict.fromkeys(tables(machine)["signalling"].values(), (REFUSING,)), (ALLOWING,))


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
    """The call numbers from 0 on, split into runs with equal code: first number and code of each run."""
    runs: list[tuple[int, Code]] = []
    for number in range(max(found) + 2):
        body = found.get(number, others)
        if not runs or runs[-1][1] != body:
            runs.append((number, body))
    return runs


def tree(runs: list[tuple[int, Code]]) -> Code:
    """A binary search for the run that contains the loaded number: for every call as many comparisons as the list's
    length has binary digits."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    first, below, above = runs[middle][0], tree(runs[:middle]), tree(runs[middle:])
    if len(below) <= FARTHEST:
        return (instruction(JUMP_AT_LEAST, first, len(below), 0), *below, *above)
    return (instruction(JUMP_AT_LEAST, first, 0, 1), instruction(JUMP, len(below)), *below, *above)


def install(code: bytes) -> None:
    """Load a filter for this process and all it starts. Needs no_new_privs. Raises OSError."""
    head, _ = loadable(code)
    linux.prctl(linux.PR_SET_SECCOMP, 2, ctypes.addressof(head), what="seccomp")


def loadable(code: bytes) -> tuple[Any, Any]:
    """The kernel's sock_fprog, and what it points to."""
    buffer = ctypes.create_string_buffer(code, len(code))
    return ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))), buffer


def ask_before_forks() -> int:
    """Load a filter by which this process, and all that it starts, ask at the returned descriptor before they start a
    process or a thread (`daemon.watch.Forks`). Needs no_new_privs, and that no other filter asks. Since Linux 5.5.
    Raises OSError, and KeyError like `tables`."""
    machine = linux.machine()
    numbers = {name: number for table in tables(machine).values() for name, number in table.items()}
    asking = {numbers[name]: (ASKING,) for name in ("fork", "vfork", "clone") if name in numbers}
    head, _ = loadable(assembled(machine, asking, (ALLOWING,)))
    flags = ctypes.c_uint(SET_FILTER), ctypes.c_uint(NEW_LISTENER)
    return linux.syscall(SECCOMP[machine], *flags, head, what="seccomp")


def deny_signals() -> None:
    """Load the second filter for this process and all it starts."""
    install(build_without_signals(linux.machine()))
