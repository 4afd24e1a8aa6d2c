"""What counts as evidence of a second kernel around the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.sandbox.daemon.main import Evidence, gather, kernel_named

TABLE = b"FACP\x14\x01\x00\x00\x06\x66%b" + bytes(20)
RENTED = {  # what a rented virtual machine shows, its hypervisor named wherever that is usual
    "proc/cmdline": b"BOOT_IMAGE=/vmlinuz-6.8 root=/dev/vda1 ro console=ttyS0",
    "proc/mounts": b"/dev/vda1 / ext4 rw 0 0\nhome /home virtiofs rw 0 0\n",
    "proc/cpuinfo": b"flags : fpu hypervisor lahf_lm\n",
    "sys/firmware/acpi/tables/FACP": TABLE % b"BOCHS ",
    "sys/firmware/acpi/tables/DSDT": b"DSDT\x14\x01\x00\x00\x06\x66BOCHS " + b"FIRECK",
    "sys/class/dmi/id/sys_vendor": b"QEMU\n",
}
SMALLEST = b"console=ttyS0 reboot=k panic=1 pci=off virtio_mmio.device=4K@0xd0000000:5"


def seen(without: str = "sys/", **files: bytes) -> Evidence:
    """The rented machine with some of its files replaced; `without`: those that are not there then."""
    kept = {path: text for path, text in RENTED.items() if not (files and path.startswith(without))}
    return {**kept, **{path.replace("__", "/"): text for path, text in files.items()}}


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        ({}, ""),
        (RENTED, ""),
        ({**RENTED, "log": b"[    0.000000] Linux version 6.8\n[    9.1] app: Starting gVisor...\n"}, ""),
        ({**RENTED, "log": b"[    0.000000] Starting gVisor...\n[    0.2] Creating process schedule...\n"}, "gvisor"),
        (seen(proc__cmdline=b"quiet systemd.unit=kata-containers.target agent.log=debug"), "kata"),
        (seen(proc__mounts=b"kataShared / virtiofs rw,relatime 0 0\n"), "kata"),
        (seen(proc__mounts=b"/dev/vda1 / ext4 rw 0 0\nx /kataShared virtiofs rw 0 0\n"), ""),
        (seen(sys__firmware__acpi__tables__FACP=TABLE % b"FIRECK"), "firecracker"),
        (seen(proc__cmdline=SMALLEST), "microvm"),
        (seen(proc__cmdline=SMALLEST, without="nothing"), ""),
    ],
)
def test_only_evidence_counts(evidence: Evidence, name: str) -> None:
    assert kernel_named(evidence) == name


def test_what_cannot_be_read_is_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_bytes(b"none / tmpfs rw 0 0")
    (tmp_path / "proc/cmdline").mkdir()
    assert gather(tmp_path).keys() == {"proc/mounts", "log"}
