"""The thread behind the trusted lane: hands calls to workers, enforces their limits, replaces those that failed.

Not here: the face that callers use (`trusted`), one process (`trusted_process`), what runs in it (`trusted_worker`).
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rocstar.sandbox.trusted_calls import Chunk, TargetLate, TargetRaised, TargetTooBig, TrustedDown
from rocstar.sandbox.trusted_process import WorkerProcess

LOOK_SECONDS = 0.1  # between two looks at the memory of workers that are busy
RESTART_SECONDS = 1.0  # between a start that failed and the next, so that a broken target does not burn a core
MAX_DEATHS = 2


@dataclass(slots=True, eq=False)
class Worker:
    process: WorkerProcess
    born: float
    """Monotonic time of its start."""
    deadline: float
    """Monotonic time by which it must be ready, or answer the first call of its chunk."""
    chunk: Chunk = field(default_factory=deque)
    ready: bool = False
    answered: int = 0


class TrustedCrew:
    """Consumes chunks from `submit`, produces results in the calls' futures, and waits for workers; a deadline, a
    worker's end, a new chunk or `stop` unblocks it. All but the inbox belongs to its thread."""

    def __init__(self, settings: Mapping[str, Any], *, workers: int, start_seconds: float) -> None:
        self.settings = settings
        self.limit = workers
        self.memory_bytes: int = settings["memory_bytes"]
        self.start_seconds = start_seconds
        self.lock = threading.Lock()  # guards inbox and closed
        self.inbox: list[Chunk] = []
        self.closed = False
        self.queue: deque[Chunk] = deque()
        self.workers: list[Worker] = []
        self.start_after = 0.0
        self.next_look = 0.0
        self.bell, self.bell_end = socket.socketpair()
        self.bell.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.bell_end, selectors.EVENT_READ, None)
        self.thread = threading.Thread(target=self.serve, name="trusted-lane", daemon=True)
        self.thread.start()

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """From any thread. Raises TrustedDown after `stop`."""
        with self.lock:
            if self.closed:
                raise TrustedDown("the trusted pool was closed; make a new one")
            self.inbox += chunks
            self.wake()

    def stop(self) -> None:
        """End workers and thread; calls not finished raise TrustedDown. From any other thread."""
        with self.lock:
            self.closed = True
            self.wake()
        self.thread.join()

    def wake(self) -> None:
        with suppress(OSError):  # full: it is about to wake; closed: it has ended
            self.bell.send(b"!")

    def serve(self) -> None:
        try:
            while not self.closed:
                self.take_inbox()
                self.dispatch()
                for key, events in self.selector.select(self.patience()):
                    if key.data is None:
                        self.bell_end.recv(4096)
                    else:
                        self.attend(key.data, events)
                self.enforce()
        finally:
            self.end()

    def take_inbox(self) -> None:
        with self.lock:
            chunks, self.inbox = self.inbox, []
        self.queue += chunks

    def dispatch(self) -> None:
        """Chunks to idle workers; another worker where none is idle and the limit allows."""
        idle = deque(worker for worker in self.workers if worker.ready and not worker.chunk)
        while self.queue and idle:
            self.give(idle.popleft(), self.queue.popleft())
        starting = sum(not worker.ready for worker in self.workers)
        for _ in range(min(len(self.queue) - starting, self.limit - len(self.workers))):
            if time.monotonic() >= self.start_after:
                self.start_worker(deque())

    def start_worker(self, chunk: Chunk) -> None:
        """`chunk`: what it will run first, for a worker that replaces one that failed under it."""
        try:
            process = WorkerProcess(self.settings)
        except OSError as error:
            self.start_failed(chunk, str(error))
            return
        now = time.monotonic()
        worker = Worker(process, now, now + self.start_seconds, chunk)
        self.workers.append(worker)
        self.selector.register(process.socket, selectors.EVENT_READ, worker)

    def start_failed(self, chunk: Chunk, reason: str) -> None:
        self.start_after = time.monotonic() + RESTART_SECONDS
        lost = list(chunk)
        if not any(worker.ready for worker in self.workers):
            lost += [call for waiting in self.queue for call in waiting]
            self.queue.clear()
        for call in lost:
            call.fail(TrustedDown(f"the trusted worker for {self.settings['target']} did not start: {reason}"))

    def give(self, worker: Worker, chunk: Chunk) -> None:
        worker.chunk = deque(call for call in chunk if not call.future.cancelled())
        if worker.chunk:
            worker.deadline = time.monotonic() + worker.chunk[0].seconds
            self.send(worker, b"".join(call.line for call in worker.chunk))

    def send(self, worker: Worker, data: bytes) -> None:
        done = worker.process.send(data)
        events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
        self.selector.modify(worker.process.socket, events, worker)

    def attend(self, worker: Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.send(worker, b"")
        if not events & selectors.EVENT_READ:
            return
        lines = worker.process.receive()
        if lines is None:
            self.drop(worker)
            self.died(worker)
            return
        for line in lines:
            if worker in self.workers:  # an answer may have ended it; then what follows runs again elsewhere
                self.take(worker, json.loads(line))

    def take(self, worker: Worker, answer: Mapping[str, Any]) -> None:
        if not worker.ready:
            self.greeted(worker, answer)
            return
        if "memory" in answer or answer["peak"] > self.memory_bytes:
            self.too_big(worker)
            return
        call = worker.chunk.popleft()
        worker.answered += 1
        if worker.chunk:
            worker.deadline = time.monotonic() + worker.chunk[0].seconds
        if "raised" in answer:
            call.fail(TargetRaised(answer["raised"]["text"], answer["raised"]["trace"]))
        else:
            call.resolve(answer["value"])

    def greeted(self, worker: Worker, greeting: Mapping[str, Any]) -> None:
        if "failed" in greeting:
            self.drop(worker)
            self.start_failed(worker.chunk, greeting["failed"])
            return
        worker.ready = True
        self.give(worker, worker.chunk)

    def died(self, worker: Worker) -> None:
        if not worker.ready:
            self.start_failed(worker.chunk, "its process died while importing")
            return
        if not worker.chunk:
            if time.monotonic() >= worker.born + RESTART_SECONDS:  # else it may die of itself, again and again
                self.start_worker(deque())
            return
        call = worker.chunk[0]
        call.deaths += 1
        if call.deaths < MAX_DEATHS:
            self.start_worker(worker.chunk)
            return
        target = self.settings["target"]
        call.fail(TrustedDown(f"the trusted worker for {target} died {call.deaths} times on {call.line[:200]!r}"))
        self.replace(worker)

    def late(self, worker: Worker) -> None:
        self.drop(worker)
        if not worker.ready:
            self.start_failed(worker.chunk, f"it was not ready within {self.start_seconds} seconds")
            return
        call = worker.chunk[0]
        call.fail(TargetLate(f"{self.settings['target']} gave no answer within {call.seconds} seconds"))
        self.replace(worker)

    def too_big(self, worker: Worker) -> None:
        """A worker that has answered others may hold their garbage: then the call gets a fresh one to itself."""
        self.drop(worker)
        if not worker.ready:
            self.start_failed(worker.chunk, f"importing alone takes more than {self.memory_bytes} bytes")
        elif worker.answered:
            self.start_worker(worker.chunk)
        else:
            limit = f"{self.settings['target']} took more than {self.memory_bytes} bytes"
            worker.chunk[0].fail(TargetTooBig(limit))
            self.replace(worker)

    def replace(self, worker: Worker) -> None:
        """For one that its first call has cost: a new one now, so that the next call does not wait for its imports.
        The rest of its chunk goes to whoever is idle first."""
        worker.chunk.popleft()
        if worker.chunk:
            self.queue.appendleft(worker.chunk)
        self.start_worker(deque())

    def enforce(self) -> None:
        now = time.monotonic()
        look = now >= self.next_look
        if look:
            self.next_look = now + LOOK_SECONDS
        for worker in self.pressed():
            if now >= worker.deadline:
                self.late(worker)
            elif look and worker.process.resident_bytes() > self.memory_bytes:
                self.too_big(worker)

    def pressed(self) -> list[Worker]:
        """Workers with a deadline."""
        return [worker for worker in self.workers if worker.chunk or not worker.ready]

    def patience(self) -> float | None:
        """How long nothing can happen by itself, seconds; None: for ever."""
        deadlines = [worker.deadline for worker in self.pressed()]
        if deadlines or self.queue:
            return max(0.0, min([LOOK_SECONDS, *(at - time.monotonic() for at in deadlines)]))
        return None

    def drop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.selector.unregister(worker.process.socket)
        worker.process.kill()

    def end(self) -> None:
        with self.lock:
            self.closed = True  # also when this thread dies of a bug: nobody may wait for it
            chunks = [*self.inbox, *self.queue, *(worker.chunk for worker in self.workers)]
            self.selector.unregister(self.bell_end)
            self.bell.close()
            self.bell_end.close()
        for worker in list(self.workers):
            self.drop(worker)
        self.selector.close()
        for call in [call for chunk in chunks for call in chunk]:
            call.fail(TrustedDown("the trusted pool was closed"))
