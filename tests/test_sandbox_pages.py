"""The sandbox's pages as a promise: every Python block runs as printed, every command of a client works."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar import cli, exits

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("sandbox*.md"))
PORTS = (8700, 8701)
"""Of the services that pages take for running."""
CLIENTS = ("exec", "status", "probe")  # verbs that end by themselves


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


PYTHON = [
    pytest.param(block, id=f"{page.stem}-{n}") for page in PAGES for n, block in enumerate(blocks(page, "python"))
]
COMMANDS = [
    line.partition("  #")[0].strip()
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("rocstar sandbox ")
]


@pytest.fixture(scope="module")
def services() -> Iterator[dict[int, int]]:
    """The port that stands in for each of PORTS."""
    serve = [sys.executable, "-m", "rocstar", "sandbox", "serve", "--preload", "", "--port", "0"]
    started = [subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in PORTS]
    try:
        yield {port: port_of(process) for port, process in zip(PORTS, started, strict=True)}
    finally:
        for process in started:
            process.terminate()
            process.communicate()


def port_of(service: subprocess.Popen[str]) -> int:
    """Of the address that it names when it is up."""
    assert service.stderr is not None
    said = service.stderr.readline()
    found = re.search(r"http://[^:]+:(\d+)", said)
    assert found, said + service.communicate()[1]
    return int(found[1])


def here(text: str, services: dict[int, int]) -> str:
    """With the addresses of the services that run here."""
    return re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{services.get(int(found[1]), found[1])}", text)


@pytest.mark.parametrize("block", PYTHON)
def test_a_python_block_runs_as_printed(services: dict[int, int], block: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(here(block, services))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", PYTHON)
def test_a_python_block_needs_nothing_beside_the_sandbox(block: str) -> None:
    modules = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    foreign = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert all(name.startswith("rocstar.sandbox.") for name in foreign), foreign


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.split()[2] in CLIENTS])
def test_a_client_command_works_as_printed(services: dict[int, int], command: str) -> None:
    assert cli.run(shlex.split(here(command, services))[1:]) == exits.OK


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.split()[2] not in CLIENTS])
def test_the_options_of_a_serving_command_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*shlex.split(command)[1:], "--help"]) == exits.OK
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z-]+", command)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_named_exist(page: Path) -> None:
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    named = [ROOT / path for path in re.findall(r"`((?:rocstar|tests|benchmarks)/[\w/.]+)`", text)]
    assert [path for path in [*(page.parent / link for link in links), *named] if not path.exists()] == []
