"""`rocstar sandbox serve`: listens, starts the workers, replaces those that die, and sees them out.

Small on purpose: it forks, so it loads neither the web server nor a thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from rocstar.sandbox.service.ledger import Ledger
from rocstar.sandbox.service.listeners import Listeners
from rocstar.sandbox.service.settings import Settings

OK, FAILED, NOT_READY = 0, 1, 3
"""Exit codes, of a worker and of the whole."""
POLL_SECONDS = 0.01  # while workers start


class Supervisor:
    """Waits for its children; unblocked by the end of one. Signals only pass on: see `stop`."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.say = say
        self.ledger = Ledger(settings.workers)
        self.started = time.time()
        self.workers: dict[int, int] = {}
        """Process id -> number of the worker."""
        self.exit_code: int | None = None
        """Set when the service is ending."""

    def run(self) -> int:
        """Serve until a signal; the exit code. Raises OSError when the address cannot be had."""
        self.listeners = Listeners.open(self.settings)
        self.lifeline, self.held = os.pipe()
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        for number in range(self.settings.workers):
            self.start(number)
        self.await_ready()
        while self.workers:
            self.ended(*os.waitpid(-1, 0))
        self.listeners.remove()
        return self.exit_code or OK

    def start(self, number: int) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(self.become_worker(number))
        self.workers[pid] = number

    def become_worker(self, number: int) -> int:
        """The worker's exit code."""
        from rocstar.sandbox.service import worker
        from rocstar.sandbox.wire import SandboxDown

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self.held)
        self.listeners.keep_only(number)
        try:
            worker.work(self.settings, self.ledger, number, self.listeners, self.lifeline, self.started)
        except SandboxDown as error:
            self.say(str(error))
            return NOT_READY
        return OK

    def await_ready(self) -> None:
        """Say where we listen once every worker serves. The kernel holds callers that come earlier."""
        while self.exit_code is None and self.ledger.total("ready") < self.settings.workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                self.ended(pid, status)
            time.sleep(POLL_SECONDS)
        if self.exit_code is None:
            host, port = self.listeners.public[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self.say(f"serving on http://{shown}:{port}  (pages: /docs /status /metrics)")

    def ended(self, pid: int, status: int) -> None:
        """A worker that has served is replaced; one that never came up would never come up."""
        number = self.workers.pop(pid)
        if self.exit_code is not None:
            return
        code = os.waitstatus_to_exitcode(status)
        if self.ledger.row(number)["ready"]:
            self.say(f"worker {number} died ({code}); another takes its place")
            self.start(number)
        else:
            self.end(code if code > 0 else FAILED)

    def stop(self, signum: int, frame: object) -> None:
        """The second time does not wait for calls that run."""
        if self.exit_code is None:
            self.end(OK)
        else:
            self.tell(signal.SIGKILL)

    def end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.listeners.close()  # the workers hold theirs a little longer
        self.tell(signal.SIGTERM)

    def tell(self, signum: signal.Signals) -> None:
        for pid in self.workers:
            os.kill(pid, signum)
