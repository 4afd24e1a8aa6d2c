"""Hostile programs that reach for the network, other processes, the machine's files and the kernel, or want to learn
something: secrets, other processes, the call before."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.slot.channel import CONTROL
from tests.attacks.support import REPOSITORY, attack, names, promised, tried
from tests.sandbox.driver import Daemon

NOT_THERE = {"FileNotFoundError", "PermissionError"}
OUTSIDE = [f"/proc/{pid}/{name}" for pid in ("1", os.getpid(), "self") for name in ("environ", "maps", "mem")]
SECRETS = ["/etc/shadow", "/etc/hosts", str(REPOSITORY / "pyproject.toml"), str(REPOSITORY / "rocstar/errors.py")]
KERNEL = ["/dev/kmsg", "/proc/sysrq-trigger", "/sys/power/state", "/proc/self/oom_score_adj"]
KERNEL.append("/proc/sys/vm/drop_caches")
REFUSED: dict[str, tuple[list[str], set[str]]] = {
    "network": (
        [
            "socket.create_connection(('127.0.0.1', 80), 1)",
            "socket.create_connection(('192.0.2.1', 80), 1)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
            "socket.socket(40, socket.SOCK_STREAM)",  # vsock, which namespaces do not contain
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        ],
        {"PermissionError", "OSError"},  # OSError: network unreachable
    ),
    "clock": (
        ["__import__('time').clock_settime(0, 0)", "libc.settimeofday((ctypes.c_long * 2)(1, 1), None)"],
        {"OSError", "-1"},
    ),
    "watches of the operator": (["libc.inotify_init1(0)"] * 300, {"-1"}),
    "processes outside": ([f"open({path!r}, 'rb').read(1)" for path in OUTSIDE], NOT_THERE),
    "files outside": ([f"open({path!r}).read()" for path in SECRETS], NOT_THERE),
    "files of the kernel": ([f"os.open({path!r}, os.O_WRONLY)" for path in KERNEL], NOT_THERE | {"OSError"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_reached_for_is_refused(daemon: Daemon, what: str) -> None:
    calls, errors = REFUSED[what]
    promised(daemon, *(("L2", "L3") if errors >= NOT_THERE else ("L1", "L2", "L3")))
    found = names(daemon, *calls)
    assert len(found) == len(calls) and set(found) <= errors


def test_abstract_sockets_of_the_machine_are_out_of_reach(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"\0rocstar-{os.getpid()}"
        listener.bind(name)
        listener.listen()
        found = names(daemon, f"socket.socket(socket.AF_UNIX).connect({name!r})")
    assert found[0] in {"ConnectionRefusedError", "PermissionError"}


def test_other_processes_cannot_be_signalled(daemon: Daemon) -> None:
    promised(daemon, "L2", "L3")
    bystander = psutil.Popen(["sleep", "60"])
    try:
        calls = [f"os.kill({bystander.pid}, 9)", f"os.kill({os.getpid()}, 0)"]
        found = names(daemon, *calls)
        assert set(found) <= {"PermissionError", "ProcessLookupError"}
        assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        bystander.kill()
        bystander.wait()


def test_its_own_slot_cannot_be_killed_stopped_or_strangled(daemon: Daemon) -> None:
    before = daemon.slots()
    calls = [f"os.kill(os.getppid(), signal.{name})" for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP", "SIGKILL")]
    calls += [
        "__import__('resource').prlimit(os.getppid(), 7, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "os.setpgid(0, os.getppid())",
        "os.setpriority(os.PRIO_PGRP, 0, 19)",
        "os.setpriority(os.PRIO_PGRP, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "libc.ptrace(16, os.getppid(), 0, 0)",
    ]
    if daemon.info.isolation == "L3":  # elsewhere a hole would cost whoever runs this test all their processes
        calls.append("os.kill(-1, 9)")
    attack(daemon, tried(*calls))
    assert daemon.slots() == before
    assert before[0].nice() == psutil.Process().nice()
    assert before[0].cpu_affinity() == psutil.Process().cpu_affinity()


def test_privileged_and_obscure_calls_are_refused(daemon: Daemon) -> None:
    calls = [
        "libc.unshare(0x10000000)",
        "libc.unshare(0x20000)",
        "libc.setns(0, 0)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "libc.umount2(b'/tmp', 0)",
        "libc.chroot(b'/tmp')",
        "libc.ptrace(0, 0, 0, 0)",
        "libc.syscall(321, 0, 0, 0)",  # bpf
        "libc.syscall(250, 0, 0, 0)",  # keyctl
        "libc.syscall(425, 1, 0)",  # io_uring_setup
        "libc.syscall(323, 0)",  # userfaultfd
        "libc.syscall(298, 0, 0, 0, 0, 0)",  # perf_event_open
        "libc.syscall(435, 0, 0)",  # clone3
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone with a new user namespace
        "libc.personality(0xffffffff)",
        "libc.sethostname(b'x', 1)",
        "libc.setuid(os.getuid() + 1)",
        "libc.reboot(0)",
        "libc.syscall(103, 3, 0, 0)",  # syslog
        "libc.syscall(304, -100, 0, 0)",  # open_by_handle_at
        "libc.syscall(246, 0, 0, 0, 0)",  # kexec_load
        "libc.syscall(175, 0, 0, 0)",  # init_module
        "libc.syscall(240, b'/box', 0o102, 0o600, 0)",  # mq_open
        "libc.syscall(311, os.getppid(), 0, 0, 0, 0, 0)",  # process_vm_writev
        "libc.syscall(167, b'/tmp/x', 0)",  # swapon
    ]
    if os.uname().machine != "x86_64":
        pytest.skip("the system-call numbers above are those of x86-64")
    found = names(daemon, *calls)
    assert found == ["-1"] * len(calls)


def test_privileges_cannot_be_had_from_set_uid_programs(daemon: Daemon) -> None:
    code = "import subprocess\nprint(subprocess.run(['/bin/su', '-c', 'id'], capture_output=True).returncode != 0)"
    response = attack(daemon, code)
    assert response.stdout == "True\n" or "Error" in response.stderr


def test_calls_by_x32_numbers_kill_the_caller(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_seccomp")
    if os.uname().machine != "x86_64":
        pytest.skip("x32 is of x86-64")
    code = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('still here')"
    response = attack(daemon, code)
    assert (response.outcome, response.signal, response.stdout) == (ProgramOutcome.SIGNAL, "SIGSYS", "")


def test_calls_that_programs_do_not_need_are_not_there(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_seccomp")
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def answer(number):
    libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    return errno.errorcode[ctypes.get_errno()]
print({number: answer(number) for number in NUMBERS})
"""
    refused = {*range(425, 434), 438, 440, 442, 443, 447, 448, 450}
    unlisted = {*range(451, 457), *range(467, 500), 1000, 5000} - {452}  # fchmodat2 is known
    response = attack(daemon, code.replace("NUMBERS", repr(unlisted | refused | {463})))
    without_attributes = {463: "ENOTSUP"}  # setxattrat: as of a file system that has none
    assert eval(response.stdout) == dict.fromkeys(unlisted | refused, "ENOSYS") | without_attributes


