"""The page's answers over real HTTP requests: lists, filters, search, broken files, runs that are being
written, and who may ask."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.testclient import TestClient

from rocstar.evaluation.compare import compared, read_kept
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import read_rollouts, write_attempts
from rocstar.support.scratch import cache_home
from rocstar.view import query
from rocstar.view.app import STATIC, application, serve
from rocstar.view.index import Index, Searches
from rocstar.view.sources import Library, RunSource
from tests.view.recorded import add_evaluation, add_step, attempt, create, decode, page, problem, settled


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = create(tmp_path_factory.mktemp("page") / "runs")
    for step in (1, 2, 3):
        add_step(run, step)
    add_evaluation(run, "before", 1, seed=1)
    add_evaluation(run, "after", 3, seed=2)
    return run


@pytest.fixture(scope="module")
def client(made: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The page over `made`, with all attempts in its table."""
    with page(made.path.parent, tmp_path_factory.mktemp("cache")) as opened:
        settled(opened, "/api/run/made/attempts")
        yield opened


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    return [row for step in (1, 2, 3) for row in read_rollouts(run, step)]


def listed(run: RunFolder, cache: Path, **query: Any) -> Any:
    with page(run.path.parent, cache) as client:
        return settled(client, "/api/run/made/attempts", part="rollouts", **query)


def test_filters_find_what_the_files_hold(made: RunFolder, client: TestClient) -> None:
    rows = rows_of(made)
    failed = [row for row in rows if row["failed_calls"] >= 1 and row["verdict"] == "right"]
    timed_out = [row for row in rows if any(r["status"] == "timeout" for t in row["turns"] for r in t["results"])]
    assert failed and timed_out

    def total(**query: Any) -> int:
        return int(settled(client, "/api/run/made/attempts", part="rollouts", **query)["total"])

    assert total() == len(rows)
    assert total(failed="1..", verdict="right") == len(failed)
    assert total(error="timeout") == len(timed_out)
    assert total(tool="python") == sum(row["calls"] > 0 for row in rows)
    assert total(kept="no") == sum(not row["kept"] for row in rows)
    assert total(step="2..3") == total(stage="first") - total(step="1")
    assert total(fault="yes") == sum(row["fault"] is not None for row in rows)
    assert total(tokens="..40") == sum(row["response_tokens"] <= 40 for row in rows)


def test_pages_of_a_sorted_list_are_one_list(made: RunFolder, client: TestClient) -> None:
    asked = {"part": "rollouts", "sort": "-tokens", "limit": 20}
    pages = [
        client.get("/api/run/made/attempts", params={**asked, "offset": n}).json()["rows"] for n in range(0, 144, 20)
    ]
    tokens = [row["tokens"] for rows in pages for row in rows]
    assert tokens == sorted((row["response_tokens"] for row in rows_of(made)), reverse=True)
    assert len({(row["step"], row["row"]) for rows in pages for row in rows}) == len(tokens)


@pytest.mark.parametrize("text", ["needle 42", "NEEDLE", "division by", "what is 2 + 2"])
def test_search_looks_into_replies_attempts_and_questions(made: RunFolder, client: TestClient, text: str) -> None:
    found = settled(client, "/api/run/made/attempts", part="rollouts", q=text, limit=500)
    wanted = [
        (row["step"], row["problem_id"], row["index"])
        for row in rows_of(made)
        if text.lower() in (json.dumps(row["turns"]) + row["question"] + "".join(row["text"])).lower()
    ]
    assert wanted
    assert sorted((row["step"], row["problem_id"], row["sibling"]) for row in found["rows"]) == sorted(wanted)


def test_a_search_holds_a_row_for_each_file_however_many_attempts_it_finds(made: RunFolder, tmp_path: Path) -> None:
    """A common word stands in millions of attempts of a run of the paper's size."""
    with closing(Index.open(RunSource(name="made", root=made.path, run=made), tmp_path)) as index:
        index.settle()
        search = Searches(index).find("what is")
        assert search.idle.wait(60)
        where = query.filtered({}, hits=search.number)
        everything = query.filtered({})
        assert query.count(index, where) == query.count(index, everything) > 144
        assert query.facets(index, where) == query.facets(index, everything)
        ordered = {"sort": "-step", "offset": 0, "limit": 500}
        assert query.groups(index, where, **ordered) == query.groups(index, everything, **ordered)
        assert index.ask("SELECT count(*) FROM found.hits") == index.ask("SELECT count(*) FROM files")


