"""What a run places by Ray: how much room it wants, what is refused before anything starts, and which Ray it is."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="needs the extra [cluster]")
pytest.importorskip("torch")

import ray
from ray.util.placement_group import placement_group, placement_group_table

import rocstar
from rocstar.cluster import opened_machines, places
from rocstar.cluster.actors import LEARNERS, SANDBOXES, SERVERS, place_requests
from rocstar.cluster.places import PlaceRequest, are_here, connected, own_address, refuse_unshared, release, reserved
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError, Unavailable
from rocstar.parts.placement import Placement, place
from tests.sandbox.driver import eventually

pytestmark = pytest.mark.filterwarnings("ignore")


def recipe(**sections: object) -> Recipe:
    engine = [{"name": "v", "kind": "vllm", "count": 2, "threads": 3}]
    cluster = {"launcher": "ray", "learners": 4, "sandbox_nodes": 2}
    return Recipe.model_validate({"cluster": cluster, "engine": engine, "sandbox": {"slots": 8}, **sections})


def placed(asked: Recipe, *gpus: str, learns: bool = True) -> Placement:
    return place(asked, None, {"here": gpus}, 80e9, learns=learns)


def test_room_is_wanted_for_every_part_once() -> None:
    found = place_requests(recipe(), placed(recipe()), "10.0.0.1")
    assert found[LEARNERS].places == [{"node:10.0.0.1": 0.001}, *[{"CPU": 1}] * 3]
    assert found[SERVERS].places == [{"CPU": 3}] * 2
    assert found[SANDBOXES].places == [{"CPU": 2}] * 2 and found[SANDBOXES].strategy == "SPREAD"


def test_on_gpus_each_learner_and_server_has_one_also_where_one_learner_is_alone() -> None:
    engine = [
        {"name": "v", "kind": "vllm", "count": 2, "threads": 3},
        {"name": "w", "kind": "vllm", "tensor_parallel": 2},
    ]
    asked = recipe(cluster={"launcher": "ray", "learners": 1}, engine=engine)
    found = place_requests(asked, placed(asked, *"01234"), "10.0.0.1")
    assert found[LEARNERS].places == [{"node:10.0.0.1": 0.001, "GPU": 1}]
    assert found[SERVERS].places == [*[{"CPU": 3, "GPU": 1}] * 2, {"CPU": 1, "GPU": 2}]
    assert found[SERVERS].asked_by == "engine.v.count 2 and engine.w.count 1 x tensor_parallel 2"


def test_nothing_is_wanted_for_learners_where_nothing_is_learnt() -> None:
    assert place_requests(recipe(), placed(recipe(), learns=False)).keys() == {SERVERS, SANDBOXES}


@pytest.mark.slow
def test_what_ray_has_no_room_for_is_refused_in_one_sentence_and_nothing_starts(
    two_machines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (
        "cluster.learners 4 and engine.v.count 2 and cluster.sandbox_nodes 2 need 13 CPUs, of which Ray has 5 and 5 "
        "free; ask for less or add machines"
    )
    # Ray counts late, and not in order, what a test before gave back.
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 5.0})
    before = placement_group_table().keys()
    with pytest.raises(ConfigError, match=re.escape(told)), opened_machines(recipe(), tmp_path, placed(recipe())):
        pass
    assert placement_group_table().keys() == before


@pytest.mark.slow
def test_gpus_are_counted_by_machine_as_ray_has_them(two_machines: None, tmp_path: Path) -> None:
    engine = [{"name": "v", "kind": "vllm", "tensor_parallel": 2}]
    asked = recipe(cluster={"launcher": "ray"}, engine=engine)
    told = r"engine.v.count 1 x tensor_parallel 2 need 3 GPUs and there are 2 on machine 0 .* and 0 on machine 1"
    with pytest.raises(ConfigError, match=told), opened_machines(asked, tmp_path, placed(asked, "0", "1", "2")):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taken", "asked", "told"),
    [
        ([2, 3], {"the second": 1}, "the second need 1 CPUs, of which Ray has 5 and 0 free; ask for less"),
        (
            [3],
            {"cluster.learners 2": 2, "the rest": 3},
            "; there was room for cluster.learners 2 and none for the rest; ask for",
        ),
    ],
    ids=["for nothing", "for one of two parts"],
)
def test_room_that_somebody_else_has_is_waited_for_and_then_refused_with_what_there_was_room_for(
    two_machines: None, monkeypatch: pytest.MonkeyPatch, taken: list[int], asked: dict[str, int], told: str
) -> None:
    monkeypatch.setattr(places, "PLACE_SECONDS", 2.5)  # Ray counts whole ones
    requests = {name: PlaceRequest(name, [{"CPU": cpus}]) for name, cpus in asked.items()}
    with (
        reserved({"first": PlaceRequest("the first", [{"CPU": cpus} for cpus in taken])}),
        pytest.raises(ConfigError, match=re.escape(told)),
    ):
        reserved(requests).__enter__()


@pytest.mark.slow
def test_what_lacks_a_place_gives_the_others_back_so_that_two_runs_do_not_wait_for_each_other(
    two_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that started at once each held a part of what the other needed, and both were refused after a minute."""
    monkeypatch.setattr(places, "HOLD_SECONDS", 1.0)
    requests = {"small": PlaceRequest("small", [{"CPU": 2}]), "large": PlaceRequest("large", [{"CPU": 3}])}

    def reserve() -> set[str]:
        with reserved(requests) as groups:
            return {placement_group_table(group)["state"] for group in groups.values()}

    other = placement_group([{"CPU": 3}])  # the large part is the other run's
    assert other.wait(60)
    with ThreadPoolExecutor(1) as pool:
        reserving = pool.submit(reserve)
        assert eventually(lambda: [{"CPU": 2.0}] in [list(group["bundles"].values()) for group in created()])
        rest = placement_group([{"CPU": 2}])
        both = rest.wait(30)
        release(rest)
        release(other)
        assert both, "the small part was not given back"
        assert reserving.result(60) == {"CREATED"}


