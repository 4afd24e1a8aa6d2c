"""`.ci/run` asks a few failed tests again, alone; nothing that fails then gets through."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAILS_AT_FIRST = """
from pathlib import Path

def test_{n}():
    seen = Path(__file__).with_suffix(".seen")
    asked_before = seen.exists()
    seen.touch()
    assert asked_before
"""
FAILS = "def test_{n}():\n    assert False\n"
PASSES = "def test_{n}():\n    pass\n"
BREAKS = "import nothing_of_this_name\n"


@pytest.mark.parametrize(
    ("suite", "code"),
    [
        ([PASSES, FAILS_AT_FIRST, FAILS_AT_FIRST], 0),
        ([FAILS_AT_FIRST, FAILS], 1),
        ([FAILS_AT_FIRST] * 4, 1),
        ([BREAKS, PASSES], 2),
    ],
)
def test_a_suite_passes_if_its_few_failed_tests_pass_alone(suite: list[str], code: int, tmp_path: Path) -> None:
    for n, source in enumerate(suite):
        (tmp_path / f"test_{n}.py").write_text(source.format(n=n))
    found = re.search(r"^MOST_AGAIN=.*?^}$", (ROOT / ".ci/run").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    again = found[0].replace(".venv/bin/python", sys.executable)
    pytest_command = f"{sys.executable} -m pytest -p xdist.plugin -q --rootdir {tmp_path} {tmp_path}"
    script = f"""set -e
{again}
status=0
{pytest_command} -o cache_dir={tmp_path}/cache || status=$?
again {tmp_path}/cache $status {pytest_command}"""
    quick = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # to load them all takes most of a second each time
    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=quick)
    assert ended.returncode == code, ended
    failed = [n for n, source in enumerate(suite) if source in (FAILS, FAILS_AT_FIRST)]
    assert all(f"test_{n}.py::test_{n}\n" in ended.stdout.partition("beside everything else")[2] for n in failed)
