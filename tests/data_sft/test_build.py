"""A whole build: files out, counts, caps, repeats, and the same bytes again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rocstar.cli.verbs.data import sft
from rocstar.config.layers import load
from rocstar.data.sft.mix import quantiles
from rocstar.data.sft.recipe import MixRecipe
from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.template import PAPER
from rocstar.errors import ConfigError, DataError
from tests.data_sft.support import WEATHER, built, calls, lines, result, says, user
from tests.files import jsonl

SOUND = {"messages": [user("Paris?"), calls(), result(), says()], "tools": [WEATHER]}


NAMED = "[[source]]\nname = '{}'\nlayout = 'glaive'\nfiles = ['x']\n"


def chats(*words: str) -> list[dict[str, Any]]:
    return [{"messages": [user(f"Say {word}"), says(word)]} for word in words]


def source(tmp_path: Path, name: str, *rows: Any, **fields: Any) -> dict[str, Any]:
    return {"name": name, "layout": "messages", "files": [str(jsonl(tmp_path / f"{name}.jsonl", *rows))], **fields}


def tokenizer(tmp_path: Path) -> str:
    codec = train_bpe(["Say a word Paris"] * 9, vocab_size=300, markers=PAPER.markers, word_merges=False)
    codec.save(tmp_path / "tok", PAPER)
    return str(tmp_path / "tok")


def test_every_row_is_built_or_refused_with_its_place_and_reason(tmp_path: Path) -> None:
    bad = {"messages": [user("Rome?"), calls({"town": "Rome"})], "tools": [WEATHER]}
    rows = [SOUND, "{oops", bad, "[1]", SOUND, *chats("a", "<|im_end|>")]
    sheet = built(tmp_path / "out", source(tmp_path, "mixed", *rows))
    (counted,) = sheet["sources"]
    assert (counted["rows_read"], counted["built"], counted["calls_validated"]) == (7, 2, 1)
    assert counted["refused"] == {"duplicate": 1, "layout": 1, "marker": 1, "missing_argument": 1, "not_json": 1}
    refused = lines(tmp_path / "out" / "refused.jsonl")
    assert [(row["line"], row["reason"]) for row in refused] == [
        (2, "not_json"), (3, "missing_argument"), (4, "layout"), (5, "duplicate"), (7, "marker"),
    ]  # fmt: skip
    assert refused[1]["field"] == "tool_calls.get_weather" and refused[1]["file"].endswith("mixed.jsonl")
    assert refused[1]["detail"] == "required argument 'city' is missing" and "Rome?" in refused[1]["excerpt"]
    kept = lines(tmp_path / "out" / "rows.jsonl")
    assert sorted(len(row["messages"]) for row in kept) == [2, 4] and all(row["source"] == "mixed" for row in kept)


def test_the_same_recipe_gives_the_same_bytes_and_the_datasheet_names_them(tmp_path: Path) -> None:
    parts = source(tmp_path, "a", *chats(*"abcdefgh"), weight=1), source(tmp_path, "b", SOUND, *chats("x"), weight=1)
    for out in ("one", "two"):
        sheet = built(tmp_path / out, *parts, mix={"seed": 3, "tokenizer": tokenizer(tmp_path), "max_tokens": 2000})
    for name in ("rows.jsonl", "refused.jsonl", "datasheet.json"):
        content = (tmp_path / "one" / name).read_bytes()
        assert content == (tmp_path / "two" / name).read_bytes()
        if name != "datasheet.json":
            assert sheet[f"{name.removesuffix('.jsonl')}_sha256"] == hashlib.sha256(content).hexdigest()
    (hashed,) = sheet["sources"][0]["files"]
    assert hashed["sha256"] == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert sheet == json.loads((tmp_path / "one" / "datasheet.json").read_text())
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"datasheet.json", "refused.jsonl", "rows.jsonl"}


def test_another_seed_gives_another_order_of_the_same_rows(tmp_path: Path) -> None:
    made = []
    for seed in (1, 2):
        built(tmp_path / "out", source(tmp_path, "a", *chats(*"abcdefgh")), mix={"seed": seed})
        made.append((tmp_path / "out" / "rows.jsonl").read_text().splitlines())
    assert sorted(made[0]) == sorted(made[1]) and made[0] != made[1]


def test_weights_share_the_mix_and_a_dry_source_is_told(tmp_path: Path) -> None:
    parts = source(tmp_path, "a", *chats(*"abcdefgh"), weight=3), source(tmp_path, "b", *chats("x", "y"), weight=1)
    built(tmp_path / "out", *parts)
    assert [row["source"] for row in lines(tmp_path / "out" / "rows.jsonl")].count("b") == 2
    sheet = built(tmp_path / "out", *parts, mix={"rows": 12})
    assert [(s["wanted"], s["taken"], s["short"], s["left_over"]) for s in sheet["sources"]] == [
        (9, 8, 1, 0), (3, 2, 1, 0),
    ]  # fmt: skip
    assert sheet["rows"] == len(lines(tmp_path / "out" / "rows.jsonl")) == 10


def test_a_row_that_two_sources_hold_counts_for_the_first(tmp_path: Path) -> None:
    parts = source(tmp_path, "a", SOUND), source(tmp_path, "b", SOUND, *chats("x", "y"), limit=2)
    sheet = built(tmp_path / "out", *parts)
    assert [s["built"] for s in sheet["sources"]] == [1, 1] and sheet["sources"][1]["refused"] == {"duplicate": 1}
    assert (sheet["sources"][1]["rows_read"], sheet["rows"]) == (2, 2), "only so many rows of a file are read"


def test_rows_longer_than_the_cap_are_refused_and_lengths_are_told(tmp_path: Path) -> None:
    part, mix = source(tmp_path, "a", *chats("a", "b", "word " * 200)), {"max_tokens": 150}
    sheet = built(tmp_path / "out", part, mix={"tokenizer": tokenizer(tmp_path), **mix})
    (counted,) = sheet["sources"]
    assert counted["refused"] == {"too_long": 1} and 0 < counted["tokens"]["p50"] <= counted["tokens"]["max"] <= 150
    assert sheet["tokenizer_sha256"]


def test_a_build_that_cannot_be_done_leaves_the_one_before(tmp_path: Path) -> None:
    good = source(tmp_path, "a", *chats("a"))
    built(tmp_path / "out", good)
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    for wrong, complaint in (
        ([source(tmp_path, "b", "{oops")], "no row of any source was built"),
        ([good, {**good, "name": "c", "files": [str(tmp_path / "gone.jsonl")]}], r"gone\.jsonl does not exist"),
        ([{**good, "weight": 1}, source(tmp_path, "d", "{oops", weight=1)], "source 'd' gave no row"),
    ):
        with pytest.raises(DataError, match=complaint):
            built(tmp_path / "out", *wrong)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[mix]\nsede = 1\n", r"unknown key mix\.sede; did you mean mix\.seed\?"),
        ("[[source]]\nname = 'a'\nlayout = 'glaiv'\nfiles = ['x']\n", "nearest is 'glaive'"),
        ("[[source]]\nname = 'a'\nlayout = 'glaive'\nfiles = ['x']\nrewrite = ['response']\n", r"no \[endpoint\]"),
        ("[mix]\nmax_tokens = 5\n[[source]]\nname = 'a'\nlayout = 'glaive'\nfiles = ['x']\n", r"needs mix\.tokenizer"),
        ("[mix]\n", "source"),
        (NAMED.format("a") + "weight = 2\n" + NAMED.format("b"), "some sources have a weight"),
        (NAMED.format("a") * 2, "number 2 is called 'a' like another"),
    ],
)
def test_a_recipe_that_is_wrong_is_told_with_its_key(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path / "r.toml", MixRecipe)


def test_the_verb_prints_a_table_or_json(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", SOUND, "{oops")
    recipe = f'[[source]]\nname = "some"\nlayout = "messages"\nfiles = ["{file}"]\n'
    (tmp_path / "r.toml").write_text(recipe)
    app = typer.Typer()
    app.command()(sft)
    told = CliRunner().invoke(app, [str(tmp_path / "r.toml"), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0 and "some: 1 refused for not_json" in told.stdout and "1 rows in" in told.stdout
    as_json = CliRunner().invoke(app, [str(tmp_path / "r.toml"), "--out", str(tmp_path / "out"), "--json"])
    assert json.loads(as_json.stdout) == json.loads((tmp_path / "out" / "datasheet.json").read_text())


def test_quantiles_are_by_nearest_rank() -> None:
    assert quantiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "max": 100}
    assert quantiles([7]) == {"p50": 7, "p95": 7, "max": 7} and quantiles([]) == {}


def test_a_layout_may_be_a_function_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "usual.py"
    own.write_text(
        "def row(row):\n    said = {'role': 'assistant', 'content': row['say']}\n"
        "    return row['say'] and {'messages': [{'role': 'user', 'content': row['ask']}, said]}\n"
    )
    rows = jsonl(tmp_path / "odd.jsonl", {"ask": "Hi?", "say": "Hello."}, {"ask": "Hi?"}, {"ask": "Hi?", "say": ""})
    part = {"name": "odd", "layout": f"{own}:row", "files": [str(rows)]}
    assert built(tmp_path / "out", part)["rows"] == 1
    details = [line["detail"] for line in lines(tmp_path / "out" / "refused.jsonl")]
    assert details == [f"{own}:row raised KeyError('say')", f"{own}:row returned str, not a row with messages"]
    with pytest.raises(ConfigError, match="has no 'rows'; the nearest is 'row'"):
        built(tmp_path / "out", {**part, "layout": f"{own}:rows"})
