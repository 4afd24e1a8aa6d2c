"""The native API, against a running service, over real HTTP."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from rocstar.sandbox.call import Response
from tests.sandbox.driver import eventually
from tests.sandbox_service.support import SLEEPER, Http, batch_of


def test_a_call_is_answered_with_every_field_of_a_response(http: Http) -> None:
    response = http.run("print(int(input()) + 1)\n'last'", id="mine", stdin="41")
    assert set(response) == set(Response.__struct_fields__)
    assert (response["id"], response["outcome"], response["stdout"]) == ("mine", "ok", "42\n")
    assert (response["value"], response["exit_code"], response["attempt"]) == ("'last'", 0, 1)
    assert response["isolation"] in ("L1", "L2", "L3")
    failure = http.run("x = 1\nraise ValueError('no')")["exception"]
    assert failure == {"type": "ValueError", "message": "no", "line": 2}


def test_a_seed_and_files_of_text_and_bytes_go_in_and_files_come_back(http: Http) -> None:
    raw = bytes(range(256))
    files = {"in/raw": {"base64": base64.b64encode(raw).decode()}, "note": "ä"}
    code = "import random\nopen('back', 'wb').write(open('in/raw', 'rb').read()[::-1])\nrandom.random()"
    first, second, other = (http.run(code, files=files, fetch=["back", "note", "no"], seed=n) for n in (7, 7, None))
    assert first["value"] == second["value"] != other["value"]
    found = {path: base64.b64decode(text) for path, text in first["files"].items()}
    assert found == {"back": raw[::-1], "note": "ä".encode()}
    status, refused = http.post("/v1/run", {"code": "1", "files": {"../x": ""}})
    assert (status, refused["outcome"]) == (400, "rejected") and "is not a relative path" in refused["message"]


@pytest.mark.parametrize("path", ["/v1/run", "/run/long-batch", "/run_jupyter"])
def test_hanging_up_ends_the_programs_and_frees_their_slots(http: Http, path: str) -> None:
    message: dict[str, Any] = SLEEPER if path == "/v1/run" else batch_of(*[SLEEPER["code"]] * 100)
    if path == "/run_jupyter":
        message = {"cells": [SLEEPER["code"]] * 3, "total_timeout": 400}
    with http.under_way(path, message, running=4 if path == "/run/long-batch" else 1):
        pass
    assert eventually(lambda: http.status("running") == 0)
    assert http.run("print('free')")["stdout"] == "free\n"


def test_an_impatient_call_is_overloaded_with_a_time_to_come_back(http: Http) -> None:
    with http.under_way("/run/long-batch", batch_of(*[SLEEPER["code"]] * 8), running=4):
        message = json.dumps({"code": "1", "patience_seconds": 0.1}).encode()
        status, response, headers = http.send("POST", "/v1/run", message)
    assert (status, response["outcome"]) == (503, "overloaded")
    assert int(headers["retry-after"]) >= 1


def test_status_says_level_probes_queue_and_slots(http: Http) -> None:
    http.run("1")
    _, status = http.get("/v1/status")
    assert status["isolation"] in ("L1", "L2", "L3")
    assert (status["slots"], status["num_workers"]) == (4, 4)
    assert eventually(lambda: http.status("queue") == 0)
    assert isinstance(status["failed_probes"], list)
    assert status["calls"]["ok"] >= 1
    assert status["uptime_seconds"] > 0 and status["cpu_seconds"] > 0


def test_metrics_are_what_prometheus_reads(http: Http) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="Ray brings it")
    found = {family.name: family for family in parser.text_string_to_metric_families(http.get("/metrics")[1])}
    kinds = {name.removeprefix("rocstar_sandbox_"): family.type for name, family in found.items()}
    assert (kinds["calls"], kinds["run_seconds"], kinds["waiting"]) == ("counter", "histogram", "gauge")
    *buckets, count, total = found["rocstar_sandbox_run_seconds"].samples
    assert buckets[-1].labels == {"le": "+Inf"} and buckets[-1].value == count.value and total.name.endswith("_sum")


def test_metrics_count_each_call_once(http: Http) -> None:
    def counted(sample: str) -> float:
        lines = http.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(sample))

    samples = ('rocstar_sandbox_calls_total{outcome="exception"}', "rocstar_sandbox_run_seconds_count")
    before = [counted(sample) for sample in samples]
    http.post("/run/long-batch", batch_of(*["1/0"] * 7))
    assert [counted(sample) for sample in samples] == [count + 7 for count in before]
