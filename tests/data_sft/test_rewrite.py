"""Rewriting against a real HTTP server that answers by a script."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.sft.endpoint import ALIKE, AnswerCache
from rocstar.errors import ConfigError, DataError, EngineUnavailable
from tests.data_sft.support import built, calls, lines, user
from tests.evaluation.served import Raw, Said, served, text
from tests.files import jsonl

pytest.importorskip("httpx")


def last(body: Mapping[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def rewrite(tmp_path: Path, url: str, rows: list[Any], steps: list[str], out: str = "out", **part: Any) -> list[Any]:
    """The rows of a build whose one source is rewritten."""
    files = [str(jsonl(tmp_path / "in.jsonl", *rows))]
    source = {"name": "chat", "layout": "messages", "files": files, "rewrite": steps}
    endpoint = {"url": url, "model": "m", "cache": str(tmp_path / "cache.sqlite"), "attempts": 3, **part}
    built(tmp_path / out, source, endpoint=endpoint, environment={"KEY": "secret"})
    return lines(tmp_path / out / "rows.jsonl")


def asked(text: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user(text), *(more or ({"role": "assistant", "content": "old"},))]}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.support.chat_http.LONGEST_WAIT_SECONDS", 0.01)


def test_each_answer_of_a_longer_chat_follows_the_new_ones(tmp_path: Path) -> None:
    more = ({"role": "assistant", "content": "old"}, user("b"), {"role": "assistant", "content": "old"})
    with served(lambda body: text(f"{len(body['messages'])} said")) as endpoint:
        settings = {"parameters": {"temperature": 0.5}}
        (row,) = rewrite(tmp_path, endpoint.url, [asked("a", *more)], ["response"], **settings)
    assert [m["content"] for m in row["messages"]] == ["a", "1 said", "b", "3 said"]
    assert [m["content"] for m in endpoint.bodies[1]["messages"]] == ["a", "1 said", "b"]
    assert all(body["model"] == "m" and body["temperature"] == 0.5 for body in endpoint.bodies)


def test_a_prompt_without_an_answer_is_reworded_and_answered(tmp_path: Path) -> None:
    def answer(body: Mapping[str, Any]) -> Said:
        return text("B?" if last(body).startswith("Rewrite the message") else f"to {last(body)}")

    with served(answer) as endpoint:
        (row,) = rewrite(tmp_path, endpoint.url, [{"messages": [user("a")]}], ["prompt", "response"])
    assert [m["content"] for m in row["messages"]] == ["B?", "to B?"]


@pytest.mark.parametrize(
    "fault",
    [
        Raw(500),
        Raw(503, b"<html>"),
        text("cut o", finish="abort"),
        text("cut o", finish=None),
        Raw(0),
        Raw(200, b"not json"),
        Raw(200, b'{"choices": []}'),
        Raw(200, b'{"error": "overloaded"}'),
    ],
    ids=str,
)
def test_a_fault_is_tried_again_and_never_becomes_a_row(tmp_path: Path, fault: Said) -> None:
    with served(lambda body: text("new") if len(endpoint.bodies) == 3 else fault) as endpoint:
        (row,) = rewrite(tmp_path, endpoint.url, [asked("a")], ["response"])
    assert row["messages"][1]["content"] == "new" and len(endpoint.bodies) == 3


def test_a_service_that_stays_down_stops_the_build_and_a_later_one_goes_on(tmp_path: Path) -> None:
    rows = [asked(text) for text in "abcdef"]
    with served(lambda body: 500 if last(body) == "d" else text(f"new {last(body)}")) as endpoint:
        with pytest.raises(EngineUnavailable, match=r"gave no whole answer in 3 tries \(status 500"):
            rewrite(tmp_path, endpoint.url, rows, ["response"], concurrency=1)
        answered = {last(body) for body in endpoint.bodies} - {"d"}
    assert {"a", "b", "c"} <= answered and not (tmp_path / "out" / "rows.jsonl").exists()
    with served(lambda body: text(f"new {last(body)}")) as endpoint:
        # Another address, the same model: what was answered is not asked again.
        made = rewrite(tmp_path, endpoint.url, rows, ["response"])
        assert {last(body) for body in endpoint.bodies} == set("abcdef") - answered
    assert sorted(row["messages"][1]["content"] for row in made) == [f"new {text}" for text in "abcdef"]


def test_a_second_build_asks_nothing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    counter = iter(range(999))
    rows = [asked(text) for text in ("a", "b", "c", "a")]
    with served(lambda body: text(f"answer {next(counter)}")) as endpoint:
        rewrite(tmp_path, endpoint.url, rows, ["response"], out="one")
        sent = len(endpoint.bodies)
        rewrite(tmp_path, endpoint.url, rows, ["response"], out="two")
        assert len(endpoint.bodies) == sent == 3
    for name in ("rows.jsonl", "refused.jsonl", "datasheet.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "answer",
    [400, text("cut off h", finish="length"), text("  "), {"content": None}, text("x", finish="content_filter")],
    ids=["refused", "cut", "blank", "null", "filtered"],
)
def test_what_the_endpoint_will_not_answer_leaves_only_that_row_out(tmp_path: Path, answer: Said) -> None:
    with served(lambda body: answer if last(body) == "bad" else text("new")) as endpoint:
        (row,) = rewrite(tmp_path, endpoint.url, [asked("bad"), asked("good")], ["response"])
        assert len(endpoint.bodies) == 2
    assert row["messages"][0]["content"] == "good"
    (refused,) = lines(tmp_path / "out" / "refused.jsonl")
    assert (refused["line"], refused["reason"]) == (1, "rewrite")


def test_a_refusal_that_names_a_parameter_ends_the_build(tmp_path: Path) -> None:
    settings = {"parameters": {"temperature": 0.5, "max_tokens": 9}}
    newer = b"Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    with served(lambda body: Raw(400, newer) if "max_tokens" in body else text("new")) as endpoint:
        rewrite(tmp_path, endpoint.url, [asked("a")], ["response"], **settings)
        assert [body.get("max_completion_tokens") for body in endpoint.bodies] == [None, 9]
    fixed = Raw(400, b"Unsupported value: 'temperature' does not support 0.5 with this model.")
    with served(lambda body: fixed) as endpoint, pytest.raises(ConfigError, match=r"400.*'temperature' does not"):
        rewrite(tmp_path, endpoint.url, [asked("b")], ["response"], **settings)
    long = Raw(400, b"This model's maximum context length is 8 tokens; your messages and max_tokens need 9.")
    with served(lambda body: long) as endpoint, pytest.raises(DataError, match="no row of any source was built"):
        rewrite(tmp_path, endpoint.url, [asked("c"), asked("d")], ["response"], **settings)
    rows, wrong = [asked(f"row {n}") for n in range(3 * ALIKE)], Raw(400, b"no chat template for this model")
    with served(lambda body: wrong) as endpoint, pytest.raises(ConfigError, match=r"400.*no chat template"):
        rewrite(tmp_path, endpoint.url, rows, ["response"], concurrency=1)
    assert len(endpoint.bodies) < 2 * ALIKE
    with served(lambda body: text("new") if last(body) == "row 0" else wrong) as endpoint:
        for _ in range(2):  # the second build finds that answer in the cache
            assert len(rewrite(tmp_path, endpoint.url, rows, ["response"], concurrency=1)) == 1


def test_a_source_without_a_row_says_why(tmp_path: Path) -> None:
    source = {"name": "chat", "layout": "messages", "files": [str(jsonl(tmp_path / "in.jsonl", {}))]}
    said: list[str] = []
    with pytest.raises(DataError, match="no row"):
        built(tmp_path / "out", source, note=said.append)
    (told,) = said
    assert told.endswith(" built, the first row refused for: field messages: expected a list of messages")


def test_an_answer_that_would_forge_a_turn_is_refused(tmp_path: Path) -> None:
    with served(lambda body: text("x<|im_end|>" if last(body) == "bad" else "new")) as endpoint:
        rewrite(tmp_path, endpoint.url, [asked("bad"), asked("good")], ["response"])
    assert [row["reason"] for row in lines(tmp_path / "out" / "refused.jsonl")] == ["marker"]


def test_rows_with_tools_and_rewording_of_several_questions_are_refused(tmp_path: Path) -> None:
    old = {"role": "assistant", "content": "old"}
    tools = asked("a", calls(), {"role": "tool", "content": "1"}, old)
    with served(lambda body: text("new")) as endpoint:
        rewrite(tmp_path, endpoint.url, [tools, asked("a", old, user("b"), old), asked("c")], ["prompt"])
    refused = lines(tmp_path / "out" / "refused.jsonl")
    assert [(row["line"], row["reason"]) for row in refused] == [(1, "rewrite"), (2, "rewrite")]


def test_requests_under_way_are_bounded_and_keep_their_order(tmp_path: Path) -> None:
    together, room = threading.Barrier(3, timeout=10), threading.Semaphore(3)

    def answer(body: Mapping[str, Any]) -> Said:
        if not room.acquire(blocking=False):
            return 400  # a fourth at the same time
        together.wait()  # three at once, or this breaks and every request fails
        room.release()
        return text(f"new {last(body)}")

    with served(answer) as endpoint:
        rows = rewrite(tmp_path, endpoint.url, [asked(f"{n}") for n in range(12)], ["response"], concurrency=3)
    assert len(rows) == 12
    assert all(row["messages"][1]["content"] == f"new {row['messages'][0]['content']}" for row in rows)


def test_the_key_is_sent_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    with served(lambda body: text("new")) as endpoint:
        rewrite(tmp_path, endpoint.url, [asked("a")], ["response"], key_variable="KEY")
        assert endpoint.keys == {"Bearer secret"}
        with pytest.raises(ConfigError, match="'GONE' is not set"):
            rewrite(tmp_path, endpoint.url, [asked("a")], ["response"], key_variable="GONE")
    with served(lambda body: 401) as endpoint, pytest.raises(ConfigError, match="answers 401"):
        rewrite(tmp_path, endpoint.url, [asked("b")], ["response"])


def test_no_connection_at_all_is_a_fault(tmp_path: Path) -> None:
    with served(lambda body: text("new")) as endpoint:
        pass
    with pytest.raises(EngineUnavailable, match="ConnectError"):
        rewrite(tmp_path, endpoint.url, [asked("a")], ["response"])


def test_an_answer_that_was_broken_off_and_kept_is_asked_for_again(tmp_path: Path) -> None:
    """Versions that kept it refused its row in each later build."""
    with served(lambda body: text("new")) as endpoint:
        rewrite(tmp_path, endpoint.url, [asked("a")], ["response"])
        with sqlite3.connect(tmp_path / "cache.sqlite") as base:
            base.execute("UPDATE answers SET answer = ?", ('{"text": "cut o", "finish": "abort"}',))
        (row,) = rewrite(tmp_path, endpoint.url, [asked("a")], ["response"])
    assert row["messages"][1]["content"] == "new" and len(endpoint.bodies) == 2


def test_another_file_in_the_caches_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, " * 99)
    with pytest.raises(ConfigError, match="not a cache of answers"):
        AnswerCache(tmp_path / "notes.txt")
