"""Tools of MCP servers: whose fault a failure is, what is kept between calls, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.errors import ConfigError, Unavailable
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.support import exits
from rocstar.tools.arguments import schema_arguments
from rocstar.tools.choose import Tools, make_tools
from rocstar.types import Status, ToolCall, ToolResult
from tests.forks import once_it_speaks
from tests.sandbox.driver import eventually, runs
from tests.tiny_run import PYTHON

pytest.importorskip("mcp")
from rocstar.tools import mcp

SERVER = Path(__file__).parent / "mcp_server.py"
BY_THE_PACKAGE = '''
from typing import Any
from mcp.server.mcpserver import MCPServer
server = MCPServer("notes", log_level="ERROR")
notes: list[str] = []

@server.tool()
def remember(note: str, times: int = 1) -> list[str]:
    """Keeps a note and says all of them."""
    notes.extend([note] * times)
    return notes

@server.tool()
def state(key: str) -> dict[str, Any]:
    """Says how many notes there are."""
    return {key: len(notes)}

server.run("stdio")
'''


def tools_of(place: str, *flags: str, seconds: float = 5.0, output_bytes: int = 64 * 1024) -> Tools:
    """place: of a scripted server the beginning of its name and its folder."""
    name = place if place.endswith(".py") else shlex.join([*place.split(), *flags])
    limits = Limits(wall_seconds=seconds, output_bytes=output_bytes)
    return make_tools([name], SandboxClient(daemons=0), limits, tool_name="python")


def scripted(folder: Path, *, kind: str = "mcp") -> str:
    return f"{kind}:{sys.executable} {SERVER} {folder}"


def starts(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "starts").read_text().split()]


def nothing_runs(folder: Path) -> bool:
    """Soon: a process that was killed takes a moment."""
    child = folder / "child"
    processes = [*starts(folder), *([int(child.read_text())] if child.exists() else [])]
    return bool(eventually(lambda: not any(map(runs, processes))))


async def called(tool: Any, **arguments: Any) -> ToolResult:
    result: ToolResult = await tool.run(ToolCall(id="c", tool=tool.spec.name, arguments=arguments, raw=""))
    return result


async def counted(tools: Sequence[Any]) -> str:
    return (await called(tools[1])).stdout


async def test_a_server_gives_all_its_tools_in_its_order_and_is_started_at_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tools_of(scripted(tmp_path))
    assert [spec.name for spec in tools.specs] == ["program", "count"]  # each on a page of its own
    assert tools.specs[1].parameters == {"type": "object", "properties": {}, "required": []}
    assert tools.shared == () and tools_of(scripted(tmp_path)).specs == tools.specs
    own = tools.own()
    assert len(starts(tmp_path)) == 1, "once, for the list"
    assert await counted(own) == "1"
    assert len(starts(tmp_path)) == 2
    await own[0].close()
    assert nothing_runs(tmp_path)
    await tools.own()[0].close()  # one that was never called
    monkeypatch.setattr(mcp, "MOST_TOOLS", 1)
    with pytest.raises(Unavailable, match="it lists more than 1 tools"):
        await counted(tools.own())


async def test_each_attempt_has_a_server_of_its_own_unless_one_is_shared(tmp_path: Path) -> None:
    tools = tools_of(scripted(tmp_path))
    first, second = tools.own(), tools.own()
    assert [await counted(first), await counted(first), await counted(second)] == ["1", "2", "1"]
    await asyncio.gather(*(tool.close() for tool in (*first, *second)))
    shared = tools_of(scripted(tmp_path, kind="mcp-shared"))
    assert shared.own() == () and not any(hasattr(tool, "close") for tool in shared.shared)
    at_once = await asyncio.gather(*(counted(shared.shared) for _ in range(20)))
    assert sorted(map(int, at_once)) == list(range(1, 21))


def test_a_shared_server_ends_with_the_event_loop_and_begins_again_with_the_next(tmp_path: Path) -> None:
    tools = tools_of(scripted(tmp_path, kind="mcp-shared"), "child").shared
    for _ in range(2):
        assert asyncio.run(counted(tools)) == "1"
        assert nothing_runs(tmp_path)


@pytest.mark.parametrize("flag", ["child", "far_child"])
async def test_what_a_server_has_started_ends_with_it(tmp_path: Path, flag: str) -> None:
    own = tools_of(scripted(tmp_path), flag).own()
    await counted(own)
    assert runs(int((tmp_path / "child").read_text()))
    await own[0].close()
    assert nothing_runs(tmp_path)


USES = """
import asyncio, sys
from rocstar.sandbox.call import Limits
from rocstar.tools.mcp import mcp_tools
from rocstar.types import ToolCall
async def main(code):
    tool = mcp_tools(sys.argv[1], Limits(wall_seconds=60.0))()[0]
    print("asks", flush=True)
    await tool.run(ToolCall(id="c", tool="program", arguments={"code": code}, raw=""))
    await tool.close()