def test_letters_to_sockets_outside_cannot_be_sent_from_a_pair(daemon: Daemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        path = f"{tmp_path}/box"
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.setblocking(False)
        kinds = ("SOCK_DGRAM", "SOCK_RAW")  # the kernel makes the second one like the first
        calls = (f"socket.socketpair(socket.AF_UNIX, socket.{kind})[0].sendto(b'x', {path!r})" for kind in kinds)
        *found, paired = names(daemon, *calls, "bool(socket.socketpair())")
        assert set(found) <= {"PermissionError", "FileNotFoundError"}
        assert paired == "True"  # what asyncio needs
        with pytest.raises(BlockingIOError):
            listener.recv(1)


def test_the_machine_cannot_be_made_to_write_its_disks(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_seccomp")
    found = names(daemon, "os.sync()", "libc.syncfs(os.open('/usr', os.O_RDONLY))")
    assert found[0] == "None"
    assert found[1] in {"-1", "PermissionError"}


def test_system_and_libraries_cannot_be_written(daemon: Daemon) -> None:
    promised(daemon, "L2", "L3")
    libraries = (sys.prefix, sysconfig.get_paths()["purelib"], str(REPOSITORY))
    for where in ("/", "/usr", "/usr/lib", "/etc", "/dev", *libraries):
        # Harmless where the wall has a hole: an empty file of an odd name, and the mode that is there already.
        create = f"os.open({where + '/.rocstar-attack'!r}, os.O_CREAT | os.O_WRONLY)"
        change = f"os.chmod({where!r}, os.stat({where!r}).st_mode & 0o7777)"
        found = names(daemon, create, change)
        assert len(found) == 2 and {*found} <= {"OSError", "PermissionError", "FileNotFoundError"}, where


def test_a_crash_leaves_no_core_file(daemon: Daemon) -> None:
    response = attack(daemon, "import resource, os\nprint(resource.getrlimit(resource.RLIMIT_CORE))\nos.abort()")
    # Where not even oneself may be signalled, the C library ends itself by an instruction that is not permitted.
    assert response.stdout == "(1, 1)\n"  # at 0 a program that handles cores would be started
    assert response.signal == "SIGABRT" or (daemon.info.isolation < "L3" and response.signal == "SIGSEGV")


def test_calls_of_the_32_bit_kind_kill_the_caller(daemon: Daemon) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("int 0x80 is an x86 instruction")
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("still here")
"""
    response = attack(daemon, code)
    assert (response.outcome, response.stdout) == (ProgramOutcome.SIGNAL, "")
    assert response.signal in ("SIGSYS", "SIGSEGV")  # the second where the kernel has no such entry at all


def test_priorities_can_only_be_lowered(daemon: Daemon) -> None:
    calls = [
        "os.nice(-5)",
        "os.setpriority(os.PRIO_PROCESS, 0, -20)",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "libc.mlockall(3)",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_RTPRIO, (1, 1))",
    ]
    found = names(daemon, *calls)
    assert set(found) <= {"PermissionError", "ValueError", "-1", "0"}
    assert found[:3] == ["PermissionError"] * 3


def test_environment_of_the_trainer_is_not_there(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    response = attack(daemon, "import os\nsorted(os.environ)")
    assert response.value is not None
    names = set(eval(response.value))
    assert names <= {"HOME", "PATH", "LANG", "TMPDIR", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}


def test_only_the_interpreter_and_the_libraries_are_there(daemon: Daemon) -> None:
    promised(daemon, "L3")
    response = attack(daemon, "import os\nsorted(os.listdir('/')), os.path.exists('/proc/self')")
    assert response.value is not None
    folders, proc = eval(response.value)
    assert not {"proc", "sys", "home", "var", "run", "boot", "srv"} & set(folders)
    assert proc is False


def test_standard_streams_and_its_report_are_the_only_descriptors(daemon: Daemon) -> None:
    code = """
import os
found = []
for fd in range(1024):
    try: os.fstat(fd); found.append(fd)
    except OSError: pass
print(found)
"""
    assert attack(daemon, code).stdout == f"{[0, 1, 2, CONTROL]}\n"


def test_attributes_of_files_outside_cannot_be_read(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_seccomp")
    if daemon.info.isolation == "L3":
        pytest.skip("there nothing but the interpreter and system libraries is in sight")
    code = "import os, shutil, sys\nos.listxattr(sys.executable)"
    assert attack(daemon, code).exception.type == "OSError"  # type: ignore[union-attr]
    copy = "shutil.copyfile(sys.executable, 'python')\nshutil._copyxattr(sys.executable, 'python')\nprint('copied')"
    assert attack(daemon, f"import shutil, sys\n{copy}").stdout == "copied\n"
