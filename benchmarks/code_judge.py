"""code-judge as a contestant: its redis, its API with four processes and its workers, started from a checkout as its
README says. Needs redis-server on the path and an interpreter with its requirements; programs run on ours.

Limits that would end calls on a busy machine are raised, which costs it nothing."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil
from cpu import cpu_seconds

CALLS = {"W1": 60, "W2": 20, "W3": 4}
CALLERS = 4
START_SECONDS = 60.0


class CodeJudge:
    """Called with a workload's name, gives CPU milliseconds per call of all its processes."""

    def __init__(self, checkout: str, workloads: Mapping[str, str], expected: Mapping[str, str], python: str) -> None:
        self.checkout = Path(checkout)
        self.workloads = workloads
        self.expected = expected
        self.python = python
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> CodeJudge:
        self.port, redis_port = free_port(), free_port()
        environment = {
            **os.environ,
            "REDIS_URI": f"redis://localhost:{redis_port}",
            "PYTHON_EXECUTOR_PATH": sys.executable,
            "MAX_WORKERS": "2",
            "MAX_QUEUE_WORK_LIFE_TIME": "600",
            "MAX_EXECUTION_TIME": "60",
            "MAX_MEMORY": "1024",
        }
        redis = shutil.which("redis-server")
        if redis is None:
            raise SystemExit("code-judge needs redis-server on the path")
        self.start([redis, "--port", str(redis_port), "--save", ""], environment)
        serve = ["-m", "uvicorn", "app.main:app", "--workers", "4", "--limit-max-requests", "1000"]
        self.start([self.python, *serve, "--port", str(self.port), "--log-level", "warning"], environment)
        self.start([self.python, "run_workers.py"], environment)
        self.await_start()
        return self

    def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.processes.append(subprocess.Popen(command, cwd=self.checkout, env=dict(environment), **silent))

    def await_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                if self.ask("print(5)") == "5\n":
                    return
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"code-judge did not answer within {START_SECONDS} seconds")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.processes):
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait()
            psutil.wait_procs(family, timeout=2)
            for child in family:
                if child.is_running():
                    child.kill()

    def __call__(self, workload: str) -> float:
        calls = CALLS[workload]
        before = self.cpu_seconds()
        with concurrent.futures.ThreadPoolExecutor(CALLERS) as pool:
            answers = list(pool.map(self.ask, [self.workloads[workload]] * calls))
        wrong = [answer for answer in answers if answer != self.expected[workload]]
        if wrong:
            raise AssertionError(f"code-judge answered {workload} with {wrong[0]!r}")
        return 1000 * (self.cpu_seconds() - before) / calls

    def ask(self, code: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = json.dumps({"type": "python", "solution": code})
        connection.request("POST", "/run", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return str(answer["stdout"])

    def cpu_seconds(self) -> float:
        return cpu_seconds(*(process.pid for process in self.processes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
