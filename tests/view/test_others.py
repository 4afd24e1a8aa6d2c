"""Rollouts that others wrote, through the page's answers. Files that the libraries themselves wrote are opened in
tests/adapters/test_view_others.py."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow
import pytest
from pyarrow import parquet
from starlette.testclient import TestClient

from rocstar.errors import ConfigError
from rocstar.view.app import application
from rocstar.view.others import LONGEST_FIELD, opened_others
from rocstar.view.sources import Library
from tests.files import jsonl
from tests.view.recorded import create, settled

HOSTILE = "<script>alert(1)</script>\u202e"


class Page:
    """The page over rollouts of others."""

    def __init__(self, client: TestClient, left_out: list[str]) -> None:
        self.client, self.left_out = client, left_out
        self.sources = {one["name"]: one for one in client.get("/api/sources").json()["sources"]}
        self.name = next(iter(self.sources))

    def rows(self, **query: Any) -> Any:
        return settled(self.client, f"/api/run/{quote(self.name)}/attempts", sort="step", **query)["rows"]

    def attempt(self, row: dict[str, Any]) -> Any:
        asked = {"part": row["part"], "step": row["step"], "row": row["row"]}
        return self.client.get(f"/api/run/{quote(self.name)}/attempt", params=asked).json()


@contextmanager
def opened(place: Path, tmp_path: Path) -> Iterator[Page]:
    told: list[str] = []
    library = opened_others(place, tmp_path / "made", told.append)
    assert library is not None
    with TestClient(application(library, cache=tmp_path / "cache"), base_url="http://127.0.0.1:8710") as client:
        yield Page(client, told)


def verl(question: str = "1+1", answer: str = "2", score: Any = 1.0, step: Any = 7, **more: Any) -> dict[str, Any]:
    return {"input": f"user\n{question}", "output": answer, "gts": "2", "score": score, "step": step, **more}


def test_siblings_of_verl_that_lie_apart_are_one_group(tmp_path: Path) -> None:
    rows = [verl("1+1", "a"), verl("5+5", "b"), verl("1+1", HOSTILE, score=-1.0, acc={"x": [1]}), verl("5+5", "d")]
    jsonl(tmp_path / "dump" / "7.jsonl", *rows)
    jsonl(tmp_path / "dump" / "10.jsonl", verl("1+1", "later", step=10))
    with opened(tmp_path / "dump", tmp_path) as page:
        assert page.name == "file:dump" and page.left_out == []
        found = page.rows()
        assert [(one["step"], one["grp"], one["sibling"], one["preview"]) for one in found] == [
            (7, 1, 0, "a"), (7, 1, 1, HOSTILE), (7, 2, 0, "b"), (7, 2, 1, "d"), (10, 1, 0, "later"),
        ]  # fmt: skip
        assert [(one["reward"], one["verdict"]) for one in found[:2]] == [(1.0, "right"), (-1.0, "wrong")]
        shown = page.attempt(found[1])
        assert shown["fields"] == {"acc": {"x": [1]}} and shown["turns"][0]["text"] == HOSTILE
        assert (shown["gold"], shown["method"], shown["calls"], shown["response_tokens"]) == ("2", "score", None, None)
        assert [one["preview"] for one in page.rows(reward="..0")] == [HOSTILE]
        assert [one["preview"] for one in page.rows(q="LATER")] == ["later"]
        curve = page.client.get(f"/api/run/{quote(page.name)}/curves", params={"metrics": "reward/mean"}).json()
        assert curve["axes"]["step"] == [7, 10] and curve["columns"]["reward/mean"] == [0.5, 1.0]


def test_rows_that_cannot_be_read_are_told_by_line_and_field_and_the_rest_opens(tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ('{"input": "cut', "all"), ("[1]", "all"), ({**verl(), "input": 3}, "question"), ({"other": 1}, "input"),
        (verl(score="good"), "reward"), (verl(score="1"), "reward"), (verl(score=[1.0]), "reward"),
        (verl(step=-1), "step"), (verl(step=1e300), "step"), (verl(step=1.5), "step"), (verl(step=2**31), "step"),
    ]  # fmt: skip
    good = [verl(), verl(acc=math.nan), verl(score=math.nan), verl(answer="\ud800"), verl(step=7.0)]
    with opened(file := jsonl(tmp_path / "7.jsonl", *(row for row, _ in bad), *good), tmp_path) as page:
        said = page.left_out
        assert said[0] == f"left out: {len(bad)} of {len(bad) + len(good)} rows; these first:"
        for line, (told, (_, field)) in enumerate(zip(said[1:], bad, strict=False), 1):
            assert told.startswith(f"left out: {file}: line {line}, {field}: "), told
        about = page.sources[page.name]["about"]
        assert (len(page.rows()), about["attempts"], about["written by"]) == (len(good), len(good), "verl")
        shown = settled(page.client, f"/api/run/{quote(page.name)}/attempts")["broken"]
        assert [f"left out: {one}" for one in shown] == said
        assert page.attempt(page.rows()[1])["fields"] == {"acc": "nan"}
        unrewarded = page.rows()[2]  # what is no number is among the fields
        assert (unrewarded["reward"], unrewarded["verdict"]) == (None, None)
        assert page.attempt(unrewarded)["fields"] == {"reward": "nan"}


def test_an_attempt_of_a_large_step_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.view.others.ROWS", 4)
    names = ["a", "b", "a", "a", "b", "b", "c", "d", *["e"] * 9]
    file = jsonl(tmp_path / "7.jsonl", *(verl(name, str(n)) for n, name in enumerate(names)))
    with opened(file, tmp_path) as page:
        rows = page.rows(limit=100)
        assert "".join(names[int(row["preview"])] for row in rows) == "aaabbbcdeeeeeeeee"
        assert [row["sibling"] for row in rows] == [0, 1, 2, 0, 1, 2, 0, 0, *range(9)]
        assert all(page.attempt(row)["turns"][0]["text"] == row["preview"] for row in rows)
        (made,) = (tmp_path / "made").rglob("*.parquet")
        assert [parquet.ParquetFile(made).metadata.row_group(n).num_rows for n in range(5)] == [4, 4, 4, 4, 1]
        assert len(page.rows(q="user", limit=100)) == len(names)


def test_large_whole_rewards_and_names_with_points_lose_nothing(tmp_path: Path) -> None:
    for name in ("0.6B", "1.7B"):
        jsonl(tmp_path / "in" / f"{name}.jsonl", verl(name, score=16_777_217, step=3), verl("q", score=1, step=4))
    told: list[str] = []
    library = opened_others(tmp_path / "in", tmp_path / "made", told.append)
    assert library and not told
    assert [source.about["attempts"] for source in library.opened] == [2, 2]


def test_a_step_stands_in_one_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "7.jsonl", verl())
    jsonl(tmp_path / "d" / "8.jsonl", verl(step=7), verl(step=7), verl(step=8))
    with opened(tmp_path / "d", tmp_path) as page:
        assert [one["step"] for one in page.rows()] == [7, 8]
        assert page.left_out[0] == "left out: 2 of 4 rows; these first:"
        assert page.left_out[1].endswith(f"8.jsonl: step: 7 was read from {tmp_path}/d/7.jsonl already")


def test_completions_of_trl_have_the_sum_of_their_rewards(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    said = [{"role": "assistant", "content": "2"}]
    rows = [
        {
            "step": 3,
            "prompt": asked,
            "completion": said,
            "right": 1.0,
            "short": 0.25,
            "topic": "sums",
            "advantage": 0.5,
        },
        {"step": 3, "prompt": asked, "completion": said, "right": 0.0, "short": 0.25, "topic": None, "advantage": -0.5},
    ]
    file = tmp_path / "completions" / "completions_00003.parquet"
    file.parent.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for place in (file, file.parent):
        with opened(place, tmp_path / f"of {place.name}") as page:
            first, second = page.rows()
            assert (first["step"], first["reward"], first["advantage"], first["method"]) == (
                3,
                1.25,
                0.5,
                "right + short",
            )
            assert (second["verdict"], second["grp"], second["sibling"]) == ("wrong", 1, 1)
            shown = page.attempt(first)
            assert shown["question"] == "system: Be brief.\n\nuser: 1+1?" and shown["turns"][0]["text"] == "2"
            assert shown["fields"] == {"right": 1.0, "short": 0.25, "topic": "sums"}


def test_rewards_of_trl_leave_out_nan(tmp_path: Path) -> None:
    rows = [
        {"step": 3, "prompt": "1+1?", "completion": "2", "right": right, "short": math.nan, "advantage": 0.0}
        for right in (1.0, math.nan)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file := tmp_path / "completions_3.parquet")
    with opened(file, tmp_path) as page:
        found = page.rows()
        assert [(one["reward"], one["method"]) for one in found] == [(1.0, "right"), (None, None)]
        assert page.attempt(found[1])["fields"] == {"right": "nan", "short": "nan"}


CALL = {"id": "c1", "name": "python", "arguments": '{"code": "1/0"}'}


def episode(*, step: Any = 12, **more: Any) -> dict[str, Any]:
    """A row of verifiers' traces.jsonl: a call that fails, what the environment says to it, and an answer."""
    said = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": "Traceback (most recent call last)\n  x\nZeroDivisionError: no",
        },
        {"role": "user", "content": "Once more.", "name": "env"},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}], "tool_calls": None},
    ]
    nodes = [
        {"parent": n - 1 if n else None, "message": one, "sampled": one["role"] == "assistant", "mask": [n > 3] * 12}
        for n, one in enumerate(said)
    ]
    trace = {
        "task": {"data": {"answer": "2"}, "key": "4"}, "nodes": nodes, "rewards": {"exact": {"score": 0.75}},
        "stop_condition": "max_turns_reached", "metrics": {"exact": 0.75}, **more,
    }  # fmt: skip
    return {"traces": [trace], "run": {"work": {"step": step}}}


