"""Second kernels are told by evidence, and what is asked of them is refused without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocstar.sandbox import host_life, jail, second_kernel
from rocstar.sandbox.crew import Crew, Terms
from rocstar.sandbox.groups import Groups
from rocstar.sandbox.roster import Roster
from rocstar.sandbox.second_kernel import Evidence
from rocstar.sandbox.tiers import BARE
from rocstar.sandbox.wire import HostInfo, Isolation, SandboxDown, info_message, parse_info

TABLE = b"FACP\x14\x01\x00\x00\x06\x66%b" + bytes(20)
RENTED = {  # what a rented virtual machine shows, its hypervisor named wherever that is usual
    "proc/version": b"Linux version 6.8.0-azure (buildd@lcy02) #1 SMP",
    "proc/cmdline": b"BOOT_IMAGE=/vmlinuz-6.8 root=/dev/vda1 ro console=ttyS0",
    "proc/mounts": b"/dev/vda1 / ext4 rw 0 0\nhome /home virtiofs rw 0 0\n",
    "proc/cpuinfo": b"flags : fpu hypervisor lahf_lm\n",
    "sys/firmware/acpi/tables/FACP": TABLE % b"BOCHS ",
    "sys/firmware/acpi/tables/DSDT": b"DSDT\x14\x01\x00\x00\x06\x66BOCHS " + b"FIRECK",
    "sys/class/dmi/id/sys_vendor": b"QEMU\n",
}
SMALLEST = b"console=ttyS0 reboot=k panic=1 pci=off virtio_mmio.device=4K@0xd0000000:5"


def seen(log: bytes = b"", without: str = "sys/", **files: bytes) -> Evidence:
    """The rented machine with some of its files replaced; `without`: those that are not there then."""
    kept = {path: text for path, text in RENTED.items() if not (files and path.startswith(without))}
    return Evidence({**kept, **{path.replace("__", "/"): text for path, text in files.items()}}, log)


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        (Evidence(), ""),
        (Evidence(RENTED), ""),
        (Evidence(RENTED, b"[    0.000000] Linux version 6.8\n[    9.1] app: Starting gVisor...\n"), ""),
        (Evidence(RENTED, b"[    0.000000] Starting gVisor...\n[    0.2] Creating process schedule...\n"), "gvisor"),
        (seen(proc__cmdline=b"quiet systemd.unit=kata-containers.target agent.log=debug"), "kata"),
        (seen(proc__mounts=b"kataShared / virtiofs rw,relatime 0 0\n"), "kata"),
        (seen(proc__mounts=b"/dev/vda1 / ext4 rw 0 0\nx /kataShared virtiofs rw 0 0\n"), ""),
        (seen(sys__firmware__acpi__tables__FACP=TABLE % b"FIRECK"), "firecracker"),
        (seen(proc__cmdline=SMALLEST), "microvm"),
        (seen(proc__cmdline=SMALLEST, without="nothing"), ""),
    ],
)
def test_only_evidence_counts(evidence: Evidence, name: str) -> None:
    assert second_kernel.name(evidence) == name


def test_what_cannot_be_read_is_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_bytes(b"Linux")
    (tmp_path / "proc/cmdline").mkdir()
    assert second_kernel.gathered(tmp_path).files == {"proc/version": b"Linux"}


def checked(walls: jail.Plan, inner: str, **config: Any) -> HostInfo:
    terms = Terms(size=1, grace_seconds=1.0, workdirs="", compiled=True, groups=Groups())
    roster = Roster((), terms, jail.PLANS)
    crew = Crew(BARE, 0, terms, lambda: None)
    crew.plan = walls
    given = {"min_isolation": "L1", "slots": 1, "preload": [], "node": "n", **config}
    return host_life.checked_info(roster, crew, (), given, inner)


def test_a_second_kernel_around_namespaces_is_the_highest_level_and_is_named() -> None:
    info = checked(jail.ROOT, "gvisor", min_isolation="L4")
    assert (info.isolation, info.walls, info.second_kernel) == (Isolation.L4, Isolation.L3, "gvisor")
    assert parse_info(info_message(info)) == info


def test_a_second_kernel_does_not_replace_namespaces() -> None:
    info = checked(jail.CONFINED, "firecracker")
    assert (info.isolation, info.walls, info.second_kernel) == (Isolation.L2, Isolation.L2, "firecracker")


@pytest.mark.parametrize(("walls", "inner"), [(jail.ROOT, ""), (jail.CONFINED, "kata"), (jail.PROCESS, "")])
def test_asking_for_one_where_there_is_none_is_refused(walls: jail.Plan, inner: str) -> None:
    with pytest.raises(SandboxDown, match="min_isolation asks for L4"):
        checked(walls, inner, min_isolation="L4")
