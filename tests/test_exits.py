"""What to install where a module is missing: the lightest extra that brings it, as pyproject.toml declares them."""

from __future__ import annotations

import errno
import re
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rocstar
from rocstar.errors import DataError, naming
from rocstar.support.exits import EXTRA_OF, FAILED, NOT_READY, USAGE, failure, install_command, with_pages

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def modules_of(requirements: list[str]) -> list[str]:
    """Distributions are called as their modules are, but for the dash."""
    names = [re.split(r"[\\[<>=~ ]", requirement)[0].replace("-", "_") for requirement in requirements]
    return [name for name in names if name != "rocstar"]


EXTRAS = {"": modules_of(PROJECT["dependencies"])} | {
    name: modules_of(listed) for name, listed in PROJECT["optional-dependencies"].items()
}


OUR_OWN = ("dev", "docs", "browser")  # what only work on rocstar itself needs


def test_every_dependency_names_an_extra_that_brings_it() -> None:
    for module in {module for name, brings in EXTRAS.items() if name not in OUR_OWN for module in brings}:
        assert EXTRA_OF[module] in {extra for extra, modules in EXTRAS.items() if module in modules}


def test_no_module_is_promised_that_no_extra_brings() -> None:
    assert set(EXTRA_OF) <= {module for modules in EXTRAS.values() for module in modules}


@pytest.mark.parametrize(
    ("module", "chosen"),
    [
        ("torch", ".[train]"),
        ("ray.util", ".[cluster]"),
        ("mcp", ".[mcp]"),
        ("typer", "-e '.'"),
        ("pyarrow.parquet", ".[data]"),
        ("datasets", ".[data]"),
    ],
)
def test_the_extra_that_is_missing_is_the_one_suggested(
    monkeypatch: pytest.MonkeyPatch, module: str, chosen: str
) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/theirs")
    told = failure(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert told is not None and told[0] == NOT_READY
    assert told[1].startswith(f"{module} is not installed; ") and chosen in told[1]


def test_where_scripts_install_made_the_environment_it_is_the_one_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(rocstar.__file__).parent.parent
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    assert install_command("train") == f"cd {checkout} && scripts/install train"
    monkeypatch.setattr(sys, "prefix", "/opt/theirs")
    assert "pip install" in install_command("train")


def test_an_installed_package_names_its_own_copy_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_pages(said := "docs/sandbox.md lists what there is, as do my/docs/a.md and docs/a.md") == said
    monkeypatch.setattr(rocstar, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "sandbox.md").touch()
    assert with_pages(said) == f"{tmp_path}/{said}"


def test_a_disk_that_is_full_under_sqlite_is_told_as_such() -> None:
    database = sqlite3.connect(":memory:")
    database.execute("pragma page_size = 512")
    database.execute("pragma max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as full:
        database.executescript("create table a (b); create table c (d); create table e (f);")
    told = failure(full.value)
    assert told == (FAILED, "the disk is full (while writing); free some space and try again")
    with pytest.raises(sqlite3.OperationalError) as bug:
        database.execute("select x from nowhere")
    assert failure(bug.value) is None
    in_rust = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    for error in (full.value, in_rust, OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(OSError, match=r"\[Errno 28\].*weights") as named, naming(Path("weights")):
            raise error
        assert failure(named.value) == (FAILED, "the disk is full (weights); free some space and try again")
    for other in (bug.value, ConnectionRefusedError(errno.ECONNREFUSED, "refused"), DataError(str(in_rust))):
        with pytest.raises(type(other)) as same, naming(Path("weights")):
            raise other
        assert same.value is other and not getattr(other, "filename", None)


def test_python_without_docstrings_is_refused_before_transformers_fails(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
    program = "from rocstar.cli.main import main; main()"
    command = [sys.executable, "-OO", "-c", program, "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == USAGE, done.stderr
    assert done.stderr.startswith("rocstar: PYTHONOPTIMIZE=2 (-OO) drops docstrings")
    assert not [*tmp_path.iterdir()]