def test_traces_of_verifiers_have_turns_calls_and_what_the_environment_said(tmp_path: Path) -> None:
    broke = episode(nodes=[], errors=[{"type": "ModelError", "message": "gone"}])
    evaluated = episode(calls=[{"node": 1, "usage": {"completion_tokens": 9}}, {"node": 4}, {"error": {}}])
    for node in evaluated["traces"][0]["nodes"]:
        node["mask"] = []  # an endpoint says how many tokens it wrote, and not which
    jsonl(tmp_path / "of" / "traces.jsonl", episode(info={"long": "x" * LONGEST_FIELD}), broke, evaluated)
    with opened(tmp_path / "of", tmp_path) as page:
        assert page.name == "file:traces.jsonl"
        first, second, third = page.rows()
        assert (first["step"], first["problem_id"], first["reward"], first["tokens"]) == (12, "4", 0.75, 12)
        assert third["tokens"] == 9
        assert (first["calls"], first["failed_calls"], first["errors"]) == (1, 1, ["ZeroDivisionError"])
        assert first["stop"] == "max_turns_reached" and second["fault"] == "ModelError: gone"
        shown = page.attempt(first)
        assert [turn["text"] for turn in shown["turns"]] == ["<think>hm</think>\nLet me see.", "2"]
        (call,) = shown["turns"][0]["calls"]
        assert (call["tool"], call["arguments"], call["result"]["status"]) == ("python", {"code": "1/0"}, "code_error")
        assert shown["turns"][0]["replies"] == [{"role": "user", "text": "Once more."}]
        assert shown["fields"]["message 3"] == {"name": "env"} and shown["fields"]["metrics"] == {"exact": 0.75}
        assert shown["fields"]["info"].endswith("characters, which stay in the file")


