"""code-judge as a contestant: its redis, its API with four processes and its workers, started from a checkout as its
README says. Needs redis-server on the path and an interpreter with its requirements; programs run on ours.

Limits that would end calls on a busy machine are raised, which costs it nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from frame import cpu_seconds, free_port, serving, tree

CALLS = {"W1": 60, "W2": 20, "W3": 4}
CALLERS = 4


@contextmanager
def code_judge(
    checkout: str, workloads: Mapping[str, str], expected: Mapping[str, str], python: str
) -> Iterator[Callable[[str], float]]:
    """A function from a workload's name to CPU milliseconds per call of all its processes."""
    redis = shutil.which("redis-server")
    if redis is None:
        raise SystemExit("code-judge needs redis-server on the path")
    port, redis_port = free_port(), free_port()
    limits = {"MAX_WORKERS": "2", "MAX_QUEUE_WORK_LIFE_TIME": "600", "MAX_EXECUTION_TIME": "60", "MAX_MEMORY": "1024"}
    places = {"REDIS_URI": f"redis://localhost:{redis_port}", "PYTHON_EXECUTOR_PATH": sys.executable}
    child = {"cwd": checkout, "env": {**os.environ, **limits, **places}, "stderr": subprocess.DEVNULL}
    others = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, **child)
        for command in ([redis, "--port", str(redis_port), "--save", ""], [python, "run_workers.py"])
    ]
    serve = [python, "-m", "uvicorn", "app.main:app", "--workers", "4", "--limit-max-requests", "1000"]

    def measured(workload: str) -> float:
        calls, before = CALLS[workload], cpu_seconds(*pids)
        with ThreadPoolExecutor(CALLERS) as pool:
            answers = list(pool.map(lambda code: ask(port, code), [workloads[workload]] * calls))
        wrong = [answer for answer in answers if answer != expected[workload]]
        if wrong:
            raise AssertionError(f"code-judge answered {workload} with {wrong[0]!r}")
        return 1000 * (cpu_seconds(*pids) - before) / calls

    try:
        with serving([*serve, "--log-level", "warning"], port, lambda: ask(port, "print(5)") == "5\n", **child) as pid:
            pids = [pid, *(process.pid for process in others)]
            yield measured
    finally:
        for process in [each for parent in others if parent.poll() is None for each in tree(parent.pid)]:
            process.terminate()
        for parent in others:
            parent.wait()


def ask(port: int, code: str) -> str:
    body = json.dumps({"type": "python", "solution": code}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/run", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["stdout"])
