"""Memory and processes of whole calls: by control groups, and by the watch where there are none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.sandbox import groups, stale, watch
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.groups import Group, Tree
from rocstar.sandbox.jail import PLANS, USER
from rocstar.sandbox.membership import FIRST_TO_KILL
from rocstar.sandbox.wire import ProgramOutcome
from tests.sandbox.support import eventually, program_processes, run, slot_processes
from tests.sandbox.ways import launched

OWN_V1 = "9:name=systemd:/\n8:pids:/\n4:memory:/service/worker\n0::/\n"
MOUNTS_V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 /pod /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
BOMB = """
import os, time
for n in range(9):
    if os.fork() == 0:
        held = bytearray(b"x") * (60 * 2**20)
        time.sleep(60)
        os._exit(len(held) % 2)
os.wait()
"""


@pytest.fixture
def counted() -> Iterator[groups.Groups]:
    found = groups.found()
    if not found.folders:
        pytest.skip("no control group can be made below the one these tests run in")
    yield found
    found.close()


@pytest.fixture(params=range(len(PLANS) - 1), ids=[plan.name for plan in PLANS[:-1]])
def uncounted(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    """A sandbox as it is where no groups can be made."""
    client = SandboxClient(slots=1, preload=(), skip_plans=request.param)
    client.settings["groups"] = False
    yield from launched(client, request.param)


def groups_of(client: SandboxClient) -> set[str]:
    """Names of the groups that a host has made, as its slots see them."""
    lines = "".join(Path(f"/proc/{slot.pid}/cgroup").read_text() for slot in slot_processes(client))
    return {part for line in lines.split() for part in line.split("/") if part.startswith(groups.PREFIX)}


def all_groups() -> set[str]:
    folders = (f"{folder}/{name}" for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    return {os.path.basename(folder) for folder in folders}


def test_hierarchies_are_found_where_this_process_is_in_them() -> None:
    found = list(groups.trees(OWN_V1, MOUNTS_V1))
    assert found[:2] == [
        Tree(version=1, controllers=frozenset({"memory"}), folder=Path("/sys/fs/cgroup/memory/service/worker")),
        Tree(version=1, controllers=frozenset({"pids"}), folder=Path("/sys/fs/cgroup/pids")),
    ]
    assert {tree.version for tree in found[2:]} == {2}


def test_groups_of_version_2_are_enabled_limited_and_read(tmp_path: Path) -> None:
    parent = tmp_path / "delegated"
    parent.mkdir()
    (parent / "cgroup.subtree_control").write_text("cpu")
    groups.enable(parent, frozenset({"memory", "pids"}))
    assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids"
    names = ("cgroup.procs", "memory.max", "memory.swap.max", "memory.current", "memory.events", "pids.max")
    for name in names:
        (parent / name).write_text("")
    (parent / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    group = Group({"memory": parent, "pids": parent}, {"memory": 2, "pids": 2})
    assert group.procs == (f"{parent}/cgroup.procs",)
    group.limit(1000, 17)
    texts = [(parent / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")]
    assert texts == ["1000", "0", "17"]
    assert not group.killed()
    (parent / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert (group.killed(), group.killed()) == (True, False)
    group.close()


def test_a_limit_is_written_only_when_it_changes(counted: groups.Groups) -> None:
    group = counted.open("one")
    assert group is not None
    if "pids" not in group.controllers:
        pytest.skip("processes cannot be counted here")
    group.limit(2**28, 5)
    (group.folders["pids"] / "pids.max").write_text("9")
    group.limit(2**28, 5)
    assert (group.folders["pids"] / "pids.max").read_text() == "9\n"
    group.limit(2**28, 6)
    assert (group.folders["pids"] / "pids.max").read_text() == "6\n"


def test_nothing_of_them_remains_when_the_service_ends() -> None:
    with SandboxClient.start(slots=2, preload=()) as client:
        if "no_memory_cgroup" in client.info().failed_probes:
            pytest.skip("no control group can be made here")
        asyncio.run(run(client, "1"))
        own = groups_of(client)
        assert own & all_groups()
    assert eventually(lambda: not own & all_groups())


def test_what_a_killed_service_left_is_removed_at_the_next_start() -> None:
    client = SandboxClient.start(slots=1, preload=())
    own = groups_of(client)
    client.process.send_signal(signal.SIGKILL)
    client.close()
    workdirs = client.workdirs
    os.makedirs(workdirs, exist_ok=True)  # as if its client had died with it
    with SandboxClient.start(slots=1, preload=()):
        assert eventually(lambda: not Path(workdirs).exists())
    if own:
        assert eventually(lambda: swept(own))


def swept(own: set[str]) -> bool:
    """Starts are what sweeps; processes of the killed host may have been there for a moment during the last."""
    groups.found().close()
    return not own & all_groups()


def test_folders_of_the_living_are_kept_and_of_the_dead_removed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from rocstar.sandbox import stale;"
        "print(stale.made_and_locked(lambda: pathlib.Path(sys.argv[1]))[0], flush=True); time.sleep(60)"
    )
    owners = []
    for name in ("box-dead", "box-alive"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        owners.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for owner in owners:
        assert owner.stdout is not None
        assert owner.stdout.readline()
    owners[0].kill()
    owners[0].wait()
    (tmp_path / "box-dead" / "left").write_text("x")
    (tmp_path / "other").mkdir()
    stale.sweep(tmp_path, "box-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box-alive", "other"]
    owners[1].kill()
    owners[1].wait()
    for owner in owners:
        assert owner.stdout is not None
        owner.stdout.close()


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_programs_are_to_be_killed_before_their_slot(client: SandboxClient) -> None:
    task = asyncio.ensure_future(run(client, "import time\ntime.sleep(20)"))
    assert await asyncio.to_thread(eventually, lambda: bool(program_processes(client)))
    program = program_processes(client)[0]
    assert score(program.pid) == FIRST_TO_KILL
    assert {score(slot.pid) for slot in slot_processes(client)} == {score(os.getpid())}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cell_over_its_memory_is_told_and_its_session_goes_on(own_client: SandboxClient) -> None:
    if "no_memory_cgroup" in own_client.info().failed_probes:
        pytest.skip("no control group can be made here")
    async with own_client.open_session() as session:
        assert (await session.run("held = bytearray(b'x') * (50 * 2**20)\nlen(held)")).committed
        response = await session.run(BOMB.replace("range(9)", "range(14)"))
        assert (response.outcome, response.kill_reason) == (ProgramOutcome.MEMORY, "memory")
        assert (await session.run("len(held)")).value == str(50 * 2**20)


# Without groups


async def test_memory_of_a_call_is_watched_where_it_is_not_counted(uncounted: SandboxClient) -> None:
    assert "no_memory_cgroup" in uncounted.info().failed_probes
    response = await run(uncounted, BOMB, memory_bytes=80 * 2**20, processes=12)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.MEMORY, "memory")
    assert (await run(uncounted, "1")).value == "1"


async def test_what_processes_share_is_counted_once(uncounted: SandboxClient) -> None:
    code = """