def test_a_trace_of_no_step_is_of_step_0(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "traces.jsonl", {**episode(), "run": None}, {**episode(), "run": {"work": None}})
    with opened(file, tmp_path) as page:
        assert page.left_out == [] and [row["step"] for row in page.rows()] == [0, 0]


def test_files_are_told_apart_whatever_their_names_are(tmp_path: Path) -> None:
    names = ("a:b/c.jsonl", "a/b:c.jsonl", os.fsdecode(b"d/\xff.jsonl"), os.fsdecode(b"d/\xfe.jsonl"))
    for name in names:
        jsonl(tmp_path / "of" / name, verl(answer=ascii(name)), "{")
    with opened(tmp_path / "of", tmp_path) as page:
        assert len(page.left_out) == 2 * len(names)
        assert {*page.sources} == {"file:a:b:c.jsonl", "file:a:b:c.jsonl (1)", "file:d:?.jsonl", "file:d:?.jsonl (3)"}
        seen = {page.rows()[0]["preview"] for page.name in page.sources}
        assert seen == {ascii(name) for name in names}
    with opened(tmp_path / "of" / names[2], tmp_path / "one") as page:
        assert page.name == "file:?.jsonl"


def test_samples_of_a_log_that_are_encrypted_or_spoilt_cost_no_other(tmp_path: Path) -> None:
    sample = {"id": 1, "epoch": 1, "input": "1+1?", "target": "2", "messages": [], "scores": {"exact": {"value": "C"}}}
    names = [f"samples/{number}.json" for number in range(3)]
    with zipfile.ZipFile(file := tmp_path / "log.eval", "w") as log:
        for name in names:
            log.writestr(name, json.dumps(sample))
    data = bytearray(file.read_bytes())
    for name, place, bits in ((names[0], 8, 1), (names[2], -4, 1)):  # its flag of encryption; its content
        directory = data.rindex(name.encode()) - 46
        data[directory + 8] |= bits * (place == 8)
        data[data.index(name.encode()) + (-30 + 6 if place == 8 else len(name) + 2)] ^= 1
    file.write_bytes(data)
    with opened(file, tmp_path) as page:
        assert len(page.rows()) == 1 and page.left_out[0] == "left out: 2 of 3 rows; these first:"
        assert page.left_out[1].startswith(f"left out: {file}: {names[0]}, all: it cannot be read (File ")
        assert "is encrypted" in page.left_out[1] and "Bad CRC-32" in page.left_out[2]


