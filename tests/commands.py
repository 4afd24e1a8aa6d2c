"""Commands, carried out in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocstar.cli.main import run
from rocstar.support.exits import OK


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = OK) -> Any:
    """What a command prints with --json, and nothing else since the last look."""
    return json_and_words(capsys, *arguments, code=code)[0]


def json_and_words(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = OK) -> tuple[Any, str]:
    """And what it says beside it."""
    status, told = run([*arguments, "--json"]), capsys.readouterr()
    assert status == code, told.err
    return json.loads(told.out), told.err