import os, time
held = bytearray(b"x") * (60 * 2**20)
for n in range(9):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
print(len(held))
"""
    response = await run(uncounted, code, memory_bytes=160 * 2**20, processes=12)
    assert (response.outcome, response.stdout) == (ProgramOutcome.OK, f"{60 * 2**20}\n")


@pytest.mark.parametrize("uncounted", [PLANS.index(USER)], ids=["user"], indirect=True)
async def test_processes_of_a_call_are_watched_where_nothing_limits_them(uncounted: SandboxClient) -> None:
    assert "no_process_limit" not in uncounted.info().failed_probes
    code = "import os, time\nfor n in range(40):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    response = await run(uncounted, code, processes=60, wall_seconds=1.0)
    assert response.outcome is ProgramOutcome.WALL_TIMEOUT
    if os.geteuid() == 0:  # elsewhere RLIMIT_NPROC is in force, and the fork fails
        response = await run(uncounted, code, processes=8)
        assert (response.outcome, response.kill_reason) == (ProgramOutcome.SIGNAL, "processes")
    assert (await run(uncounted, "1")).value == "1"


def test_threads_count_as_processes(tmp_path: Path) -> None:
    for path in ("7/task/7", "7/task/8", "7/task/9", "5/task/5"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "children").write_text("7 " if path == "5/task/5" else "")
    assert watch.descendants(5, tmp_path) == [7]
    assert watch.threads(7, tmp_path) == 3
