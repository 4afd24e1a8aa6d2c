"""A pool with deadlines: calls of one function in warm worker processes, which are killed when a call takes too long.

Workers are forked from one process that has imported everything (`worker.py`), so another costs milliseconds, and the
calling process, with its threads, never forks. The pools of the standard library and of pebble would import the
caller's `__main__` again in each worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from rocstar.answers.worker import WALL

WORKERS = 2  # a judging worker holds 100 MB; with two, one hard answer does not block all others
MAX_DEATHS = 2
DIED = "it died while importing"
RESTART_SECONDS = 1.0  # after a failed start: queued calls fail with its reason instead of each trying a start
MAX_ANSWER_BYTES = 2**20
# Python's own library stays in front: folders of the user's own code are first in `path` and may hold a random.py.
BOOT = """import sys, json
path, *settings = json.loads(sys.argv[1])
sys.path[3:] = path
from rocstar.answers.worker import main
main(*settings)"""
# A fixed hash seed lets the order of sets repeat; one thread per worker, since the pool is the parallelism.
FIXED = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class PoolError(Exception):
    """The pool failed, independent of the payload; the message gives the reason."""


class DeadlinePool:
    """Usable from any thread and event loop. Payloads and values are JSON. Processes start at the first call and end
    with this process, at the latest one deadline after it."""

    def __init__(
        self,
        *,
        target: str,
        prepare: str = "",
        workers: int = WORKERS,
        deadline_seconds: float = 5.0,
        memory_bytes: int = 2**30,
        start_seconds: float = 60.0,
    ) -> None:
        """target: `module:function` of one argument. prepare: `module:function` of none, called once before the first
        call. deadline_seconds: CPU time of a call, independent of the machine's load; if a call takes WALL times as
        long in wall time, the pool has failed. memory_bytes: resident memory a call may add. start_seconds: wall time
        to import and prepare."""
        self._target, self._settings = target, (target, prepare, memory_bytes)
        self._workers, self._deadline_seconds, self._start_seconds = workers, deadline_seconds, start_seconds
        self._jobs: SimpleQueue[tuple[Future[Any], bytes, float] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the threads and all below
        self._closed = False
        self._warm: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._idle: list[Connection] = []
        self._failed_at, self._failure = -RESTART_SECONDS, ""

    def submit(self, payloads: Sequence[Any], *, deadlines: int = 1) -> list[Future[Any]]:
        """Queue calls that may take so many deadlines; their futures, in order. A future raises TimeoutError at its
        end, MemoryError over the memory limit, and PoolError when the function raised, a worker died twice under the
        call, none could be started, or the pool was closed. Raises PoolError after close."""
        seconds = deadlines * self._deadline_seconds
        jobs = [(Future[Any](), json.dumps({"payload": it, "seconds": seconds})) for it in payloads]
        with self._lock:
            if self._closed:
                raise PoolError(f"the pool of {self._target} was closed; make a new one")
            for future, question in jobs:
                self._jobs.put((future, question.encode(), seconds))
            while jobs and len(self._threads) < self._workers:
                self._threads.append(threading.Thread(target=self._serve, name="answers", daemon=True))
                self._threads[-1].start()
        return [future for future, _ in jobs]

    def close(self) -> None:
        """End the processes; calls not finished raise PoolError. May be called twice, from any thread."""
        with self._lock:
            threads, self._threads, self._closed = self._threads, [], True
            self._stop()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        for worker in self._idle:
            worker.close()

    def _serve(self) -> None:
        """Consumes jobs, resolves their futures, waits for a worker's answer or end; None ends it."""
        while (job := self._jobs.get()) is not None:
            future, question, seconds = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._ask(question, seconds))
                except Exception as error:
                    future.set_exception(error)

    def _ask(self, question: bytes, seconds: float) -> Any:
        for _ in range(MAX_DEATHS):
            worker = self._take_worker()
            try:
                worker.send_bytes(question)
                answer = json.loads(worker.recv_bytes(MAX_ANSWER_BYTES))
            except (OSError, EOFError, ValueError):
                worker.close()
                continue
            if answer["full"]:
                worker.close()
            else:
                self._idle.append(worker)
            if answer["kind"] == "killed":
                if answer["value"] == signal.SIGALRM:
                    raise PoolError(f"{self._target} got too little CPU time in {seconds * WALL:g} seconds")
                if answer["value"] == signal.SIGPROF:
                    raise TimeoutError(f"{self._target} took more than {seconds} seconds")
                continue
            if answer["kind"] == "memory":
                raise MemoryError(f"{self._target} took more than {self._settings[2]} bytes")
            if answer["kind"] == "raised":
                raise PoolError(f"{self._target} raised {answer['value']}")
            return answer["value"]
        raise PoolError(f"the worker of {self._target} died {MAX_DEATHS} times on {question[:200]!r}")

    def _take_worker(self) -> Connection:
        """An idle one, or a new one. Raises PoolError."""
        with self._lock:
            if self._closed:
                raise PoolError("the pool was closed")
            while self._idle:
                if not (worker := self._idle.pop()).poll():
                    return worker
                worker.close()  # it has ended
            ours, theirs = Pipe()
            with theirs:
                for _ in range(MAX_DEATHS):
                    with suppress(OSError):
                        _, control = self._warm = self._warm or self._start()
                        socket.send_fds(control, [b"w"], [theirs.fileno()])
                        if control.recv(1):
                            break
                    self._stop()  # the warm process was killed
            return ours

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The warm process, ready, and the socket to it. Raises PoolError; ProcessLookupError where it was killed."""
        if time.monotonic() < self._failed_at + RESTART_SECONDS:
            raise PoolError(self._failure)
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        config = json.dumps([[entry or os.getcwd() for entry in sys.path], theirs.fileno(), *self._settings])
        with theirs:
            # Its own session keeps Ctrl-C away, and lets `_stop` end it and its workers with one signal.
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-c", BOOT, config],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | FIXED,
                start_new_session=True,
            )
        ours.settimeout(self._start_seconds)
        try:
            problem = ours.recv(65536).decode() or DIED
        except TimeoutError:
            problem = f"it was not ready within {self._start_seconds} seconds"
        if problem != "ready":
            self._warm = process, ours
            self._stop()
            if problem == DIED and process.returncode == -signal.SIGKILL:
                raise ProcessLookupError
            self._failed_at = time.monotonic()
            self._failure = f"the worker of {self._target} did not start: {problem}"
            raise PoolError(self._failure)
        return process, ours

    def _stop(self) -> None:
        """Kill the warm process and all its workers."""
        if self._warm is not None:
            process, control = self._warm
            self._warm = None
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the process id is still its own
            process.wait()
            control.close()