asyncio.run(main(sys.argv[2]))
"""


def test_a_run_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(USES)
    run, said = once_it_speaks(PYTHON, "uses.py", f"{scripted(tmp_path)} far_child", "hang", folder=tmp_path)
    assert said == "asks\n" and eventually(lambda: len(starts(tmp_path)) == 2)
    first, second = starts(tmp_path)
    assert not runs(first) and eventually(lambda: (tmp_path / "child").exists()) and runs(second)
    run.kill()
    assert nothing_runs(tmp_path)


def test_a_run_whose_server_had_children_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(USES)
    words = [sys.executable, str(tmp_path / "uses.py"), f"{scripted(tmp_path)} far_child", "print(6 * 7)"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert nothing_runs(tmp_path)


async def test_a_server_that_dies_in_a_call_is_started_anew_with_what_earlier_calls_left(tmp_path: Path) -> None:
    own = tools_of(scripted(tmp_path)).own()
    assert [await counted(own), await counted(own)] == ["1", "2"]
    (tmp_path / "dies").touch()
    assert await counted(own) == "3"
    with pytest.raises(Unavailable, match="it last wrote: the last words"):
        await called(own[0], code="exit")  # each time
    assert await counted(own) == "4"
    await own[0].close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("garble", "wrote a line that is not a JSON-RPC message, or that answers no request"),
        ("id 999", "wrote a line that is not a JSON-RPC message, or that answers no request"),
        ("id 1", "wrote a line that is not a JSON-RPC message, or that answers no request"),  # answered before
        ("long", "it last wrote: a line above 0 MiB"),
        ("half", "validation error for CallToolResult"),
        ("error-32603", "it says no"),
        ("error0", "it says no"),
    ],
)
async def test_an_answer_that_is_none_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(mcp, "MAX_LINE", 4000)
    own = tools_of(scripted(tmp_path), "banner", seconds=0.3).own()
    assert await counted(own) == "1", "a line that is no message hurts nobody who is answered"
    with pytest.raises(Unavailable, match=said):
        await called(own[0], code=code)
    assert await counted(own) == "2"
    await own[0].close()


async def test_the_client_is_not_given_what_a_server_only_mentions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Given(mcp.SessionMessage):
        def __init__(self, message: Any) -> None:
            given.append(message)
            super().__init__(message)

    own = tools_of(scripted(tmp_path)).own()
    monkeypatch.setattr(mcp, "SessionMessage", Given)
    assert (await called(own[0], code="chat")).stdout == "done"
    assert given and all(hasattr(message, "id") for message in given)
    await own[0].close()


async def test_what_the_tool_says_of_the_call_is_data(tmp_path: Path) -> None:
    own = tools_of(scripted(tmp_path)).own()
    failed = await called(own[0], code="1 / 0")
    assert (failed.status, failed.stdout) == (Status.CODE_ERROR, "")
    assert failed.stderr == "ZeroDivisionError: division by zero\n"
    refused = await called(own[0], code="error-32602")
    assert (refused.status, refused.stderr) == (Status.BAD_CALL, "it says no")
    assert len(starts(tmp_path)) == 2, "for the list and for the attempt"
    await own[0].close()


async def test_a_call_that_takes_too_long_is_the_models_and_ends_a_server_that_hangs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "PROBE_SECONDS", 0.5)
    own = tools_of(scripted(tmp_path), seconds=0.3).own()
    assert await counted(own) == "1"
    late = await called(own[0], code="while True: pass")
    assert (late.status, late.stderr) == (Status.TIMEOUT, "")
    assert await counted(own) == "2", "it still answers, and keeps what it had"
    hangs = await called(own[0], code="hang")
    assert (hangs.status, hangs.stderr) == (Status.TIMEOUT, mcp.ENDED)
    assert [await counted(own), await counted(own)] == ["1", "2"]
    await own[0].close()


async def test_a_shared_server_that_hangs_is_an_outage_for_it_may_be_anothers_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "PROBE_SECONDS", 0.3)
    shared = tools_of(scripted(tmp_path, kind="mcp-shared"), seconds=0.3).shared
    with pytest.raises(Unavailable, match="no longer answers"):
        await called(shared[0], code="hang")
    assert await counted(shared) == "1"


async def test_a_server_that_lists_other_tools_than_the_model_was_told_is_an_outage(tmp_path: Path) -> None:
    tools = tools_of(scripted(tmp_path))
    own = tools.own()
    assert await counted(own) == "1"
    (tmp_path / "other_tools").touch()
    assert await counted(own) == "2"
    with pytest.raises(Unavailable, match="lists other tools than at first"):
        await called(own[0], code="1 / 0")  # which might have failed for that
    await own[0].close()
    with pytest.raises(Unavailable, match="lists other tools"):
        await counted(tools.own())


async def test_a_server_that_never_answers_or_does_not_start_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tools_of(scripted(tmp_path))
    monkeypatch.setattr(mcp, "START_SECONDS", 0.3)
    (tmp_path / "silent").touch()
    own = tools.own()
    with pytest.raises(Unavailable, match=r"it did not list its tools within 0\.3 s"):
        await counted(own)
    await own[0].close()
    monkeypatch.setattr(mcp, "START_SECONDS", 2.0)  # the line must have come
    with pytest.raises(Unavailable, match=r"it did not list its tools .*; it wrote a line that is not"):
        tools_of(scripted(tmp_path), "banner")
    monkeypatch.undo()
    (tmp_path / "gone").touch()
    with pytest.raises(Unavailable, match="it last wrote: no key was given"):
        await counted(tools.own())


async def test_a_cancelled_attempt_leaves_no_server(tmp_path: Path) -> None:
    own = tools_of(scripted(tmp_path)).own()
    for arguments in ({"code": "while True: pass"}, {"code": "hang"}):
        running = asyncio.create_task(called(own[0], **arguments))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await own[0].close()
    assert nothing_runs(tmp_path)


async def test_a_server_that_is_closed_while_it_starts_is_not_started_again(tmp_path: Path) -> None:
    own = tools_of(scripted(tmp_path)).own()
    (tmp_path / "silent").touch()
    running = asyncio.create_task(counted(own))
    await asyncio.sleep(0.1)
    await own[0].close()
    with pytest.raises(Unavailable, match="is closed; each attempt has one of its own"):
        await running
    assert nothing_runs(tmp_path)


ANSWERS: Sequence[tuple[Mapping[str, Any], str]] = [
    ({"content": []}, ""),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
    ({"content": [{"type": "image", "data": "A" * 16000, "mimeType": "image/png"}]}, "[image, 12 kB]"),
    ({"content": [{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]}, "[audio, 1 kB]"),
    ({"content": [{"type": "resource", "resource": {"uri": "f://x", "text": "it"}}]}, "it"),
    ({"content": [{"type": "resource", "resource": {"uri": "f://x", "blob": "A" * 4000}}]}, "[resource, 3 kB]"),
    ({"content": [{"type": "resource_link", "uri": "f://x", "name": "x"}]}, "[resource_link, f://x]"),
    ({"content": [], "structuredContent": {"k": [1]}}, '{"k": [1]}'),
    ({"content": [{"type": "text", "text": '{\n"k": 1}'}], "structuredContent": {"k": 1}}, '{\n"k": 1}'),
    ({"content": [{"type": "text", "text": "7"}], "structuredContent": {"result": "7"}}, "7"),
    ({"content": [{"type": "text", "text": "see"}], "structuredContent": {"k": 1}}, 'see\n{"k": 1}'),
    ({"content": [{"type": "text", "text": "[" * 50_000}], "structuredContent": {"k": 1}}, "[" * 50_000 + '\n{"k": 1}'),
]


async def test_every_part_of_an_answer_is_told(tmp_path: Path) -> None:
    own = tools_of(scripted(tmp_path)).own()
    for answer, text in ANSWERS:
        result = await called(own[0], code=json.dumps(answer))
        assert (result.status, result.stdout) == (Status.OK, text), answer
    await own[0].close()


async def test_output_is_bounded_as_that_of_programs(tmp_path: Path) -> None:
    own = tools_of(scripted(tmp_path), output_bytes=16).own()
    long = json.dumps({"content": [{"type": "text", "text": "ä" * 10}]})
    result = await called(own[0], code=long)
    assert (result.status, result.stdout, result.truncated_bytes) == (Status.OUTPUT_LIMIT, "ä" * 8, 4)
    await own[0].close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/n"}, "c": {"$ref": "https://example.org/gone"}},
    "required": ["a"],
    "$defs": {"n": {"type": "array", "items": {"type": "integer", "maximum": 3}}},
}


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from("abcd"), JSON))
def test_whatever_a_model_writes_is_checked_before_it_is_sent(arguments: dict[str, Any]) -> None:
    checked = schema_arguments(arguments, SCHEMA)
    if isinstance(checked, str):
        assert "\n" not in checked.splitlines()[0]
        return
    json.dumps(checked, allow_nan=False, ensure_ascii=False).encode()
    assert isinstance(checked["a"], str) and "d" not in checked
    assert all(type(n) in (int, float) and n <= 3 for n in checked.get("b", []))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"a": "x", "b": [1, 5]}, "argument 'b.1': 5 is greater than the maximum of 3"),
        ({"a": "\ud800"}, "the arguments can't be written as JSON"),
        ({"a": float("nan")}, "the arguments can't be written as JSON"),
        ({"a": "x", "d": 1}, "unknown argument 'd'; this tool takes a, b, c"),
    ],
)
def test_a_bad_argument_is_told_with_its_place(arguments: dict[str, Any], said: str) -> None:
    assert str(schema_arguments(arguments, SCHEMA)).startswith(said)
    free = {**SCHEMA, "additionalProperties": {"type": "integer"}}
    assert schema_arguments({"a": "x", "d": 1}, free) == {"a": "x", "d": 1}


NESTED = reduce(lambda inner, _: {"allOf": [inner], "unevaluatedProperties": False}, range(30), dict[str, Any]())
DOUBLED = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {"d30": {}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": r"^([a-z]+\.?)+$"}, "a" * 40 + "!"),
        ({"pattern": r"^\p{L}+$"}, "a"),
        ({"uniqueItems": True}, [{"k": n} for n in range(3000)]),
        ({"multipleOf": 0.1}, 10**400),
        ({"$ref": "#/properties/a"}, 1),
        ({"$ref": "#/required"}, 1),
        ({"$ref": "#/$defs/d0"}, 1),
        ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, {"a" * 40 + "!": 1}),
        (NESTED, {"b": 1}),
    ],
)
def test_what_cannot_be_checked_here_is_left_to_the_server(schema: dict[str, Any], value: Any) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": [], "$defs": DOUBLED}
    assert schema_arguments({"a": value}, whole) == {"a": value}


@pytest.mark.parametrize(
    "said", [{"id": 4, "result": {}}, {"id": None, "error": {"code": 1, "message": ""}}, {"id": 3}, "x" * 99]
)
async def test_an_answer_in_json_to_no_request_is_an_error(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(mcp, "MAX_LINE", 64)
    answers = mcp.httpx2.MockTransport(lambda request: mcp.httpx2.Response(200, json=said))
    async with mcp._Http(transport=answers) as http:
        found = (await http.post("http://x", json={"id": 3})).json()
    assert (found["id"], found["error"]["message"]) == (3, mcp.NO_ANSWER)


async def test_an_answer_may_write_the_id_of_its_request_as_a_text() -> None:
    said = {"jsonrpc": "2.0", "id": "3", "result": {}}
    transport = mcp.httpx2.MockTransport(lambda request: mcp.httpx2.Response(200, json=said))
    async with mcp._Http(transport=transport) as http:
        assert (await http.post("http://x", json={"id": 3})).json() == said


def test_a_schema_may_name_arguments_by_a_pattern() -> None:
    by_name = {"type": "object", "properties": {}, "required": [], "patternProperties": {"^x": {"type": "string"}}}
    closed = {**by_name, "additionalProperties": False}
    assert schema_arguments({"x1": "v"}, closed) == schema_arguments({"x1": "v"}, by_name) == {"x1": "v"}
    assert schema_arguments({"y": "v"}, closed) == {"y": "v"}  # the server knows that it may not


async def test_a_server_of_the_official_package_keeps_its_state(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(BY_THE_PACKAGE)
    tools = tools_of(f"mcp:{sys.executable} {tmp_path / 'notes.py'}", seconds=60.0)
    own = tools.own()
    assert (await called(own[0], note="a", times=None)).stdout.splitlines()[0] == "a"
    assert json.loads((await called(own[1], key="k")).stdout) == {"k": 1}
    wrong = await called(own[0], note="a", times="many")
    assert (wrong.status, "'times'" in wrong.stderr) == (Status.BAD_CALL, True)
    await own[0].close()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mcp:"], "names no program that exists here; write mcp:COMMAND ARGUMENTS or mcp:URL"),
        (["mcp:no-such-command x"], "names no program that exists here"),
        (["mcp:python 'x"], "can't be read as a command: No closing quotation"),
        (["mcp: {server} doubled"], "both answer to the name 'count'"),
        (["mcp: {server}", "mcp-shared: {server}"], "both answer to the name 'program'"),
        (["mcp: {server} wrong_schema"], "can't be asked: .* validation error for ListToolsResult"),
        (["mcp:http://127.0.0.1:9/mcp"], "can't be asked: All connection attempts failed"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, names: list[str], said: str) -> None:
    places = [name.format(server=f"{sys.executable} {SERVER} {tmp_path}") for name in names]
    with pytest.raises((ConfigError, Unavailable), match=said) as refused:
        make_tools(places, SandboxClient(daemons=0), Limits(), tool_name="python")
    assert str(refused.value).startswith("sandbox.tools") and "\n" not in str(refused.value)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "find_spec", lambda module: None)
    with pytest.raises(ModuleNotFoundError) as missing:
        tools_of("mcp:python never_started.py")
    told = exits.failure(missing.value)
    assert told is not None and told[0] == exits.NOT_READY
    assert "mcp is not installed; install what is missing with" in told[1]


async def test_a_server_is_asked_by_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    served = BY_THE_PACKAGE.replace('run("stdio")', f'run("streamable-http", port={port})')
    (tmp_path / "notes.py").write_text(served)
    process = await asyncio.create_subprocess_exec(sys.executable, tmp_path / "notes.py")
    try:
        assert await asyncio.to_thread(eventually, lambda: answers(port))
        own = tools_of(f"mcp:http://127.0.0.1:{port}/mcp", seconds=60.0).own()
        assert (await called(own[0], note="a")).stdout.splitlines()[0] == "a"
        assert json.loads((await called(own[1], key="k")).stdout) == {"k": 1}
    finally:
        process.kill()
        await process.wait()
    with pytest.raises(Unavailable, match="can't be asked"):
        await called(own[0], note="b")
    await own[0].close()


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
