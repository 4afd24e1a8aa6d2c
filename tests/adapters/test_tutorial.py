"""The Python of docs/tutorials/06-sandbox-elsewhere.md runs as printed, against a service that is not on its port."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox_service.support import running

PAGE = Path(__file__).parents[2] / "docs/tutorials/06-sandbox-elsewhere.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
LIBRARIES = ("trl", "verl", "inspect_ai", "mcp")


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with running() as url:
        yield url


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_as_printed(number: int, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in LIBRARIES:
        if re.search(rf"^(from|import) (rocstar\.adapters\.)?{library}\b", BLOCKS[number], re.MULTILINE):
            pytest.importorskip(library, reason=f"{library} has an environment of its own: scripts/adapters_env")
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number].replace("http://127.0.0.1:8700", service), str(PAGE), "exec"), {"__name__": "page"})
