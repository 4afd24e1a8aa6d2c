"""Programs whose true end is known (`truth.txt`): each is reported as what it is, and none as a fault of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rocstar.sandbox.call import Response
from tests.sandbox.driver import Daemon


def programs() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """By name: limits, what is told, the program."""
    _, *parts = Path(__file__).with_name("truth.txt").read_text().split("=== ")
    split = [part.split("\n", 3) for part in parts]
    return {
        name: (ast.literal_eval(limits), ast.literal_eval(told), code[:-1].replace("\\0", "\0"))
        for name, limits, told, code in split
    }


PROGRAMS = programs()


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "python"])
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, Response]]:
    """Of all of them, run beside each other."""
    with Daemon(compiled=request.param) as daemon:
        assert daemon.info.fork_path == ("c" if request.param and find_spec("rocstar.sandbox.slot._fork") else "python")
        numbers = {name: daemon.submit(code, **limits) for name, (limits, _, code) in PROGRAMS.items()}
        yield {name: daemon.answer(number) for name, number in numbers.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_reported_as_what_it_did(answers: dict[str, Response], name: str) -> None:
    answer, told = answers[name], PROGRAMS[name][1]
    assert {field: getattr(answer, field) for field in told} == told, answer
    assert answer.attempt == 1
