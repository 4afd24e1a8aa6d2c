"""`rocstar eval --endpoint` against `rocstar serve`: the agent behind the server runs its own tools, and the figures
are those of the same model evaluated here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli import main as cli
from rocstar.evaluation.command import evaluations
from rocstar.evaluation.spec import EvalSpec
from rocstar.record.rollouts import read_table
from rocstar.support import exits
from rocstar.support.screen import Screen
from tests.commands import json_and_words
from tests.evaluation.served import Said, served, text
from tests.files import jsonl
from tests.tutorials.session import commands

pytest.importorskip("torch")

REWARD = '''
def even(completions, question, **columns):
    """Depends on every character of the question and of what was written."""
    return [float(sum(map(ord, asked + said)) % 2 == 0) for asked, said in zip(question, completions)]
'''
SHARED = ["rollout.truncated=graded", "sandbox.preload=[]", "run.modules=['.']"]
MEASURED = ["--data", "t.jsonl", "--temperature", "0", "--verifier", "served:even", "--max-response-tokens", "12"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    rows = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(12)]
    jsonl(tmp_path / "t.jsonl", *rows)
    (tmp_path / "served.py").write_text(REWARD)
    return tmp_path


@contextmanager
def serve(model: Path) -> Iterator[str]:
    """The address of `rocstar serve`."""
    settings = ["rollout.template=compact", "sandbox.preload=[]", "--port", "0"]
    command = [f"{commands()}/rocstar", "serve", str(model), *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        try:
            yield told.split(" at ")[1].split()[0]
        finally:
            process.terminate()


def written(result: Mapping[str, Any]) -> list[str]:
    rows = read_table(Path(result["saved"]) / "samples.parquet", ["problem_id", "text"]).to_pylist()
    return ["".join(row["text"]).removesuffix("<|im_end|>") for row in sorted(rows, key=lambda row: row["problem_id"])]


def test_a_served_agent_is_worth_what_it_is_here(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, _ = json_and_words(capsys, "eval", str(model_folder), *MEASURED, "--template", "compact", *SHARED)
    with serve(model_folder) as url:
        there, told = json_and_words(capsys, "eval", "tiny", "--endpoint", url, "--tools", "none", *MEASURED, *SHARED)
        uncapped, _ = json_and_words(
            capsys, "eval", "tiny", "--endpoint", url, "--tools", "none", "--data", "t.jsonl", "--limit", "1", *SHARED
        )
        assert cli.run(["eval", "tiny", "--endpoint", url, "--data", "t.jsonl", *SHARED]) == exits.USAGE
    assert "no system message, the question alone" in told and "tools of the endpoint" in told
    assert 0 < here["avg@1"]["value"] < 1  # so that equal figures say something
    assert there["avg@1"] == here["avg@1"] and written(there) == written(here)
    assert there["mean_response_tokens"] == here["mean_response_tokens"] == 12
    assert uncapped["mean_response_tokens"] > 100  # what the model's 256 positions leave
    assert "rocstar eval: --tools none" in capsys.readouterr().err


def measured(url: str, **given: Any) -> dict[str, Any]:
    settings = ["sandbox.preload=[]", *given.pop("settings", [])]
    (made,) = evaluations(
        EvalSpec(model="m", data="t.jsonl", limit=1, endpoint=url, settings=settings, **given), Screen()
    )
    return made


WORDS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"tools": "none"}, [("user", "0+1?")]),
    ({"tools": "none", "system": "Be brief."}, [("system", "Be brief."), ("user", "0+1?")]),
    ({"tools": "none", "settings": ["rollout.preamble='Solve: '"]}, [("user", "Solve: 0+1?")]),
    ({"system": "", "settings": ["rollout.preamble=''"]}, [("user", "0+1?")]),
    ({"system": "Be brief.", "tools": "text", "max_turns": 1}, [("system", "Be brief."), ("user", "Solve the")]),
    ({}, [("system", "The User brings"), ("user", "Solve the")]),
]


def test_the_words_around_a_question_are_those_that_were_asked_for_and_decide_the_place_of_the_result() -> None:
    places = set()
    with served(lambda body: text("\\boxed{1}")) as endpoint:
        for given, sent in WORDS:
            result = measured(endpoint.url, **given)
            places.add(result["saved"])
            messages = endpoint.bodies[-1]["messages"]
            assert result["avg@1"]["value"] == 1.0
            assert [message["role"] for message in messages] == [role for role, _ in sent]
            assert all(m["content"].startswith(start) for m, (_, start) in zip(messages, sent, strict=True))
            if "Solve the" not in sent[-1][1]:
                assert messages[-1]["content"] == sent[-1][1]
            shows_tools = given.get("tools", "openai") == "openai" and given.get("max_turns") != 1
            assert ("tools" in endpoint.bodies[-1]) == shows_tools
    assert len(endpoint.bodies) == len(places) == len(WORDS) and not any(place.endswith("-2") for place in places)


def test_calls_that_the_agent_reports_are_turns_of_the_attempt() -> None:
    calls = [
        {"tool": "python", "arguments": {"code": "1/0"}, "status": "code_error", "output": "ZeroDivisionError"},
        {"tool": "python", "arguments": {"code": "print(1)"}, "status": "ok", "output": "1\n", "seconds": 0.5},
    ]
    reported = {**text("\\boxed{1}"), "rocstar": {"calls": calls, "response_tokens": 77}}
    with served(lambda body: reported) as endpoint:
        result = measured(endpoint.url, tools="none")
    assert (result["calls_per_attempt"], result["failed_call_share"], result["no_tool_share"]) == (2, 0.5, 0.0)
    assert result["mean_response_tokens"] == 77 and result["avg@1"]["value"] == 1.0
    (row,) = read_table(Path(result["saved"]) / "samples.parquet").to_pylist()
    first, second, _ = json.loads(row["turns"])
    assert (first["results"][0]["stderr"], second["results"][0]["stdout"]) == ("ZeroDivisionError", "1\n")


def test_a_cap_that_nobody_asked_for_is_what_the_endpoint_has_left() -> None:
    def short(body: Mapping[str, Any]) -> Said:
        return 400 if "max_tokens" in body else text("\\boxed{1}")

    with served(short, refusal="8192 more than the maximum context length of 2048 tokens") as endpoint:
        assert measured(endpoint.url)["avg@1"]["value"] == 1.0
        assert cli.run(["eval", "m", "--endpoint", endpoint.url, *MEASURED, *SHARED]) == exits.USAGE


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tools", "none", "--max-turns", "3"], "--max-turns 3 has no effect with --tools none"),
        (["--tools", "none", "sandbox.tools=['notebook']"], "has no effect with --tools none"),
        (["--tools", "some"], "--tools some is none of openai, text, none"),
    ],
)
def test_what_an_agent_of_its_own_does_not_read_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert cli.run(["eval", "m", "--endpoint", "http://x/v1", "--data", "t.jsonl", *arguments]) == exits.USAGE
    assert told in capsys.readouterr().err
