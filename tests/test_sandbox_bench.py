"""`rocstar sandbox bench`: what every kind of service says of a program, and what is counted of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from rocstar.adapters.sandbox_bench import measure
from rocstar.adapters.sandbox_bench.measure import compared, measured, rows, with_truth
from rocstar.adapters.sandbox_bench.programs import BODIES, KNOWN, KnownProgram
from rocstar.adapters.sandbox_bench.systems import DIALECTS, End, Runs, opened
from rocstar.cli.main import app
from rocstar.cli.verbs.sandbox import _asked
from rocstar.data.rows import read_rows
from rocstar.errors import Unavailable
from rocstar.sandbox import client
from rocstar.sandbox.call import DaemonSettings
from tests.sandbox.driver import eventually

QUICK = [program for program in KNOWN if program.seconds == 5.0 and "1 s" not in program.name]


MCP_SERVER = """
from subprocess import run
from mcp.server.mcpserver import MCPServer

def execute(code: str, stdin: str = "") -> dict[str, str]:
    said = run(["python3", "-c", code], input=stdin, capture_output=True, text=True)
    return {"outcome": "failed" if said.returncode else "ok", "stdout": said.stdout}

server = MCPServer("python")
server.add_tool(execute)
server.run("stdio")
"""


def scripted(says: Iterable[tuple[str, End]]) -> Runs:
    """A service that answers by what stands in a program, and multiplies and holds otherwise."""

    async def runs(program: KnownProgram) -> End:
        for word, told in says:
            if word in program.code:
                return told
        if program.code.startswith("print(") and "*" in program.code:
            return End("ok", str(eval(program.code[6:-1])))
        return End("ok", "held")

    return runs


async def test_known_ends_are_told_by_a_bare_interpreter() -> None:
    asked = [*QUICK, KNOWN[-1]._replace(seconds=0.5)]
    for _ in range(3):
        async with opened("python", "", 2) as runs:
            found = await measured(runs, asked, [2], attacks=False, calls=10)
        if not any(each.endswith("told timeout") for each in found.wrong):
            break  # else again: nobody asks how much CPU a bare interpreter got, and a busy machine runs out its clock
    assert (found.right, found.wrong) == (len(asked), [])
    assert found.latency[2].wrong == 0 and found.latency[2].p50_ms > 0


async def test_who_stops_waiting_leaves_no_bare_interpreter(tmp_path: Path) -> None:
    there, code = tmp_path / "pid", "import os, sys, time; open({!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    async with opened("python", "", 1) as runs:
        asked = asyncio.create_task(runs(KnownProgram("", code.format(str(there)), "ok", seconds=60.0)))
        await asyncio.to_thread(eventually, lambda: there.is_file() and there.read_text())
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert not psutil.pid_exists(int(there.read_text()))


async def test_what_gets_through_and_a_service_that_dies_of_it_are_named() -> None:
    runs = scripted([("/etc/shadow", End("ok", "got ['/etc/shadow']")), ("os.fork", End("failed"))])
    found = await measured(runs, (), (), attacks=True, calls=10)
    assert found.got_through == ["reads files of the machine"] and not found.is_well
    dead = await measured(scripted([("print(6", End("refused"))]), (), (), attacks=True, calls=10)
    assert dead.held == 0 and all("no program runs after it" in name for name in dead.got_through)


async def test_wrong_ends_and_wrong_answers_under_load_are_counted() -> None:
    asked = [KnownProgram("a", "a", "ok", "1"), KnownProgram("b", "b", "failed"), KnownProgram("c", "c", "ok", "held")]
    found = await measured(scripted([("print(7", End("ok", "22"))]), asked, [3], attacks=False, calls=20)
    assert found.wrong == ["a: expected ok, got other output", "b: expected failed, got ok"] and found.right == 1
    assert found.latency[3].wrong == 1
    shown = "\n".join(rows({"x": found, "y" * 40: found}))
    assert "y" * 40 + "     1 of 3" in shown and "x: 1 calls were answered wrongly at 3 callers" in shown


@pytest.mark.parametrize(
    ("dialect", "said", "told"),
    [
        ("code-judge", {"run_success": True, "reason": "", "stdout": "4\n"}, End("ok", "4\n")),
        ("code-judge", {"run_success": False, "reason": "", "stdout": None}, End("failed")),
        ("code-judge", {"run_success": False, "reason": "worker_timeout", "stdout": ""}, End("timeout")),
        ("code-judge", {"run_success": False, "reason": "queue_timeout"}, End("refused")),
        ("sandbox-fusion", {"run_result": {"status": "Finished", "return_code": 0, "stdout": "4"}}, End("ok", "4")),
        ("sandbox-fusion", {"run_result": {"status": "Finished", "return_code": 1, "stdout": ""}}, End("failed")),
        ("sandbox-fusion", {"run_result": {"status": "TimeLimitExceeded", "return_code": None}}, End("timeout")),
        ("sandbox-fusion", {"run_result": None, "status": "SandboxError"}, End("refused")),
    ],
)
def test_what_each_dialect_says(dialect: str, said: dict[str, Any], told: End) -> None:
    assert DIALECTS[dialect][2](said) == told


async def test_the_truth_of_a_file_is_what_bare_python_makes_of_it() -> None:
    asked = [KnownProgram("1", "print(input()[::-1])", "", stdin="abc"), KnownProgram("2", "1 / 0", "")]
    asked.append(KnownProgram("late", "while True: pass", "", seconds=0.5))
    found = [(one.ends, one.stdout) for one in await with_truth(asked, 2)]
    assert found == [("ok", "cba\n"), ("failed", ""), ("timeout", "")]


async def test_an_mcp_server_is_asked_by_its_tool_that_takes_code(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    async with opened(f"mcp:{sys.executable} {tmp_path}/server.py", "", 1) as runs:
        told = [await runs(program) for program in (KNOWN[0], KNOWN[2], QUICK[-1])]
    assert [one.ends for one in told] == ["ok", "ok", "failed"] and told[1].stdout.strip() == "6"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["elsewhere"], "'elsewhere' is no service that can be asked; give here, python, http://HOST:PORT"),
        (["here", "--callers", "1,x"], "--callers 1,x are no counts"),
        (["here", "--programs", "FILE"], "programs.jsonl, line 2: no program; write"),
        (["here", "--programs", "EMPTY"], "empty.jsonl holds no program; write"),
        (["mcp:/no/such/server"], "/no/such/server can't be started as an MCP server"),
        (["mcp:false"], "false can't be asked as an MCP server: Connection closed"),
        (["code-judge:http://127.0.0.1:9"], "http://127.0.0.1:9/run can't be asked"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(arguments: list[str], told: str, tmp_path: Path) -> None:
    file = tmp_path / "programs.jsonl"
    file.write_text('{"code": "print(1)"}\n{"program": "print(1)"}\n')
    (empty := tmp_path / "empty.jsonl").touch()
    files = {"FILE": str(file), "EMPTY": str(empty)}
    with pytest.raises(Exception, match=told.replace("(", "[(]")):
        CliRunner().invoke(app, ["sandbox", "bench", *(files.get(a, a) for a in arguments)], catch_exceptions=False)


@contextmanager
def served(path: str) -> Iterator[str]:
    """A code-judge that answers at this path alone; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if self.path == path else 404)
            self.end_headers()
            self.wfile.write(b'{"run_success": true, "reason": "", "stdout": "4"}')

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_an_address_may_end_with_the_path_and_one_that_does_not_serve_is_refused() -> None:
    with served("/run") as url:
        for address in (url, f"{url}/", f"{url}/run"):
            async with opened(f"code-judge:{address}", "", 1) as runs:
                assert await runs(KNOWN[0]) == End("ok", "4")
        async with opened(f"code-judge:{url}/elsewhere", "", 1) as runs:
            with pytest.raises(Unavailable, match="/elsewhere/run can't be asked: its answer is HTTP 404"):
                await runs(KNOWN[0])


