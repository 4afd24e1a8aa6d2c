"""The peers' own tests against `rocstar sandbox serve`, through a thin client: does our service keep their promises?

    python benchmarks/peer_tests.py [--code-judge FOLDER] [--sandbox-fusion FOLDER]

FOLDER: a checkout of the peer (github.com/0xWJ/code-judge, github.com/bytedance/SandboxFusion). Their test files are
used as they are; only the client behind them is exchanged: instead of the peer's own application it calls our service.
They want the package fastapi. Of code-judge all tests of Python are run, those of C++ are not. Prints what pytest says
and last one JSON line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from frame import environment, free_port, parser, report, rocstar, serving

SLOTS = 4  # code-judge's test of /status expects four workers
PYTHON_ONLY = "not cpp and (test_batch_fail or not test_batch)"  # the other batches hold programs in C++
FUSION_TESTS = ("test_python.py", "test_jupyter.py")

CODE_JUDGE_CONFTEST = """
import os

import httpx
import pytest


@pytest.fixture(scope="session")
def test_client():
    with httpx.Client(base_url=os.environ["SERVICE"], timeout=60) as client:
        yield client
"""

# Their request and response models are theirs; the runners and the server behind them are not loaded.
FUSION_CONFTEST = """
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import fastapi.testclient
import httpx

PEER = Path(os.environ["PEER"], "sandbox")


def stub(name, **members):
    module = ModuleType(name)
    module.__dict__.update(members)
    module.__path__ = []
    sys.modules[name] = module
    return module


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stub("sandbox")
stub("sandbox.server")
sys.modules["structlog"] = MagicMock()
runners = stub("sandbox.runners", CODE_RUNNERS={}, run_jupyter=None)
runners.__dict__.update(vars(load("sandbox.runners.types", PEER / "runners/types.py")))
load("sandbox.server.sandbox_api", PEER / "server/sandbox_api.py")
stub("sandbox.server.server", app=None)
fastapi.testclient.TestClient = lambda app: httpx.Client(base_url=os.environ["SERVICE"], timeout=60)
"""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--code-judge", type=Path, metavar="FOLDER")
    arguments.add_argument("--sandbox-fusion", type=Path, metavar="FOLDER")
    given = arguments.parse_args()
    figures = {}
    if given.code_judge:
        tests = [given.code_judge / "tests/test_main.py"]
        figures["code_judge"] = run_tests(tests, CODE_JUDGE_CONFTEST, given.code_judge, PYTHON_ONLY)
    if given.sandbox_fusion:
        tests = [given.sandbox_fusion / "sandbox/tests/runners" / name for name in FUSION_TESTS]
        figures["sandbox_fusion"] = run_tests(tests, FUSION_CONFTEST, given.sandbox_fusion, "")
    if not figures:
        arguments.error("name at least one peer's folder")
    report(**figures)
    sys.exit(any(figure["failed"] for figure in figures.values()))


def run_tests(tests: list[Path], conftest: str, peer: Path, chosen: str) -> dict[str, int]:
    """Passed and failed tests of these files."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = rocstar("sandbox", "serve", "--slots", str(SLOTS))
    is_up = serving(serve, port, lambda: is_200(f"{url}/status"), env=environment(), stderr=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder, is_up:
        Path(folder, "conftest.py").write_text(conftest)
        for test in tests:
            shutil.copy(test, folder)
        pytest = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        command = [*pytest, "-k", chosen, "--rootdir", folder, folder]
        outside = {**os.environ, "SERVICE": url, "PEER": str(peer)}
        ended = subprocess.run(command, env=outside, cwd=folder, capture_output=True, text=True)
    print(ended.stdout)
    if not ended.stdout.strip():
        sys.exit(f"their tests did not start: {ended.stderr.strip()[-300:]}")
    last = ended.stdout.splitlines()[-1]
    count = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|error)", last)}
    return {"passed": count.get("passed", 0), "failed": count.get("failed", 0) + count.get("error", 0)}


def is_200(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)


if __name__ == "__main__":
    main()
