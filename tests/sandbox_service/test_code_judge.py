"""code-judge's dialect, in the shapes its own server answers."""

from __future__ import annotations

from typing import Any

import pytest

from rocstar.sandbox.call import ProgramOutcome, Response
from rocstar.sandbox.service.dialects import Submission, result_of
from tests.sandbox.driver import eventually
from tests.sandbox_service.support import Http

FIELDS = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}


def submission(code: str, **fields: Any) -> dict[str, Any]:
    return {"type": "python", "solution": code, **fields}


def test_a_run_has_the_fields_of_a_submission_result(http: Http) -> None:
    status, result = http.post("/run", submission("print(input())", input="a", expected_output=" a ", sub_id="mine"))
    assert (status, set(result)) == (200, FIELDS)
    assert (result["sub_id"], result["success"], result["run_success"]) == ("mine", True, True)
    assert (result["stdout"], result["stderr"], result["reason"]) == ("a\n", "", "")
    assert result["cost"] > 0
    _, long = http.post("/run", submission("print('x' * 5000)", expected_output="x" * 5000))
    assert (len(long["stdout"]), long["success"]) == (1000, True), "cut where code-judge cuts it, after it is judged"


@pytest.mark.parametrize("path", ["/judge", "/judge/batch", "/judge/long-batch"])
def test_a_judgement_holds_no_output_and_makes_up_an_id(http: Http, path: str) -> None:
    wrong = submission("print(1)", expected_output="2")
    _, answer = http.post(path, wrong if path == "/judge" else {"submissions": [wrong]})
    (result,) = answer.get("results", [answer])
    assert set(result) == FIELDS - {"stdout", "stderr"}
    assert (result["success"], result["run_success"]) == (False, True)
    assert len(result["sub_id"]) == 36


@pytest.mark.parametrize(
    ("code", "stderr"),
    [("1/0", "ZeroDivisionError"), ("exit(2)", ""), ("import os; os.kill(os.getpid(), 40)", "")],
)
def test_a_failed_program_is_not_a_failed_service(http: Http, code: str, stderr: str) -> None:
    status, result = http.post("/run", submission(code))
    assert (status, result["run_success"], result["success"], result["reason"]) == (200, False, False, "")
    assert (stderr in result["stderr"], result["stdout"]) == (True, "")


def test_a_program_over_its_time_is_a_worker_timeout() -> None:
    late = Response(id="", outcome=ProgramOutcome.WALL_TIMEOUT, stdout="1\n")
    result = result_of(Submission(type="python", solution=""), late, keep_output=True)
    assert (result["run_success"], result["reason"]) == (False, "worker_timeout")
    assert result["stdout"] == "1\nSuicide from timeout.\n"


@pytest.mark.parametrize("path", ["/run/batch", "/run/long-batch", "/code-judge/run/long-batch"])
def test_a_batch_is_answered_in_its_order(http: Http, path: str) -> None:
    submissions = [submission(f"print({n})", sub_id=str(n)) for n in range(20)]
    submissions[3] = {"type": "cpp", "solution": "int main(){}"}
    status, answer = http.post(path, {"type": "batch", "submissions": submissions, "sub_id": "all"})
    assert (status, answer["sub_id"], len(answer["results"])) == (200, "all", 20)
    refused = answer["results"].pop(3)
    assert (refused["reason"], refused["stderr"]) == ("invalid_input", "type cpp is not run here; only python is")
    assert [result["stdout"] for result in answer["results"]] == [f"{n}\n" for n in range(20) if n != 3]


def test_a_wrong_shape_is_422_with_a_detail(http: Http) -> None:
    for body in ({"type": "rust", "solution": ""}, {"type": "python"}):
        status, answer = http.post("/run", body)
        assert (status, set(answer)) == (422, {"detail"})
    assert http.post("/run/batch", {"type": "batch", "submissions": []})[0] == 422


@pytest.mark.parametrize("prefix", ["", "/code-judge"])
def test_status_and_pulse(http: Http, prefix: str) -> None:
    assert http.get(f"{prefix}/ping") == (200, "pong")
    assert eventually(lambda: http.get(f"{prefix}/status") == (200, {"queue": 0, "num_workers": 4}))
