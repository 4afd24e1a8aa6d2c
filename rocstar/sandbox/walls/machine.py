"""What is known about the machine: whether its kernel is one of its own (gVisor, or a small virtual machine made to
hold one workload), and what a program can really reach here.

A second kernel is recognised by evidence that only it leaves, and never by the processor's hypervisor flag, which every
rented machine has. The evidence is the operator's surroundings, not the programs': it is read once, before any program
runs. It cannot tell who else lives in here: what shares the guest with the sandbox is behind the same, first kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rocstar.sandbox.walls import linux

FILE_BYTES = 65536
EVIDENCE = (
    "proc/version",
    "proc/cmdline",
    "proc/mounts",
    "sys/firmware/acpi/tables/FACP",
    "sys/firmware/acpi/tables/DSDT",
    "sys/class/dmi/id/sys_vendor",
)

PROBE = r"""
import ctypes, os, socket, sys

def readable(path):
    try:
        with open(path) as file:
            file.read(1)
        return True
    except OSError:
        return False

def writable(folder):
    try:
        os.close(os.open(f"{folder}/.probe", os.O_CREAT | os.O_WRONLY))
    except OSError:
        return False
    os.unlink(f"{folder}/.probe")
    return True

def network():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
        return True
    except OSError:
        return False

def may_signal(pid):
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False

if any(readable(path) for path in ("/etc/hosts", "/etc/group", "/etc/hostname", "/etc/fstab")):
    print("files_visible")
if any(writable(folder) for folder in ("/", "/usr", "/var/tmp", "/dev", sys.prefix, sys.base_prefix)):
    print("files_writable")
if readable(f"/proc/{os.getppid()}/stat"):
    print("proc_visible")
if network():
    print("network_reachable")
if may_signal(os.getppid()):
    print("processes_signalable")
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    print("namespaces_allowed")
"""
"""A program that prints a name for each property that the walls should give and do not, one a line."""


Evidence = Mapping[str, bytes]
"""Content of those of EVIDENCE that exist and may be read, and of the kernel's log as `log`."""


def second_kernel() -> str:
    """`gvisor`, `kata`, `firecracker`, `microvm` (one whose maker cannot be told), or nothing."""
    return name(gather())


def gather(root: Path = Path("/")) -> Evidence:
    files = {"log": linux.kernel_log(FILE_BYTES)}
    for path in EVIDENCE:
        with suppress(OSError), open(root / path, "rb") as file:
            files[path] = file.read(FILE_BYTES)
    return files


def name(evidence: Evidence) -> str:
    tests = {"gvisor": is_gvisor, "kata": is_kata, "firecracker": is_firecracker, "microvm": is_microvm}
    return next((found for found, test in tests.items() if test(evidence)), "")


def is_gvisor(evidence: Evidence) -> bool:
    """Its kernel log is made up and begins with its name; a real log holds times and may quote any text later on."""
    return b"Starting gVisor" in evidence.get("log", b"").split(b"\n", 1)[0]


def is_kata(evidence: Evidence) -> bool:
    """The guest's kernel is told to start its agent, or the root comes over the agent's shared file system."""
    has_agent = b"systemd.unit=kata-containers.target" in evidence.get("proc/cmdline", b"").split()
    return has_agent or b"\nkataShared " in b"\n" + evidence.get("proc/mounts", b"")


def is_firecracker(evidence: Evidence) -> bool:
    """The tables of its hardware bear its name, in the field for their maker."""
    return any(evidence[path][10:16] == b"FIRECK" for path in evidence if "/acpi/" in path)


def is_microvm(evidence: Evidence) -> bool:
    """It has neither such tables nor a maker's name, and its devices stand on the kernel's command line: the smallest
    of machines, which are made for one workload."""
    lists_devices = b"virtio_mmio.device=" in evidence.get("proc/cmdline", b"")
    return lists_devices and not any(path.startswith("sys/") for path in evidence)