def test_search_finds_text_that_json_escapes(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    told = 'said "é\\n数"\nnext'
    write_attempts(run.rollout_file(1), 1, [attempt("x", stdout=told), attempt("y", question="other")], decode)
    assert [row["preview"] for row in listed(run, tmp_path / "c", q=told)["rows"]] == ["x"]
    assert listed(run, tmp_path / "c", q="' OR true --")["total"] == 0


def test_attempts_are_read_from_their_file(made: RunFolder, client: TestClient) -> None:
    expected = read_rollouts(made, 2)[5]
    found = client.get("/api/run/made/attempt", params={"step": 2, "row": 5}).json()
    assert [turn["text"] for turn in found["turns"]] == expected["text"]
    assert [[call["result"]["stdout"] for call in turn["calls"]] for turn in found["turns"]] == [
        [result["stdout"] for result in turn["results"]] for turn in expected["turns"]
    ]
    assert found["tokens"] is None  # no tokenizer lies in this run


def test_two_evaluations_are_paired_as_compare_pairs_them(made: RunFolder, client: TestClient) -> None:
    asked = {"eval": "after", "step": 3, "against": "made/before/1"}
    found = client.get("/api/run/made/evaluation", params=asked).json()["paired"]
    expected = compared(read_kept(made.evaluation("before", 1)), read_kept(made.evaluation("after", 3)))
    assert found["difference"] == expected["difference"]
    assert [row["difference"] for row in found["table"]] == [row["difference"] for row in expected["table"]]
    assert {row["question"] for row in found["table"]} <= {problem(n).question for n in range(40)}


def test_a_file_that_is_cut_is_left_out_and_the_others_are_shown(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    for step in (1, 2, 3):
        add_step(run, step)
    whole = run.rollout_file(2).read_bytes()
    run.rollout_file(2).write_bytes(whole[: len(whole) // 2])
    run.rollout_file(4).write_text("no parquet at all")
    endless = f"step={10**24}.parquet"  # a number that no table holds
    (run.rollouts / endless).write_bytes(run.rollout_file(1).read_bytes())
    with page(run.path.parent, tmp_path / "cache") as client:
        found = settled(client, "/api/run/made/attempts", limit=500)
        assert {row["step"] for row in found["rows"]} == {1, 3}
        assert [told.partition(":")[0] for told in sorted(found["broken"])] == [
            "rollouts/step=000002.parquet",
            "rollouts/step=000004.parquet",
            f"rollouts/{endless}",
        ]
        assert client.get("/api/run/made/attempt", params={"step": 2, "row": 0}).status_code == 404


def test_a_run_that_goes_on_and_is_rewound_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.view.index.LOOK_SECONDS", 0.0)
    run = create(tmp_path / "runs")
    add_step(run, 1)
    with page(run.path.parent, tmp_path / "cache") as client:

        def steps() -> set[int]:
            client.get("/api/run/made/attempts")
            return {row["step"] for row in settled(client, "/api/run/made/attempts", limit=500)["rows"]}

        assert steps() == {1}
        add_step(run, 2)
        with run.metrics.open("a") as torn:
            torn.write('{"step": 3, "rew')  # a line that is being written
        while steps() != {1, 2}:
            pass
        assert client.get("/api/run/made/curves?metrics=reward/mean").json()["columns"]["reward/mean"] == [0.1, 0.2]
        run.rewind(1)
        while steps() != {1}:
            pass
        assert client.get("/api/run/made/curves?metrics=reward/mean").json()["columns"]["reward/mean"] == [0.1]
        longer = '{"step": 1, "reward/mean": 0.7, "more": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}\n'
        run.metrics.write_text(longer * 3)  # as a new run of that name may be found, in the same inode
        assert client.get("/api/run/made/curves?metrics=reward/mean").json()["columns"]["reward/mean"] == [0.7] * 3


def test_a_search_goes_on_into_later_steps_and_forgets_what_a_rewound_run_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocstar.view.index.LOOK_SECONDS", 0.0)
    run = create(tmp_path / "runs")
    write_attempts(run.rollout_file(1), 1, [attempt("an early zebra")], decode)
    with page(run.path.parent, tmp_path / "cache") as client:

        def found(text: str) -> set[str]:
            return {row["preview"] for row in settled(client, "/api/run/made/attempts", q=text)["rows"]}

        while found("zebra") != {"an early zebra"} or found("lion"):
            pass
        write_attempts(run.rollout_file(2), 2, [attempt("a late zebra")], decode)
        while found("zebra") != {"an early zebra", "a late zebra"}:
            pass
        run.rollout_file(1).unlink()
        settled(client, "/api/run/made/attempts")
        write_attempts(run.rollout_file(1), 1, [attempt("a lion")], decode)
        while found("lion") != {"a lion"}:
            pass
        assert found("zebra") == {"a late zebra"}


def test_one_broken_run_or_file_does_not_hide_the_others(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    add_step(run, 1)
    (run.rollouts / "step=000001 (1).parquet").write_bytes(run.rollout_file(1).read_bytes())
    with run.metrics.open("a") as odd:
        odd.write('{"step": 1' + "0" * 400 + "}\n" + "[" * 100_000 + "\n")
    for name, identity, settings in (("odd", "{}", '{"stage": [1]}'), ("torn", "{", "{}")):
        (run.path.parent / name).mkdir()
        (run.path.parent / name / "run.json").write_text(identity)
        (run.path.parent / name / "config.resolved.json").write_text(settings)
    (run.path.parent / "odd" / "metrics.jsonl").mkdir()  # cannot be read, like another user's
    (run.path.parent / "torn" / "metrics.jsonl").write_text('nonsense\n[1]\n{"step": 1, "loss": 2}\n')
    with page(run.path.parent, tmp_path / "cache") as client:
        found = {row["name"]: row for row in client.get("/api/sources").json()["sources"]}
        assert set(found) == {"made", "odd", "torn"} and "metrics.jsonl" in found["odd"]["broken"]
        assert "run.json" in found["torn"]["broken"] and found["made"]["spark"]["values"] == [0.1]
        assert settled(client, "/api/run/made/attempts")["rows"]


def test_a_broken_table_is_made_again(made: RunFolder, tmp_path: Path) -> None:
    total = listed(made, tmp_path)["total"]
    for file in tmp_path.glob("*.duckdb"):
        file.write_bytes(b"not a database" * 1000)
    assert listed(made, tmp_path)["total"] == total


def test_a_user_without_a_home_reads_runs_too(made: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as of a user without a line in /etc/passwd
    with TestClient(application(Library.open(None, made.path.parent)), base_url="http://127.0.0.1:8710") as client:
        assert settled(client, "/api/run/made/attempts", part="rollouts")["rows"]
    with pytest.raises(FileNotFoundError, match="this user has no home; set XDG_CACHE_HOME: '~/"):
        cache_home()


HOSTILE_NAMES = [
    "n" * 5000,
    "..",
    "%2e%2e",
    "..%2f..%2fetc",
    "made%2f..%2fmade",
    "made%00",
    "/etc/passwd",
    "%5c..%5c",
    "last",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: name[:20])
def test_names_lead_to_no_other_folder(made: RunFolder, client: TestClient, name: str) -> None:
    (made.path.parent.parent / "run.json").write_text("{}")
    for path in (f"/api/run/{name}", f"/api/run/{name}/attempts", f"/{name}", f"/vendor/{name}"):
        found = client.get(path)
        assert found.status_code == 404 or found.text.startswith("<!doctype html>")  # `/..` is `/`
    for asked in ({"eval": f"../../{name}", "step": 1}, {"eval": "after", "step": 3, "against": f"{name}/after/3"}):
        assert client.get("/api/run/made/evaluation", params=asked).status_code == 404
    asked = {"part": f"../{name}", "step": 1, "row": 0}
    assert client.get("/api/run/made/attempt", params=asked).status_code == 404


@pytest.mark.parametrize(
    "query", ["step=x", "sort=verdict;drop", "kept=maybe", "limit=-1", "stage=none", "q=a", "tokens=..", "verdit=wrong"]
)
def test_a_filter_that_says_nothing_is_told_in_a_sentence(client: TestClient, query: str) -> None:
    found = client.get(f"/api/run/made/attempts?{query}")
    assert found.status_code == 400
    assert query.split("=")[0] in found.json()["error"]


REFUSED = [
    ("get", {"host": "evil.example"}, 403),
    ("get", {"origin": "http://evil.example"}, 403),
    ("get", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ("post", {}, 405),
    ("delete", {}, 405),
    ("get", {"host": "localhost:9"}, 200),
    ("get", {"origin": "http://127.0.0.1:8710"}, 200),
]


@pytest.mark.parametrize(("method", "headers", "status"), REFUSED)
def test_only_the_page_itself_may_ask(client: TestClient, method: str, headers: dict[str, str], status: int) -> None:
    found = getattr(client, method)("/api/sources", headers=headers)
    assert found.status_code == status
    policy = found.headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy


def test_beyond_loopback_a_token_is_needed_once(made: RunFolder, tmp_path: Path) -> None:
    app = application(Library.open(None, made.path.parent), token="secret", cache=tmp_path)
    with TestClient(app, base_url="http://10.0.0.5:8710") as client:
        assert client.get("/api/sources").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        opened = client.get("/?token=secret", follow_redirects=False)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert client.get("/api/sources").status_code == 200


def test_the_page_asks_no_other_host(tmp_path: Path) -> None:
    sources = [file for file in STATIC.iterdir() if file.suffix in (".js", ".css", ".html")]
    assert len(sources) > 8
    lines = [line for file in sources for line in file.read_text().splitlines()]
    told = [line for line in lines if "//" in line and "http" in line]
    assert told == ['const MATHML = "http://www.w3.org/1998/Math/MathML";']  # a name of elements, asked by nobody


def test_a_stage_that_ended_by_its_rule_is_told_as_ended(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    for step in (1, 2):
        add_step(run, step)
    with Journal(run.events) as events:
        events.append({"event": "stage_end", "name": "first", "step": 1, "steps": 1, "reason": "undone by a kill"})
    with page(run.path.parent, tmp_path / "cache") as client:

        def stage() -> tuple[Any, ...]:
            found = client.get("/api/run/made").json()
            return found["stages"][0]["done"], found["stages"][0]["ended"], found["steps"]

        assert stage() == (2, None, 3)
        with Journal(run.events) as events:
            events.append({"event": "stage_end", "name": "first", "steps": 2, "reason": "it is flat"})
        assert stage() == (2, "it is flat", 2)


def test_an_attempt_says_what_the_model_read_of_a_tool(tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    write_attempts(run.rollout_file(1), 1, [attempt("x", stdout="y" * 9000)], decode)
    kept = json.loads(run.resolved.read_text())["rollout"]["feedback_max_chars"]
    with page(run.path.parent, tmp_path / "cache") as client:

        def read() -> Any:  # at once, while the page still takes the run in
            found = client.get("/api/run/made/attempt", params={"step": 1, "row": 0}).json()
            return found["turns"][0]["calls"][0]["result"]["read"]

        assert read().startswith("y" * 100) and kept <= len(read()) < kept + 100 < 9000
        run.resolved.write_text('{"rollout": {}}')
        assert read() is None  # of a run whose settings do not say it


def test_settings_are_told_as_they_differ_from_the_defaults(tmp_path: Path) -> None:
    create(tmp_path / "runs", "a")
    with page(tmp_path / "runs", tmp_path / "cache") as client:
        given = {row["setting"]: (row["a"], row["b"]) for row in client.get("/api/run/a/differs").json()}
        assert given["run.seed"] == (0, 5) and "rollout.top_p" not in given
        assert client.get("/api/run/..%2Fa/differs").status_code == 404


def test_the_address_of_a_run_can_be_copied_whatever_its_name_and_whoever_has_read_it_can_end_the_server(
    tmp_path: Path,
) -> None:
    """Before its loop runs, too: a KeyboardInterrupt then was at times lost in a destructor, and the page went on."""
    run = create(tmp_path / "runs", "наш 100% run")
    told: list[str] = []

    def tell(said: str) -> None:
        told.append(said.split(" is shown at ")[1].removesuffix(" (Ctrl-C ends)"))
        signal.raise_signal(signal.SIGINT)

    serve(Library.open(str(run.path), run.path.parent), host="127.0.0.1", port=0, browser=False, tell=tell)
    assert unquote(told[0].partition("#")[2]) == "/run/наш 100% run" and " " not in told[0] and "100%25" in told[0]
