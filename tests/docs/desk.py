"""The folder in which the commands of the pages are carried out: the files and runs that they name, small.

Three copies of one tiny run stand in for the runs; everything else is what a reader would have: problems, cases,
a reward function, and the folders of a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.files import jsonl
from tests.tutorials.session import commands

RUNS = ("A", "B", "C", "D", "tiny")
"""By what a page calls them; the one that was written last is `last`."""
CHECKOUT = ("recipes", "examples", "benchmarks", "constraints", "pyproject.toml")
PROBLEMS = [{"question": f"Add {a} and 3", "answer": str(a + 3)} for a in (2, 3)]
CASES = [
    {"text": "\\boxed{1/2}", "gold": "0.5", "response": "so \\boxed{7}", "solution": "7", "expected": True},
    {"text": "\\boxed{3}", "gold": "4", "response": "\\boxed{8}", "solution": "7", "expected": False},
]
REWARD = """\
def right(completions, solution, **columns):
    return [float(f"boxed{{{answer}}}" in str(text)) for text, answer in zip(completions, solution)]
"""


def laid(folder: Path, finished: Path) -> Path:
    """Lay it out. finished: the folder in which the tiny run was made."""
    folder.mkdir()
    for name in CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    for name in RUNS:
        shutil.copytree(finished / "runs" / "tiny", folder / "runs" / name)
    for name in ("tiny.toml", "rows.jsonl", "train.jsonl", "test.jsonl"):
        shutil.copy(finished / name, folder / name)
    shutil.copy(finished / "tiny.toml", folder / "mine.toml")
    jsonl(folder / "problems.jsonl", *PROBLEMS)
    jsonl(folder / "svamp.jsonl", {"Body": "Add 2 and 3", "Question": "?", "Answer": 5})
    jsonl(folder / "cases.jsonl", *CASES)
    (folder / "my_rewards.py").write_text(REWARD)
    return folder


def environment() -> dict[str, str]:
    """Of a shell in which `rocstar` and `python` are those of this checkout."""
    return {**os.environ, "PATH": f"{commands()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def in_shell(command: str, desk: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-ec", command], cwd=desk, env=environment(), capture_output=True, text=True, timeout=400, **more
    )
