"""Rewriting against a real HTTP server that answers by a script."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.sft.endpoint import AnswerCache
from rocstar.errors import ConfigError, EngineUnavailable
from tests.data_sft.support import built, calls, lines, user, written

pytest.importorskip("httpx")

Answer = Callable[[dict[str, Any], int], tuple[int, Any]]
"""(request body, how often this body was sent before) -> (status, answer); a text is a completion's content."""


class Scripted:
    """What the server was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, Scripted]]:
    """An OpenAI-compatible endpoint on a free port."""
    seen = Scripted()
    times: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            body = json.loads(raw)
            with seen.lock:
                seen.requests.append(body)
                seen.keys.append(self.headers.get("authorization"))
                seen.at_once += 1
                seen.most_at_once = max(seen.most_at_once, seen.at_once)
                before = times[raw.decode()]
                times[raw.decode()] += 1
            status, said = answer(body, before) if self.path == "/v1/chat/completions" else (404, {})
            with seen.lock:
                seen.at_once -= 1
            if status == 0:  # hang up without a word
                self.close_connection = True
                return
            if isinstance(said, str):
                said = {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def last(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def rewrite(tmp_path: Path, url: str, rows: list[Any], steps: list[str], out: str = "out", **part: Any) -> list[Any]:
    """The rows of a build whose one source is rewritten."""
    source = {
        "name": "chat",
        "layout": "messages",
        "files": [str(written(tmp_path / "in.jsonl", *rows))],
        "rewrite": steps,
    }
    endpoint = {"url": url, "model": "m", "cache": str(tmp_path / "cache.sqlite"), "attempts": 3, **part}
    built(tmp_path / out, source, endpoint=endpoint, environment={"KEY": "secret"})
    return lines(tmp_path / out / "rows.jsonl")


def asked(text: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user(text), *(more or ({"role": "assistant", "content": "old"},))]}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.support.chat_http.LONGEST_WAIT_SECONDS", 0.01)


def test_responses_are_written_anew(tmp_path: Path) -> None:
    with serving(lambda body, _: (200, f"new to {last(body)}")) as (url, seen):
        rows = rewrite(tmp_path, url, [asked("a"), asked("b")], ["response"], parameters={"temperature": 0.5})
    told = sorted([m["content"] for m in row["messages"]] for row in rows)
    assert told == [["a", "new to a"], ["b", "new to b"]]
    assert all(body["model"] == "m" and body["temperature"] == 0.5 for body in seen.requests)


def test_each_answer_of_a_longer_chat_follows_the_new_ones(tmp_path: Path) -> None:
    more = ({"role": "assistant", "content": "old"}, user("b"), {"role": "assistant", "content": "old"})
    with serving(lambda body, _: (200, f"{len(body['messages'])} said")) as (url, seen):
        (row,) = rewrite(tmp_path, url, [asked("a", *more)], ["response"])
    assert [m["content"] for m in row["messages"]] == ["a", "1 said", "b", "3 said"]
    assert [m["content"] for m in seen.requests[1]["messages"]] == ["a", "1 said", "b"]


def test_a_prompt_without_an_answer_is_reworded_and_answered(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        return 200, "B?" if last(body).startswith("Rewrite the message") else f"to {last(body)}"

    with serving(answer) as (url, _):
        (row,) = rewrite(tmp_path, url, [{"messages": [user("a")]}], ["prompt", "response"])
    assert [m["content"] for m in row["messages"]] == ["B?", "to B?"]


@pytest.mark.parametrize(
    "fault",
    [
        (500, {}),
        (429, {}),
        (503, b"<html>"),
        (0, {}),
        (200, b"not json"),
        (200, {"choices": []}),
        (200, {"error": "overloaded"}),
    ],
    ids=str,
)
def test_a_fault_is_tried_again_and_never_becomes_a_row(tmp_path: Path, fault: tuple[int, Any]) -> None:
    with serving(lambda body, before: (200, "new") if before == 2 else fault) as (url, seen):
        (row,) = rewrite(tmp_path, url, [asked("a")], ["response"])
    assert row["messages"][1]["content"] == "new" and len(seen.requests) == 3


def test_a_service_that_stays_down_stops_the_build_and_a_later_one_goes_on(tmp_path: Path) -> None:
    rows = [asked(text) for text in "abcdef"]
    with serving(lambda body, _: (500, {}) if last(body) == "d" else (200, f"new {last(body)}")) as (url, seen):
        with pytest.raises(EngineUnavailable, match=r"gave no answer in 3 tries \(status 500"):
            rewrite(tmp_path, url, rows, ["response"], concurrency=1)
        answered = {last(body) for body in seen.requests} - {"d"}
    assert {"a", "b", "c"} <= answered and not (tmp_path / "out" / "rows.jsonl").exists()
    with serving(lambda body, _: (200, f"new {last(body)}")) as (again, seen):
        # Another address, the same model: what was answered is not asked again.
        made = rewrite(tmp_path, again, rows, ["response"])
        assert {last(body) for body in seen.requests} == set("abcdef") - answered
    assert sorted(row["messages"][1]["content"] for row in made) == [f"new {text}" for text in "abcdef"]


def test_a_second_build_asks_nothing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    counter = iter(range(999))
    rows = [asked(text) for text in ("a", "b", "c", "a")]
    with serving(lambda body, _: (200, f"answer {next(counter)}")) as (url, seen):
        rewrite(tmp_path, url, rows, ["response"], out="one")
        sent = len(seen.requests)
        rewrite(tmp_path, url, rows, ["response"], out="two")
        assert len(seen.requests) == sent == 3
    for name in ("rows.jsonl", "refused.jsonl", "datasheet.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "answer",
    [
        (400, {"error": "content filter"}),
        (200, {"choices": [{"message": {"content": "cut off h"}, "finish_reason": "length"}]}),
        (200, {"choices": [{"message": {"content": "  "}, "finish_reason": "stop"}]}),
        (200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}),
        (200, {"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]}),
    ],
    ids=["refused", "cut", "blank", "null", "filtered"],
)
def test_what_the_endpoint_will_not_answer_leaves_only_that_row_out(tmp_path: Path, answer: tuple[int, Any]) -> None:
    with serving(lambda body, _: answer if last(body) == "bad" else (200, "new")) as (url, seen):
        (row,) = rewrite(tmp_path, url, [asked("bad"), asked("good")], ["response"])
        assert len(seen.requests) == 2
    assert row["messages"][0]["content"] == "good"
    (refused,) = lines(tmp_path / "out" / "refused.jsonl")
    assert (refused["line"], refused["reason"]) == (1, "rewrite")


def test_an_answer_that_would_forge_a_turn_is_refused(tmp_path: Path) -> None:
    with serving(lambda body, _: (200, "x<|im_end|>" if last(body) == "bad" else "new")) as (url, _):
        rewrite(tmp_path, url, [asked("bad"), asked("good")], ["response"])
    assert [row["reason"] for row in lines(tmp_path / "out" / "refused.jsonl")] == ["marker"]


def test_rows_with_tools_and_rewording_of_several_questions_are_refused(tmp_path: Path) -> None:
    old = {"role": "assistant", "content": "old"}
    tools = asked("a", calls(), {"role": "tool", "content": "1"}, old)
    with serving(lambda body, _: (200, "new")) as (url, _):
        rewrite(tmp_path, url, [tools, asked("a", old, user("b"), old), asked("c")], ["prompt"])
    refused = lines(tmp_path / "out" / "refused.jsonl")
    assert [(row["line"], row["reason"]) for row in refused] == [(1, "rewrite"), (2, "rewrite")]


def test_requests_under_way_are_bounded_and_keep_their_order(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=10)

    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        together.wait()  # three at once, or this breaks and every request fails
        return 200, f"new {last(body)}"

    with serving(answer) as (url, seen):
        rows = rewrite(tmp_path, url, [asked(f"{n}") for n in range(12)], ["response"], concurrency=3)
    assert seen.most_at_once == 3 and len(rows) == 12
    assert all(row["messages"][1]["content"] == f"new {row['messages'][0]['content']}" for row in rows)


def test_the_key_is_sent_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    with serving(lambda body, _: (200, "new")) as (url, seen):
        rewrite(tmp_path, url, [asked("a")], ["response"], key_variable="KEY")
        assert seen.keys == ["Bearer secret"]
        with pytest.raises(ConfigError, match="'GONE' is not set"):
            rewrite(tmp_path, url, [asked("a")], ["response"], key_variable="GONE")
    with (
        serving(lambda body, _: (401, {"error": "no"})) as (url, seen),
        pytest.raises(ConfigError, match="answers 401"),
    ):
        rewrite(tmp_path, url, [asked("b")], ["response"])


def test_no_connection_at_all_is_a_fault(tmp_path: Path) -> None:
    with serving(lambda body, _: (200, "new")) as (url, _):
        pass
    with pytest.raises(EngineUnavailable, match="ConnectError"):
        rewrite(tmp_path, url, [asked("a")], ["response"])


def test_another_file_in_the_caches_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, " * 99)
    with pytest.raises(ConfigError, match="not a cache of answers"):
        AnswerCache(tmp_path / "notes.txt")
