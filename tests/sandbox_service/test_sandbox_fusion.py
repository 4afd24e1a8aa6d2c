"""SandboxFusion's dialect, in the shapes its own server answers."""

from __future__ import annotations

import base64
import json
from typing import Any, cast

import pytest

from rocstar.sandbox.call import Response, ServiceOutcome
from rocstar.sandbox.service import dialects
from rocstar.sandbox.service.core import Service
from rocstar.sandbox.settings import Settings
from tests.sandbox_service.support import Http, ScriptedClient

VERL: dict[str, Any] = {
    "compile_timeout": 10,
    "run_timeout": 10,
    "stdin": None,
    "memory_limit_MB": 1024,
    "language": "python",
    "files": {},
    "fetch_files": [],
}
"""What verl sends beside the code."""


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def run_code(http: Http, code: str, **fields: Any) -> Any:
    status, answer = http.post("/run_code", {**VERL, "code": code, **fields})
    assert status == 200, answer
    return answer


def test_a_success_has_every_field(http: Http) -> None:
    answer = run_code(http, "print(input())", stdin="5")
    assert answer["run_result"].pop("execution_time") > 0
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "5\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {},
    }


@pytest.mark.parametrize(
    ("code", "state", "return_code"),
    [
        ("1/0", "Finished", 1),
        ("import sys; sys.exit(7)", "Finished", 7),
        ("import os; os.kill(os.getpid(), 11)", "Finished", -11),
        ("import os; os.kill(os.getpid(), 40)", "Finished", -40),
        ("import time; time.sleep(9)", "TimeLimitExceeded", None),
        ("while True: print('x' * 999)", "Finished", -9),
    ],
)
def test_a_failed_program_is_failed(http: Http, code: str, state: str, return_code: int | None) -> None:
    answer = run_code(http, code, run_timeout=0.3 if "sleep" in code else 10)
    assert answer["status"] == "Failed"
    assert (answer["run_result"]["status"], answer["run_result"]["return_code"]) == (state, return_code)
    assert isinstance(answer["run_result"]["stdout"] + answer["run_result"]["stderr"], str)


def test_files_go_in_and_come_back_under_the_name_asked_for_also_from_a_failure(http: Http) -> None:
    raw = bytes(range(256))
    files = {"a/b.txt": as_base64("grüße".encode()), "/tmp/raw": as_base64(raw), "none": None}
    code = "print(open('a/b.txt').read())\nopen('out', 'wb').write(open('raw', 'rb').read() * 3)\n1/0"
    answer = run_code(http, code, files=files, fetch_files=["/mnt/out", "out", "missing", "/etc/passwd"])
    assert (answer["status"], answer["run_result"]["stdout"]) == ("Failed", "grüße\n")
    assert {path: base64.b64decode(text) for path, text in answer["files"].items()} == {
        "/mnt/out": raw * 3,
        "out": raw * 3,
    }


@pytest.mark.parametrize(
    "fields", [{"language": "cpp"}, {"fetch_files": [1]}, {"files": {"x": "!"}}, {"code": 1}, {"run_timeout": -1}]
)
def test_what_is_not_served_is_422_with_a_detail(http: Http, fields: dict[str, Any]) -> None:
    status, answer = http.post("/run_code", {**VERL, "code": "1", **fields})
    assert (status, set(answer)) == (422, {"detail"})


def test_when_we_cannot_run_it_verl_is_asked_to_come_again() -> None:
    """The longest wait is verl's own, of seconds: nobody is waited for here."""
    service: Any = Service(Settings(), cast(Any, ScriptedClient()))
    overloaded = Response(id="", outcome=ServiceOutcome.OVERLOADED, message="busy")
    reply = dialects.answer(service, overloaded, overloaded.outcome, {"run_result": {}}, {})
    said = json.loads(reply.body)
    assert (reply.status_code, said["status"], said["run_result"], said["message"]) == (
        504,
        "SandboxError",
        None,
        "busy",
    )
    assert int(dict(reply.headers)["retry-after"]) >= 1


def run_jupyter(http: Http, cells: list[str], **fields: Any) -> Any:
    status, answer = http.post("/run_jupyter", {"cells": cells, **fields})
    assert status == 200, answer
    return answer


def test_cells_share_a_namespace_and_an_error_stops_only_its_own(http: Http) -> None:
    cells = ["a = 'x'", "a", "print(a)", "import sys\nprint('e', file=sys.stderr)", "def f():\n    1/0\nf()", "a * 2;"]
    answer = run_jupyter(http, cells)
    assert (answer["status"], answer["driver"]["status"]) == ("Success", "Finished")
    empty = {"stdout": "", "stderr": "", "display": [], "error": []}
    *plain, failed, silent = answer["cells"]
    shown = {**empty, "display": [{"text/plain": "'x'"}]}
    assert plain == [empty, shown, {**empty, "stdout": "x\n"}, {**empty, "stderr": "e\n"}]
    assert silent == empty
    (error,) = failed["error"]
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert [line.strip() for line in error["traceback"] if "File" in line] == [
        'File "<cell 5>", line 3, in <module>',
        'File "<cell 5>", line 2, in f',
    ]


