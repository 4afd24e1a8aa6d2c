"""Python for callers outside our event loop: one sandbox that any thread or loop can call.

`SandboxThread` owns the client and the loop it lives in. TRL calls tools as plain functions, verl awaits them in loops
of its own: both go through here. Nothing is started before the first call."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rocstar.dialogue.feedback import feedback_text
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.sandbox.call import DaemonSettings, Isolation, Limits, SandboxDown
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.client.node import unfit
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import PythonTool
from rocstar.types import ToolCall, ToolResult

T = TypeVar("T")
SHOWN_CHARS = 2_000  # of a result, unless the caller says otherwise; the middle of longer ones is cut out


class SandboxThread:
    """A SandboxClient in a loop of its own."""

    def __init__(
        self,
        url: str = "",
        *,
        limits: Limits | None = None,
        slots: int = 2,
        notebooks: int = 256,
        shown_chars: int = SHOWN_CHARS,
        min_isolation: str = "L3",
    ) -> None:
        """url: a sandbox service, whose token is in ROCSTAR_SANDBOX_TOKEN; empty for a daemon of this process with
        `slots` programs and `notebooks` alive at once (one for each attempt of a batch). limits: of each program or
        cell. shown_chars: of a result that the model reads. min_isolation: see docs/sandbox.md. Raises ConfigError."""
        self.limits = limits or Limits()
        if reason := unfit(url, self.limits):
            raise ConfigError(f"the Python tool can run nothing: {reason}")
        self._url = url
        self._daemon = DaemonSettings(slots=slots, session_slots=notebooks, min_isolation=Isolation(min_isolation))
        self._shown_chars = shown_chars
        self._started = threading.Lock()
        self._client: SandboxClient | None = None
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)

    def run(self, code: str) -> ToolResult:
        """A program of its own. Raises SandboxUnavailable."""
        return self.submit(self.program(code)).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Carry out work of the client; await it elsewhere with `asyncio.wrap_future`. Raises SandboxUnavailable."""
        try:
            self.client()
        except SandboxUnavailable:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def client(self) -> SandboxClient:
        """Started with the first call. Raises SandboxUnavailable."""
        with self._started:
            if self._client is None:
                try:
                    self._client = opened_client(self._url, self._daemon)
                except SandboxDown as error:
                    raise SandboxUnavailable(str(error)) from error
                threading.Thread(target=self._loop.run_forever, name="rocstar-sandbox", daemon=True).start()
            return self._client

    def notebook(self) -> NotebookTool:
        """Cells of one attempt. Raises SandboxUnavailable."""
        return NotebookTool(self.client(), self.limits)

    def call(self, code: str) -> ToolCall:
        return ToolCall(id=f"call_{next(self._numbers)}", tool="python", arguments={"code": code}, raw="")

    def shown(self, result: ToolResult) -> str:
        """The model's text of a result."""
        return feedback_text(result, max_chars=self._shown_chars, truncate="middle", errors="full")

    def close(self) -> None:
        """End all programs. The next call starts a new sandbox."""
        with self._started:
            if self._client is not None:
                self._loop.call_soon_threadsafe(self._client.close)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._client, self._loop = None, asyncio.new_event_loop()

    async def program(self, code: str) -> ToolResult:
        """To be given to `submit`. Raises SandboxUnavailable."""
        return await PythonTool(self.client(), self.limits).run(self.call(code))


def opened_client(url: str, daemon: DaemonSettings) -> SandboxClient:
    """A client of the service at `url`, or, where that is empty, of a daemon of this process. Raises SandboxDown."""
    if url:
        token = os.environ.get("ROCSTAR_SANDBOX_TOKEN", "")
        return SandboxClient.connect([url], token=token, min_isolation=daemon.min_isolation)
    return SandboxClient(daemon).served()
