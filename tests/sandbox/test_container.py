"""What the container or job around us permits, read from its control groups: CPU and memory; and what it refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.sandbox import container
from rocstar.sandbox.service.core import daemon_of
from rocstar.sandbox.settings import Settings

V1 = "3:memory:/x\n4:cpu,cpuacct:/x\n8:pids:/x"
NO_LIMIT = "9223372036854771712"


def group_files(folder: Path, group: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"own": group, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder, folder / "own"


@pytest.mark.parametrize(
    ("group", "files", "cpus"),
    [
        ("0::/a/b", {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, [2.5]),
        ("0::/", {"cpu.max": "100000 100000"}, [1.0]),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, [3.0]),
        (V1, {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, []),
    ],
)
def test_a_control_group_may_grant_fewer_cpus(
    tmp_path: Path, group: str, files: dict[str, str], cpus: list[float]
) -> None:
    assert list(container.cpu_shares(*group_files(tmp_path, group, files))) == cpus


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/", {"memory.max": "4000", "memory.current": "1000"}, 4000),
        ("0::/job/step", {"job/memory.max": "3000", "job/memory.current": "0", "job/step/memory.max": "max"}, 3000),
        (V1, {"memory/memory.limit_in_bytes": "2000", "memory/memory.usage_in_bytes": "0"}, 2000),
        (V1, {"memory/x/memory.limit_in_bytes": NO_LIMIT, "memory/x/memory.usage_in_bytes": "5"}, None),
    ],
)
def test_the_least_limit_of_memory_counts_also_of_a_group_above(
    tmp_path: Path, group: str, files: dict[str, str], limit: int | None
) -> None:
    assert container.memory_limit(*group_files(tmp_path, group, files)) == limit


@pytest.mark.parametrize(
    ("folder", "group", "names", "prefix"),
    [
        ("", "0::/", ("memory.max", "memory.current"), ""),
        ("memory/x/", V1, ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_memory_that_the_kernel_fills_with_files_can_still_be_taken(
    tmp_path: Path, folder: str, group: str, names: tuple[str, str], prefix: str
) -> None:
    stat = f"{prefix}anon 100\n{prefix}inactive_file 600\n{prefix}active_file 200"
    files = {folder + names[0]: "1000", folder + names[1]: "950", f"{folder}memory.stat": stat}
    assert container.host_bytes(*group_files(tmp_path, group, files)) == 1000 - (950 - 800)


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert container.memory_limit(tmp_path, tmp_path / "none") is None
    assert container.host_bytes(tmp_path, tmp_path / "none") > 2**20


def test_kills_of_the_kernel_are_counted_where_it_counts_them(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 12\ndrop_pagecache 0\n")
    assert (container.kills(tmp_path / "vmstat"), container.kills(tmp_path / "none")) == (12, 0)
    assert container.kills() >= 0


def test_refused_processes_are_those_at_the_limit_of_our_own_groups(tmp_path: Path) -> None:
    files = {"pids/pids.events": "max 3", "pids/x/pids.events": "max 90", "pids/x/pids.events.local": "max 4"}
    assert container.refused_processes(*group_files(tmp_path, V1, files)) == 7
    assert container.refused_processes(tmp_path, tmp_path / "none") == 0


@pytest.mark.parametrize(("cpus", "slots"), [(64.0, 256), (1.5, 6), (0.1, 1)])
def test_a_service_takes_four_slots_for_each_core_that_it_is_granted(
    monkeypatch: pytest.MonkeyPatch, cpus: float, slots: int
) -> None:
    monkeypatch.setattr(container, "cpus", lambda: cpus)
    assert (daemon_of(Settings()).slots, daemon_of(Settings(slots=5)).slots) == (slots, 5)


def test_files_of_another_kernel_that_say_something_else_limit_nothing(tmp_path: Path) -> None:
    """The daemon reads them at every look, and must go on to look."""
    names = ("memory.max", "memory.current", "memory.stat", "cpu.max", "pids.events")
    place = group_files(tmp_path, "no colon\n0::/", {})
    for name in names:
        (tmp_path / name).write_bytes(b"\xff a b c\nmax\nmax x\noom_kill\n")
    assert (container.memory_limit(*place), list(container.cpu_shares(*place))) == (None, [])
    assert (container.refused_processes(*place), container.kills(tmp_path / "memory.stat")) == (0, 0)
    for name, text in {"memory.max": "2000", "memory.current": "10"}.items():
        (tmp_path / name).write_text(text)
    assert container.memory_limit(*place) == 2000
