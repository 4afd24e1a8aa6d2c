"""Questions at a terminal, before a model is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocstar.cli import main as cli
from rocstar.cli.verbs.serve import Typed
from rocstar.serving.chat import questions
from rocstar.support import exits


async def test_what_looks_like_a_command_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def ask(self, question: str) -> None:
            self.asked.append(question)

    (tmp_path / "typed").write_text("/help\nIs /2 a half?\n/\n1/2\n\nnever read\n")
    recorder: Any = Recorder()
    with (tmp_path / "typed").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        await questions(recorder, None, Typed().question)
    assert recorder.asked == ["Is /2 a half?", "1/2"]
    assert "/help is no question, and there are no commands; an empty line ends" in capsys.readouterr().err


def test_a_dash_reads_the_question_from_the_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("rocstar.serving.chat.chat", lambda spec, _: asked.append(spec.prompt))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert cli.run(["chat", str(model), "-p", "caf\udce9"]) == exits.OK  # a byte of Latin-1
    assert asked.pop() == "caf\ufffd"
    for written, code in (("What is\n1 + 1?\n", exits.OK), (" \n", exits.USAGE)):
        (tmp_path / "typed").write_text(written)
        with (tmp_path / "typed").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert cli.run(["chat", str(model), "-p", "-"]) == code
    assert asked == ["What is\n1 + 1?\n"]
    assert "the question is empty" in capsys.readouterr().err
