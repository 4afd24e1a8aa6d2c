"""The snippets of docs/sandbox-service.md are run against a service."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rocstar import cli, exits
from rocstar.sandbox.service.local import LocalService

PAGE = Path(__file__).parents[2] / "docs" / "sandbox-service.md"
ADDRESS = "http://127.0.0.1:8700"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", blocks("python"), ids=["verl", "rstar", "own", "session"])
def test_a_python_snippet_runs_as_it_stands(service: LocalService, snippet: str) -> None:
    assert ADDRESS in snippet
    exec(compile(snippet.replace(ADDRESS, service.url), str(PAGE), "exec"), {})


@pytest.mark.parametrize("verb", ["exec", "status", "probe"])
def test_a_command_runs_as_it_stands(service: LocalService, verb: str) -> None:
    commands = [line.partition("  #")[0] for block in blocks("bash") for line in block.splitlines()]
    (command,) = [each for each in commands if each.startswith(f"rocstar sandbox {verb}")]
    assert cli.run(shlex.split(command.replace(ADDRESS, service.url))[1:]) == exits.OK


def test_the_addresses_in_the_configurations_are_paths_we_serve(service: LocalService) -> None:
    configured = re.findall(rf"{ADDRESS}(/\S+)", "".join(blocks("yaml")))
    assert set(configured) == {"/run_code"}