def test_a_folder_without_anything_and_a_path_that_is_not_there_are_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in (None, str(runs)):
        with pytest.raises(ConfigError, match=r"runs holds no runs, no evaluations, and no rollouts of TRL, verl"):
            Library.open(name, runs)
    for name in ("rollouts/7.jsonl", "logs/a.eval", "run.txt"):
        with pytest.raises(ConfigError, match=rf"^there is no file or folder {name}, and there is no run {name[:3]}"):
            Library.open(name, runs)


def test_a_file_that_cannot_be_read_costs_no_row_of_others(tmp_path: Path) -> None:
    jsonl(tmp_path / "of" / "7.jsonl", verl())
    (tmp_path / "of" / "x.jsonl").symlink_to("/proc/self/mem")  # reading from its start is an error, for root too
    with opened(tmp_path / "of", tmp_path) as page:
        assert len(page.rows()) == 1
        assert f"left out: {tmp_path}/of/x.jsonl: all: it cannot be read (" in "\n".join(page.left_out)


def test_each_branch_of_a_trace_is_an_attempt(tmp_path: Path) -> None:
    def node(parent: int | None, role: str, content: str, **more: Any) -> dict[str, Any]:
        return {"parent": parent, "message": {"role": role, "content": content}, **more}

    nodes = [
        node(None, "user", "1+1?"), node(0, "assistant", "3", sampled=True, mask=[False, True, True]),
        node(1, "user", "Sure?"), node(2, "assistant", "2", sampled=True, mask=[True]),
        node(0, "assistant", "11", sampled=True, mask=[True]),
    ]  # fmt: skip
    trace = {
        "task": {"type": "Sum", "data": {"answer": "2"}, "key": "sum-1"}, "nodes": nodes, "stop_condition": "done",
        "rewards": {"right": {"score": 1.0, "weight": 0.5}, "form": None}, "errors": [],
    }  # fmt: skip
    episode = {"env": {"id": "sums"}, "traces": [trace], "run": {"type": "train", "work": {"type": "train", "step": 5}}}
    broke = {**trace, "nodes": [], "errors": [{"type": "BootError", "message": "no image"}], "rewards": {}}
    looping = {**trace, "nodes": [node(1, "user", "a"), node(0, "user", "b"), node(1, "user", "c")]}
    own = {**trace, "nodes": [node(None, "user", "a"), node(1, "user", "b")]}
    wide = {**trace, "nodes": [node(min(n, 499) - 1 if n else None, "user", "") for n in range(700)]}
    others: list[list[Any]] = [[broke], [looping], [own], [], [wide]]
    file = jsonl(tmp_path / "traces.jsonl", episode, *({**episode, "traces": one} for one in others))
    with opened(file, tmp_path) as page:
        long, short, none = page.rows()
        assert (long["step"], long["problem_id"], long["reward"], long["tokens"], long["grp"]) == (
            5,
            "sum-1",
            0.5,
            3,
            1,
        )
        assert [turn["text"] for turn in page.attempt(long)["turns"]] == ["3", "2"]
        assert page.attempt(short)["turns"][0]["text"] == "11" and page.attempt(short)["fields"]["env"] == {
            "id": "sums"
        }
        assert (none["fault"], none["reward"], page.attempt(none)["turns"]) == ("BootError: no image", None, [])
        assert page.left_out[1:] == [
            f"left out: {file}: line 3, nodes: the parent of node 0 is 1",
            f"left out: {file}: line 4, nodes: the parent of node 1 is 1",
            f"left out: {file}: line 5, traces: there is no attempt in it",
            f"left out: {file}: line 6, nodes: its branches have 100500 messages, and at most 100000 are read",
        ]


def test_a_file_without_rollouts_is_refused_and_a_folder_of_runs_is_none_of_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.jsonl holds no rollouts of TRL, verl, verifiers or inspect_ai"):
        opened_others(jsonl(tmp_path / "x.jsonl", {"a": 1}), tmp_path / "made", lambda said: None)
    run = create(tmp_path / "runs")
    jsonl(run.path / "metrics.jsonl", {"step": 1})
    for place in (tmp_path / "runs", run.path, tmp_path / "none"):
        assert opened_others(place, tmp_path / "made", lambda said: None) is None
    for name in ("cut.parquet", "cut.eval"):
        (tmp_path / name).write_bytes(b"PAR1 cut")
        told: list[str] = []
        with pytest.raises(ConfigError):
            opened_others(tmp_path / name, tmp_path / name[-4:], told.append)
        assert f"{name}: all: it cannot be read" in told[1]