def created() -> list[dict[str, Any]]:
    return [group for group in placement_group_table().values() if group["state"] == "CREATED"]


@pytest.mark.slow
def test_places_on_another_machine_are_known_as_such(two_machines: None) -> None:
    with reserved({"here": PlaceRequest("", [{"CPU": 1, "GPU": 1}]), "far": PlaceRequest("", [{"CPU": 3}])}) as groups:
        assert are_here(groups["here"]) and not are_here(groups["far"])


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_run_folder_or_has_another_rocstar_is_refused_by_address(
    two_machines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, unseen = tmp_path / "run.json", Path("/proc/self/cmdline")  # every process has another one of these
    seen.write_text("{}")
    with reserved({"there": PlaceRequest("there", [{"CPU": 3}])}) as groups:
        refuse_unshared(groups["there"], seen)
        told = f"Ray places a part of this run on {own_address()}, which does not see {unseen}; put that folder on"
        with pytest.raises(ConfigError, match=re.escape(told)):
            refuse_unshared(groups["there"], unseen)
        (tmp_path / "more.py").write_text("")
        monkeypatch.setattr(rocstar, "__file__", str(tmp_path / "__init__.py"))  # here alone: Ray's process has its own
        with pytest.raises(ConfigError, match=f"{own_address()}, whose rocstar is another than this machine's"):
            refuse_unshared(groups["there"], seen)


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "shared"), [(1, True), (3, False)])
def test_weights_go_through_memory_only_where_all_servers_are_on_this_machine(
    two_machines: None, tmp_path: Path, threads: int, shared: bool
) -> None:
    engine = [{"name": "v", "kind": "vllm", "threads": threads}]
    proof = tmp_path / "run.json"
    proof.write_text("{}")
    asked = recipe(cluster={"launcher": "ray"}, engine=engine, sandbox={"slots": 1, "preload": []})
    others = {"rest": PlaceRequest("the other machine", [{"CPU": 3}])} if shared else {}
    with reserved(others), opened_machines(asked, proof, placed(asked)) as machines:
        assert machines.engines_share_memory is shared


@pytest.mark.parametrize("kind", [ConnectionError, Exception])
def test_a_cluster_that_is_not_reached_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def failed(**settings: object) -> None:
        raise kind("it asks for a token")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where nothing listens, which Ray found after minutes
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", failed)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of the one that the other tests have
    advice = re.escape("; start Ray on this machine as a node of that cluster, and set RAY_AUTH_MODE=token if")
    with pytest.raises(Unavailable, match=rf"at 127\.0\.0\.1:1: .*refused{advice}"), connected(1):
        pass
    with socket.create_server(("127.0.0.1", 0)) as ray_itself:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{ray_itself.getsockname()[1]}")
        with pytest.raises(Unavailable, match=f": it asks for a token{advice}"), connected(1):
            pass


STARTS = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
input()
"""
WATCHES = """
import time
import rocstar
from rocstar.cluster import places
places.LOOK_SECONDS = 0.01
places.end_with_ray()
print("watches", flush=True)
time.sleep(1000)
"""


def test_what_an_actor_does_ends_with_the_ray_that_started_it() -> None:
    """After kill -9 of a machine's raylet its actors went on, and their services and servers with them."""
    command = [sys.executable, "-c", STARTS, WATCHES]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout and parent.stdin
    actor = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "watches\n"
    parent.kill()
    parent.communicate()
    psutil.wait_procs([actor], timeout=60)
    assert not actor.is_running()


OWN = """
import sys, psutil
from pathlib import Path
from rocstar.config.sections import Recipe
from rocstar.cluster import opened_machines
from rocstar.parts.placement import place
cluster = {"launcher": "ray", "sandbox_nodes": 1}
recipe = Recipe.model_validate({"cluster": cluster, "sandbox": {"slots": 40, "preload": []}})
with opened_machines(recipe, Path(sys.argv[1]), place(recipe, None, {"here": ()}, 0.0)) as machines:
    processes = psutil.Process().children(recursive=True)
    (actor,) = [process for process in processes if "NodeActor" in " ".join(process.cmdline())]
    print(machines.sandbox.info().slots, actor.nice() - psutil.Process().nice())
    for process in processes:
        print(process.pid, *{c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"})
"""


@pytest.mark.slow
def test_a_ray_of_the_runs_own_has_room_for_it_at_its_priority_listens_on_loopback_and_ends_with_it(
    tmp_path: Path,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", OWN, str(tmp_path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr
    facts, *lines = found.stdout.splitlines()
    slots, nicer = facts.split()
    assert slots == "40", "more than this machine has cores for is placed all the same"
    assert nicer == "0", "rank 0 waits for what Ray has started, so that must not give way to it"
    listening = {int(pid): addresses for pid, *addresses in map(str.split, lines)}
    addresses = {address.removeprefix("::ffff:") for some in listening.values() for address in some}
    assert addresses == {"127.0.0.1"}
    left = [psutil.Process(pid) for pid in listening if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
