"""Clumsy starts: each ends in one sentence with the remedy, before any folder is made.

Every row of `training.py` and `others.py` is what a person did wrong (to the files, on the command line) and the words
that the sentence must hold: the value that is wrong, and what to do. What is wrong with a recipe by itself, whatever
the files are, is in tests/test_recipe.py."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocstar.cli import main as cli
from rocstar.record.folder import RunFolder
from rocstar.support import exits
from tests.clumsy.others import OTHERS
from tests.clumsy.training import TRAINING
from tests.clumsy.workplace import BAD, PRETRAINED, TINY, Spoil, Start, model_config, rows, text
from tests.tiny_run import RECIPE

pytest.importorskip("torch")


def ends(start: Start, place: Path, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    """In one sentence with its words, and leaves everything as it was."""
    start.spoil(place)
    before = sorted(place.rglob("*"))
    code = cli.run([*shlex.split(start.command), *more])
    told = capsys.readouterr()
    assert code == exits.USAGE, told.err
    (sentence,) = told.err.splitlines()
    assert sentence.startswith("rocstar: ") and not told.out
    assert [words for words in start.words.split(" ... ") if words not in sentence] == [], sentence
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("start", [*TRAINING, *OTHERS], ids=lambda start: start.name)
def test_a_clumsy_start_is_one_sentence_before_any_folder_is_made(
    start: Start, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(start, place, capsys)


@pytest.mark.parametrize("start", TRAINING[::12], ids=lambda start: start.name)
def test_a_dry_run_makes_the_same_checks(start: Start, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends(start, place, capsys, "--dry-run")


def test_a_run_that_is_under_way_is_not_resumed(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(place)
    sound = RunFolder(place / "runs" / "sound")
    with sound.locked():
        before = {file: file.read_bytes() for file in sound.path.rglob("*") if file.is_file()}
        assert cli.run(["train", "--resume", "sound"]) == exits.USAGE
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert sentence.startswith("rocstar: run sound is being written by process") and "stop it" in sentence
        assert {file: file.read_bytes() for file in sound.path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "spoil"),
    [
        (TINY, lambda place: None),
        (PRETRAINED, model_config(max_position_embeddings=512)),
        (BAD, text("bad.toml", b"\xef\xbb\xbf" + RECIPE.encode())),
        (BAD, text("bad.toml", RECIPE.replace("\n", "\r\n"))),
        (TINY, text("train.jsonl", b'\xef\xbb\xbf{"question": "a", "answer": "1"}\r\n\r\n')),
        (TINY, rows("test.jsonl", *[{"id": 7, "question": "a", "answer": "1"}] * 2)),
    ],
    ids=["sound", "sound pretrained", "byte order mark", "CRLF", "rows with both", "one question twice"],
)
def test_what_only_looks_wrong_is_taken(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], spoil: Spoil
) -> None:
    spoil(place)
    assert cli.run(["train", *arguments, "--dry-run"]) == exits.OK, capsys.readouterr().err