def test_a_notebook_out_of_time_keeps_the_cells_that_ran(http: Http) -> None:
    answer = run_jupyter(http, ["print(1)", "while True: pass", "print(3)"], total_timeout=1.0)
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert answer["driver"]["return_code"] is None
    finished, late = answer["cells"]
    assert (finished["stdout"], finished["error"]) == ("1\n", [])
    assert [error["ename"] for error in late["error"]] == ["TimeoutError"]


def test_a_notebook_of_which_nothing_may_run_is_no_success(http: Http) -> None:
    answer = run_jupyter(http, ["1"], files={"/etc/x": "YQ=="})
    assert (answer["status"], answer["driver"]["return_code"]) != ("Success", 0)
    assert answer["status"] == "Failed"


def test_what_is_written_past_pythons_streams_belongs_to_its_cell(http: Http) -> None:
    code = "import os, subprocess, sys\nos.write(1, b'raw ')\nsubprocess.run([sys.executable, '-c', 'print(5)']);"
    answer = run_jupyter(http, [code, "print('next')"])
    assert [cell["stdout"] for cell in answer["cells"]] == ["raw 5\n", "next\n"]
    assert (answer["driver"]["stdout"], answer["driver"]["stderr"]) == ("", "")


def test_many_tracebacks_are_taken_apart_without_a_copy_for_each() -> None:
    class Text(str):
        copies = 0

        def __getitem__(self, at: Any) -> str:
            Text.copies += 1
            return super().__getitem__(at)

    each = f"Traceback (most recent call last):{dialects.CHAINED[1]}"
    printed, shown = dialects.split_traceback(Text(f"x\n{each * 100}"))
    assert (printed, len(shown) > 7_000, Text.copies) == ("x\n", True, 2)


def test_a_traceback_is_apart_from_what_a_cell_printed_before_it(http: Http) -> None:
    code = "import sys\nprint('Traceback (most recent call last):', file=sys.stderr)\n"
    chained = code + "try:\n    1/0\nexcept Exception as error:\n    raise KeyError('k') from error"
    grouped = code + "raise ExceptionGroup('g', [ValueError('v')])"
    for cell in run_jupyter(http, [chained, grouped])["cells"]:
        (error,) = cell["error"]
        assert cell["stderr"] == "Traceback (most recent call last):\n"
        assert "Traceback (most recent call last):" in error["traceback"][0]
        assert error["ename"] in error["traceback"][-1] or error["ename"] == "ExceptionGroup"
    assert run_jupyter(http, [chained])["cells"][0]["error"][0]["traceback"][4].startswith("ZeroDivisionError")


def test_a_cell_that_ends_its_process_is_a_dead_kernel_and_the_next_cell_has_a_new_one(http: Http) -> None:
    answer = run_jupyter(http, ["x = 1", "import os; os._exit(3)", "print(x)"])
    assert (answer["status"], answer["driver"]["return_code"]) == ("Failed", 3)
    assert [cell["error"][0]["ename"] for cell in answer["cells"][1:]] == ["DeadKernelError", "NameError"]


def test_a_figure_is_shown_as_a_picture(http: Http) -> None:
    pytest.importorskip("matplotlib")
    answer = run_jupyter(http, ["import matplotlib.pyplot as plt", "plt.plot([1, 2])\nplt.show()"])
    assert [list(shown) for shown in answer["cells"][1]["display"]] == [["image/png"]]
    assert base64.b64decode(answer["cells"][1]["display"][0]["image/png"]).startswith(b"\x89PNG")


def test_files_of_a_notebook_go_in_before_the_first_cell_and_out_after_the_last(http: Http) -> None:
    files = {"in/raw": as_base64(b"\xff\0"), "none": None}
    cells = ["data = open('in/raw', 'rb').read()", "open('out', 'wb').write(data[::-1]);"]
    answer = run_jupyter(http, cells, files=files, fetch_files=["out", "missing", "/etc/passwd"])
    assert {path: base64.b64decode(text) for path, text in answer["files"].items()} == {"out": b"\0\xff"}


def test_syntax_errors_and_exits_are_errors_of_their_cell_and_no_cells_are_a_notebook_too(http: Http) -> None:
    cells = run_jupyter(http, ["def f(:", "import sys; sys.exit(3)", "print('on')"])["cells"]
    assert [cell["error"][0]["ename"] for cell in cells[:2]] == ["SyntaxError", "SystemExit"]
    assert cells[2]["stdout"] == "on\n"
    none = run_jupyter(http, [])
    assert (none["status"], none["cells"], none["files"]) == ("Success", [], {})
