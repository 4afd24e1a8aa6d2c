"""`rocstar sandbox ...`, as typed."""

from __future__ import annotations

import json

import pytest

from rocstar import cli, exits
from rocstar.sandbox.service.hostile import ROWS, Row, judge, says
from rocstar.sandbox.service.local import LocalService


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = exits.OK) -> str:
    assert cli.run(["sandbox", *arguments]) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["exec", "serve", "mcp", "status", "bench", "probe"])
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Usage" in told(capsys, verb, "--help")


def test_exec_runs_on_a_service(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "exec", "print(1)\n2", "--url", service.url) == "1\n2\n"
    told(capsys, "exec", "1/0", "--url", service.url, code=exits.FAILED)
    answer = json.loads(told(capsys, "exec", "3", "--url", service.url, "--json"))
    assert (answer["outcome"], answer["value"]) == ("ok", "3")


def test_status_is_told(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    assert "isolation         L" in told(capsys, "status", service.url)
    assert json.loads(told(capsys, "status", service.url, "--json"))["slots"] == 4


def test_bench_checks_every_answer(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("bench", "--url", service.url, "--callers", "4", "--calls", "8")
    (w1, w2, w3) = json.loads(told(capsys, *options, "--json"))["rows"]
    assert [row["program"] for row in (w1, w2, w3)] == ["W1", "W2", "W3"]
    assert (w1["right"], w1["wrong"], w1["lost"]) == (8, 0, 0)
    assert w1["cpu_ms_per_call"] > 0
    assert "calls_per_second" in told(capsys, *options)


def test_a_full_probe_of_a_live_service_passes_every_row(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(told(capsys, "probe", "--full", "--url", service.url, "--json"))
    assert [row["row"] for row in found["rows"]] == [row.name for row in ROWS]
    if found["isolation"] >= "L3":
        assert {row["verdict"] for row in found["rows"]} == {"pass"}


def test_a_quick_probe_runs_fewer_rows(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "probe", "--url", service.url)
    assert 5 < len(text.splitlines()) < len(ROWS)


def test_a_row_that_fails_says_so_unless_its_level_does_not_promise_it() -> None:
    row = Row(name="x", code="", passes=says("safe"), level="L3")
    bad = {"outcome": "ok", "stdout": "got it"}
    assert [judge(row, bad, level) for level in ("L1", "L2", "L3")] == ["not promised", "not promised", "fail"]
    assert judge(row, {"outcome": "ok", "stdout": "safe\n"}, "L1") == "pass"
    assert judge(row, {"outcome": "ok", "stdout": None}, "L3") == "fail"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["serve", "--host", "0.0.0.0"], exits.USAGE, "give --token SECRET"),
        (["serve", "--host", "203.0.113.7", "--token", "x"], exits.USAGE, "cannot listen on 203.0.113.7:8700"),
        (["status", "http://127.0.0.1:9"], exits.NOT_READY, "no sandbox service answers at 127.0.0.1:9"),
        (["exec", "1", "--url", "ftp://x"], exits.USAGE, "'ftp://x' is no address of a service"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["sandbox", *arguments]) == code
    complaint = capsys.readouterr().err.strip()
    assert sentence in complaint and "\n" not in complaint


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(exits.EXTRA_OF, "no_such_package", "sandbox")
    assert cli.run(["sandbox", "serve"]) == exits.NOT_READY
    told = capsys.readouterr().err
    assert "no_such_package is not installed; install what is missing with: " in told and ".[sandbox]" in told
