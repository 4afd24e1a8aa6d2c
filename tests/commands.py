"""Commands, carried out in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocstar.cli.main import run
from rocstar.support.exits import OK


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = OK) -> Any:
    """What a command prints with --json, and nothing else since the last look."""
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)
