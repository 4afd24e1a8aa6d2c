"""Control groups, which count the memory and processes of whole calls; the sweep of what dead daemons left; and a
machine that cannot start another process, which is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rocstar.sandbox.walls import cgroups
from rocstar.sandbox.walls.cgroups import ControlGroup, Groups, Tree
from tests.sandbox.driver import Daemon, ended, eventually, group_of

OWN_V1 = "9:name=systemd:/\n8:cpu:/\n4:memory:/service/worker\n0::/\n"
MOUNTS_V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 /pod /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.fixture
def counted() -> Iterator[Groups]:
    found = cgroups.found()
    if not found.folders:
        pytest.skip("no control group can be made below the one these tests run in")
    yield found
    found.close()


def groups_around(*processes: psutil.Process) -> set[str]:
    """Names of the groups that a daemon has made and these are in."""
    texts = [Path(f"/proc/{process.pid}/cgroup").read_text() for process in processes]
    return {part for text in texts for part in text.replace("\n", "/").split("/") if part.startswith(cgroups.PREFIX)}


def all_groups() -> set[str]:
    return {name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names}


def test_hierarchies_are_found_where_this_process_is_in_them() -> None:
    found = list(cgroups.trees(OWN_V1, MOUNTS_V1))
    assert found[:2] == [
        Tree(version=1, controllers=frozenset({"memory"}), folder=Path("/sys/fs/cgroup/memory/service/worker")),
        Tree(version=1, controllers=frozenset({"cpu"}), folder=Path("/sys/fs/cgroup/cpu")),
    ]
    assert {tree.version for tree in found[2:]} == {2}


def test_groups_of_version_2_are_enabled_limited_and_read(tmp_path: Path) -> None:
    parent = tmp_path / "delegated"
    parent.mkdir()
    (parent / "cgroup.subtree_control").write_text("pids")
    cgroups.enable(parent, frozenset({"memory", "cpu"}))
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu +memory"
    names = ("cgroup.procs", "memory.max", "memory.swap.max", "memory.current", "memory.events")
    for name in names:
        (parent / name).write_text("")
    events = parent / "memory.events"
    events.write_text("low 0\noom 2\noom_kill 1\n")
    group = ControlGroup({"memory": parent}, {"memory": 2})
    group.join(77)
    group.limit(1000)
    names = ("cgroup.procs", "memory.max", "memory.swap.max")
    assert [(parent / name).read_text() for name in names] == ["77", "1000", "0"]
    events.write_text("low 0\noom 2\noom_kill 2\n")
    assert not group.killed(), "it was not full itself, but a container around it"
    events.write_text("low 0\noom 3\noom_kill 3\n")
    assert (group.killed(), group.killed()) == (True, False)
    group.close()


def test_only_controllers_that_are_offered_are_asked_for(tmp_path: Path) -> None:
    tree = Tree(version=2, controllers=cgroups.CONTROLLERS, folder=tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset io memory pids\n")
    assert cgroups.offered(tree) == {"memory"}


def test_a_refused_share_of_the_cpu_costs_no_other_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Version 2, as where a real-time process lives: cpu is offered and cannot be enabled."""

    def make_folder(tree: Tree, controllers: frozenset[str]) -> tuple[Path, int]:
        if "cpu" in controllers:
            raise OSError
        return tmp_path, os.open(tmp_path, os.O_RDONLY)

    found = [Tree(2, cgroups.CONTROLLERS, tmp_path / name) for name in ("own", "parent")]
    monkeypatch.setattr(cgroups, "trees", lambda own, mounts: found)
    monkeypatch.setattr(cgroups, "offered", lambda tree: tree.controllers)
    monkeypatch.setattr(cgroups, "make_folder", make_folder)
    groups = cgroups.found()
    assert groups.folders == {"memory": tmp_path}
    os.close(groups.locks[0])


def test_all_slots_together_weigh_as_much_as_a_process_a_core(counted: Groups) -> None:
    if "cpu" not in counted.folders:
        pytest.skip("no group of the cpu controller can be made here")
    name, weight, most = cgroups.WEIGHTS[counted.versions["cpu"]]
    expected = min(weight * len(os.sched_getaffinity(0)), most)
    assert int((counted.folders["cpu"] / name).read_text()) == expected


@pytest.mark.parametrize("plan", [0, 2])
def test_what_a_killed_daemon_left_is_removed_at_the_next_start(plan: int) -> None:
    with Daemon(slots=1, skip_plans=plan) as daemon:
        daemon.run("1")
        own, family = groups_around(*daemon.slots()), daemon.below()
        assert own & all_groups() or "no_memory_cgroup" in daemon.info.failed_probes
        daemon.process.kill()
        assert eventually(lambda: all(map(ended, family)))
    with Daemon(slots=1):
        assert eventually(lambda: not Path(daemon.workdirs).exists())
        # Starts are what sweeps; processes of the killed daemon may have been there for a moment during the last.
        assert not own or eventually(lambda: cgroups.found().close() or not own & all_groups())


def test_programs_and_their_slot_are_killed_before_all_others_and_only_they_are_in_its_group() -> None:
    with Daemon(slots=1) as daemon:
        daemon.begin()
        family = *daemon.programs(), *daemon.slots(), *daemon.keepers()
        scores = [int(Path(f"/proc/{each.pid}/oom_score_adj").read_text()) for each in (*family, psutil.Process())]
        assert scores == [1000, 1000, scores[-1], scores[-1]] and scores[-1] < 1000
        assert not groups_around(family[2])


def test_a_zygote_that_cannot_fork_waits_and_its_calls_are_answered() -> None:
    with group_of("pids") as crowded, Daemon(slots=1) as daemon:
        running = daemon.begin()
        (zygote,) = daemon.zygotes()
        (crowded / "cgroup.procs").write_text(str(zygote.pid))
        (crowded / "pids.max").write_text("1")
        daemon.slots()[0].kill()
        assert daemon.answer(running).outcome == "internal"
        number = daemon.submit("2")
        refused = crowded / "pids.events"
        assert eventually(lambda: refused.read_text().strip() != "max 0")
        (crowded / "pids.max").write_text("max")
        assert (daemon.answer(number).value, zygote.is_running()) == ("2", True)
