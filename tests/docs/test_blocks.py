"""Every block of code on a page runs as printed, or says what it needs and is checked as far as that goes."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from rocstar.cli import main as cli
from rocstar.config.layers import load
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import Recipe
from rocstar.data.pool.config import PoolConfig
from rocstar.data.sft.recipe import MixRecipe
from rocstar.support import exits
from tests.docs import commands
from tests.docs.desk import environment, in_shell, laid
from tests.docs.pages import LANGUAGES, PAGES, ROOT, Block, blocks, inline_code
from tests.tiny_run import finished_run

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [(block, command) for block in BLOCKS if block.language == "sh" for command in block.commands]
RUN = list(dict.fromkeys(command for block, command in COMMANDS if block.need(command) is None))
SERVERS = ("serve", "sandbox serve", "view")
"""Verbs that go on until Ctrl-C."""


def tally() -> str:
    """How many commands and blocks of Python are run, and how many are only parsed, by what they need."""
    needs = [block.need(command) for block, command in COMMANDS]
    needs += [block.need() for block in BLOCKS if block.language == "python"]
    by_reason = Counter(need for need in needs if need)
    parsed = ", ".join(f"{reason} {count}" for reason, count in by_reason.most_common())
    return f"{needs.count(None)} commands and Python blocks are run; {by_reason.total()} parsed only: {parsed}"


def of(language: str) -> list[object]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.language == language]


@dataclass
class Desk:
    """The folder of the commands, and the services that run there for as long as the tests."""

    folder: Path
    services: dict[str, int] = field(default_factory=dict)
    """Port by the port that a page gives it."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def serve(self, command: str) -> None:
        """Start it on a free port and wait until it names its address."""
        port = re.search(r"--port (\d+)", command)
        free = re.sub(r"--port \d+", "", self.here(command)) + " --port 0"
        process = subprocess.Popen(
            ["bash", "-c", f"exec {free}"],
            cwd=self.folder,
            env=environment() | {"BROWSER": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://[^:]+:(\d+)", line):
                if command.startswith("rocstar sandbox serve"):
                    self.services[port[1] if port else "8700"] = int(found[1])
                return
        raise AssertionError(f"{command} served nothing: {said}")

    def here(self, text: str) -> str:
        """With the addresses of the services that run here."""
        return re.sub(r"127\.0\.0\.1:(\d+)", lambda at: f"127.0.0.1:{self.services.get(at[1], at[1])}", text)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    pytest.importorskip("torch")
    finished, ended = finished_run(tmp_path_factory.getbasetemp())
    assert ended.code == 0, ended.told
    made = Desk(laid(tmp_path_factory.mktemp("pages") / "desk", finished))
    try:
        yield made
    finally:
        for process in made.processes:
            process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def served(desk: Desk) -> Desk:
    for command in (command for command in RUN if command.startswith("rocstar sandbox serve")):
        desk.serve(command)
    return desk


def test_every_block_names_a_language_that_is_checked() -> None:
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []


def test_every_mark_names_a_command_of_its_block() -> None:
    for block in BLOCKS:
        for need in block.needs:
            for beginning in need.beginnings:
                assert any(f"{c}$".startswith(beginning) for c in block.commands), (block.place, beginning)


@pytest.mark.parametrize("block", of("sh"))
def test_a_shell_block_is_shell(block: Block) -> None:
    done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", of("sh"))
def test_verbs_flags_files_and_keys_of_every_command_exist(block: Block) -> None:
    for command in block.commands:
        commands.check(command, block.page)


def typed(text: str) -> IO[str]:
    """A real file in the place of a keyboard."""
    file = TemporaryFile("w+")  # noqa: SIM115 closed with the test that reads it
    file.write(text)
    file.seek(0)
    return file


@pytest.mark.parametrize("command", [command for command in RUN if not command.startswith("rocstar sandbox serve")])
def test_a_command_works_as_printed(
    served: Desk, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = served.here(command)
    if command.startswith(tuple(f"rocstar {verb}" for verb in SERVERS)):
        served.serve(line)
    elif line.startswith("rocstar ") and not set(line) & set("|&;<>$"):
        monkeypatch.chdir(served.folder)
        with typed("Add 2 and 3\n\n") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert cli.run(shlex.split(line)[1:]) == exits.OK, capsys.readouterr().err
    else:
        done = in_shell(line, served.folder)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("python"))
def test_a_python_block_runs_or_compiles_with_its_imports(served: Desk, block: Block, tmp_path: Path) -> None:
    if block.need() is None:
        script = tmp_path / "script.py"
        script.write_text(served.here(block.text))
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0, done.stderr
        return
    tree = compile(block.text, block.place, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rocstar"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python" and b.page.stem.startswith("sandbox")])
def test_python_of_the_sandbox_pages_needs_nothing_beside_the_sandbox(block: Block) -> None:
    nodes = list(ast.walk(ast.parse(block.text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    foreign = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    assert all(name.startswith("rocstar.sandbox.") for name in foreign), foreign


@pytest.mark.parametrize("block", of("toml"))
def test_a_toml_block_is_part_of_a_recipe(served: Desk, block: Block) -> None:
    keys = set(tomllib.loads(block.text)) - {"extends"}
    (served.folder / "base.toml").write_text((ROOT / "recipes" / "quickstart.toml").read_text())
    path = served.folder / "block.toml"
    path.write_text(block.text)
    if keys <= set(Recipe.model_fields):
        load_recipe(path)
    else:
        load(path, next(model for model in (MixRecipe, PoolConfig) if keys <= set(model.model_fields)))


def test_blocks_of_json_and_yaml_are_that() -> None:
    yaml = pytest.importorskip("yaml")
    for block in BLOCKS:
        if parse := {"json": json.loads, "yaml": yaml.safe_load}.get(block.language):
            parse(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_settings_and_files_in_sentences_exist(page: Path) -> None:
    for code in inline_code(page):
        setting = code.replace(" = ", "=")
        if commands.SETTING.fullmatch(setting):
            commands.check_setting(setting)
        elif re.match(r"rocstar [a-z]", code):
            for arguments in commands.rocstar_calls(code):
                commands.parse_in_part(arguments)
                commands.check_settings(arguments)
        elif code.startswith("python "):
            assert (commands.absent_files(code, page), commands.unknown_flags(code)) == ([], [])
        elif re.fullmatch(r"(rocstar|tests|benchmarks|recipes|scripts|examples)/[\w/.-]+", code):
            assert (ROOT / code).exists(), code
