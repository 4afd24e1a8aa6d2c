"""Questions that a person types, read while other things are done: a model is loaded meanwhile, and Ctrl-C ends the
wait. Loads nothing heavy."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import Future

READ_BYTES = 65536


class Typed:
    """Lines of standard input, one at a time."""

    def __init__(self) -> None:
        self._rest = b""
        self._asked: Future[str] | None = None

    def ask(self, remark: str = "") -> None:
        """Begin to read a question; `remark` is shown beside the request for it."""
        if sys.stdin.isatty():
            print(f"question (empty line ends{remark})> ", end="", file=sys.stderr, flush=True)
        self._asked = Future()
        threading.Thread(target=self._wait, args=(self._asked,), name="typed", daemon=True).start()

    async def question(self) -> str:
        """The question that was begun, or a new one; empty at the end of the input. Bytes that are no text are shown
        as question marks."""
        if self._asked is None:
            self.ask()
        asked, self._asked = self._asked, None
        assert asked is not None
        return (await asyncio.wrap_future(asked)).strip()

    def _wait(self, asked: Future[str]) -> None:
        """Not by `sys.stdin`: a thread that waits in that holds a lock which keeps the process from ending."""
        asked.set_running_or_notify_cancel()
        try:
            while b"\n" not in self._rest and (more := os.read(sys.stdin.fileno(), READ_BYTES)):
                self._rest += more
        except (OSError, ValueError) as error:  # it was closed
            asked.set_exception(error)
            return
        line, _, self._rest = self._rest.partition(b"\n")
        asked.set_result(line.decode("utf-8", "replace"))