def test_input_of_a_program_may_be_called_stdin(tmp_path: Path) -> None:
    file = tmp_path / "programs.jsonl"
    file.write_text('{"code": "print(input())", "stdin": "abc"}\n')
    ((line, row),) = read_rows(file)
    assert _asked(line, row, file).stdin == "abc"


def test_a_service_that_tells_ends_wrongly_is_exit_code_1() -> None:
    with served("/run") as url:
        given = ["sandbox", "bench", f"code-judge:{url}", "--callers", "1", "--calls", "10"]
        done = CliRunner().invoke(app, given)
    assert done.exit_code == 1 and "raises: expected failed, got ok" in done.stdout


def test_a_service_that_cannot_be_asked_is_found_out_before_any_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measured", lambda *_, **__: pytest.fail("the first was measured"))
    with pytest.raises(Unavailable, match="can't be asked"):
        asyncio.run(
            compared(["python", "code-judge:http://127.0.0.1:9"], [], [], token="", attacks=False, calls=10, slots=1)
        )


async def test_a_sandbox_below_l3_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a default container nothing of ours could be: `lower min_isolation`, which no option of the verb does."""
    monkeypatch.setattr(client, "DaemonSettings", partial(DaemonSettings, skip_plans=2))
    async with opened("here", "", 1) as runs:
        assert (await runs(KNOWN[0])).ends == "ok"


def test_our_sandbox_tells_every_known_end_and_holds_every_attack_in_json() -> None:
    given = ["sandbox", "bench", "here", "--callers", "2", "--calls", "10", "--attacks", "--json"]
    done = CliRunner().invoke(app, given)
    found = json.loads(done.stdout)["here"]
    assert (done.exit_code, found["right"], found["wrong"]) == (0, len(KNOWN), [])
    assert found["latency"]["2"]["wrong"] == 0 and found["latency"]["2"]["p50_ms"] > 0
    assert (found["got_through"], found["held"], found["attacks"]) == ([], len(BODIES) + 3, len(BODIES) + 3)
