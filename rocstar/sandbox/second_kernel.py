"""Whether this machine's kernel is one of its own: gVisor, or a small virtual machine made to hold one workload.

Told by evidence that only those leave, and never by the processor's hypervisor flag, which every rented machine has.
The evidence is the operator's surroundings, not the programs': it is looked at once, before any program runs. It cannot
tell who else lives in here: what shares the guest with the sandbox is behind the same, first kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rocstar.sandbox import linux

KERNEL_LOG = {"x86_64": 103, "aarch64": 116}  # the system call `syslog`
READ_ALL = 3
LOG_BYTES = 65536
EVIDENCE = (
    "proc/version",
    "proc/cmdline",
    "proc/mounts",
    "sys/firmware/acpi/tables/FACP",
    "sys/firmware/acpi/tables/DSDT",
    "sys/class/dmi/id/sys_vendor",
)


@dataclass(frozen=True, slots=True)
class Evidence:
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content of those of EVIDENCE that are there and may be read."""
    log: bytes = b""
    """The kernel's log; empty where it may not be read."""

    def text(self, path: str) -> str:
        return self.files.get(path, b"").decode("utf-8", "replace")


def gathered(root: Path = Path("/")) -> Evidence:
    files = {}
    for path in EVIDENCE:
        try:
            files[path] = (root / path).read_bytes()[:LOG_BYTES]
        except OSError:
            continue
    return Evidence(files, kernel_log())


def kernel_log() -> bytes:
    buffer = ctypes.create_string_buffer(LOG_BYTES)
    number = KERNEL_LOG.get(linux.machine())
    if number is None:
        return b""
    try:
        size = linux.syscall(number, ctypes.c_int(READ_ALL), buffer, ctypes.c_int(LOG_BYTES), what="syslog")
    except OSError:
        return b""
    return buffer.raw[:size]


def name(evidence: Evidence) -> str:
    """`gvisor`, `kata`, `firecracker`, `microvm` (which of them cannot be told), or nothing."""
    tests = {"gvisor": is_gvisor, "kata": is_kata, "firecracker": is_firecracker, "microvm": is_microvm}
    return next((found for found, test in tests.items() if test(evidence)), "")


def is_gvisor(evidence: Evidence) -> bool:
    """Its kernel log is made up and begins with its name; a host's log holds times and may quote any text later on."""
    first = evidence.log.split(b"\n", 1)[0]
    return b"Starting gVisor" in first


def is_kata(evidence: Evidence) -> bool:
    """The guest's kernel is told to start its agent, or the root comes over the agent's shared file system."""
    agent = "systemd.unit=kata-containers.target" in evidence.text("proc/cmdline").split()
    shared = any(line.split()[:1] == ["kataShared"] for line in evidence.text("proc/mounts").splitlines())
    return agent or shared


def is_firecracker(evidence: Evidence) -> bool:
    """The tables of its hardware bear its name, where the field for their maker is."""
    tables = [evidence.files.get(path, b"") for path in EVIDENCE if "/acpi/" in path]
    return any(table[10:16] == b"FIRECK" for table in tables)


def is_microvm(evidence: Evidence) -> bool:
    """It has neither such tables nor a maker's plate, and its devices stand on the kernel's command line: the smallest
    of machines, which are made for one workload."""
    listed = "virtio_mmio.device=" in evidence.text("proc/cmdline")
    return listed and not any(path.startswith("sys/") for path in evidence.files)
