"""Sessions of a service with several workers: found, ended and drained whichever worker is asked."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import psutil
import pytest

from rocstar.sandbox.service import local
from rocstar.sandbox.service.local import local_service
from tests.sandbox_service.support import Http, Notebook, eventually, running_cell

SMALL = ("--preload", "", "--slots", "4", "--runnable", "4")


def test_any_worker_answers_for_a_session_of_any_other() -> None:
    with local_service((*SMALL, "--workers", "3", "--token", "secret")) as url:
        http = Http(f"{url}/token/secret")
        notebooks = [Notebook.open(http) for _ in range(9)]
        homes = {each.name.partition("-")[0] for each in notebooks}
        for number in range(6):  # a connection each, which the kernel gives to any worker
            for each in notebooks:
                each.run(f"seen = [{number}] if {number} == 0 else [*seen, {number}]")
        assert {each.run("seen")["value"] for each in notebooks} == {"[0, 1, 2, 3, 4, 5]"}
        assert len(homes) > 1
        branch = notebooks[0].branch()
        assert branch.run("len(seen)")["value"] == "6"
        assert http.get("/status")[1]["sessions"] == 10
        assert [each.close() for each in (branch, *notebooks)] == [204] * 10
        assert http.get("/status")[1]["sessions"] == 0
        assert Http(url).post(f"{notebooks[0].path}/cells", {"code": "1"})[0] == 401


def test_hanging_up_reaches_the_worker_that_runs_the_cell() -> None:
    with local_service((*SMALL, "--workers", "2")) as url:
        http = Http(url)
        notebook = Notebook.open(http, limits={"wall_seconds": 400})
        for _ in range(6):  # over either worker
            with running_cell(notebook):
                pass
            assert eventually(lambda: http.get("/status")[1]["running"] == 0)
        assert notebook.run("1")["value"] == "1"


def test_a_worker_that_dies_takes_its_sessions_along_and_says_so() -> None:
    service = local.start((*SMALL, "--workers", "2"))
    try:
        http = Http(service.url)
        notebooks = [Notebook.open(http) for _ in range(8)]
        assert {each.name[0] for each in notebooks} == {"0", "1"}
        (victim, kept) = (next(each for each in notebooks if each.name[0] == home) for home in "01")
        victim.run("x = 1")
        kept.run("x = 1")
        first, _ = sorted(psutil.Process(service.process.pid).children(), key=lambda child: child.create_time())
        first.kill()
        assert eventually(lambda: answered(http, victim)[0] == 404)
        assert "its worker was restarted" in answered(http, victim)[1]["error"]
        assert eventually(lambda: answered(http, kept)[0] == 200)
        assert kept.run("x")["value"] == "1"
    finally:
        assert service.stop() == 0


def test_a_drain_answers_the_cells_that_run_wherever_they_were_sent() -> None:
    service = local.start((*SMALL, "--workers", "2"))
    http = Http(service.url)

    def under_way() -> int:
        status = http.get("/status")[1]
        return int(status["running"] + status["queue"])

    try:
        notebooks = [Notebook.open(http) for _ in range(4)]
        with concurrent.futures.ThreadPoolExecutor(len(notebooks)) as pool:
            cells = [pool.submit(each.run, "import time; time.sleep(1.5); 'done'") for each in notebooks]
            assert eventually(lambda: under_way() == 4)
            service.process.terminate()
            assert [cell.result()["value"] for cell in cells] == ["'done'"] * 4
    finally:
        assert service.stop() == 0


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with local_service((*SMALL, "--workers", "2")) as url:
        Notebook.open(Http(url)).run("1")
        (folder,) = [path for path in tmp_path.iterdir() if (path / "worker0").exists()]
        assert folder.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def answered(http: Http, notebook: Notebook) -> tuple[int, Any]:
    try:
        return http.post(f"{notebook.path}/cells", {"code": "x"})
    except OSError:  # a connection of the dead worker's
        return 0, None
