"""What a node does with a call: hands it to a sandbox. `simulate` has the other implementation, which only waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rocstar.sandbox.router import codec
from rocstar.sandbox.session import SessionLost
from rocstar.sandbox.wire import HostInfo, Request, Response, SandboxDown

Finish = Callable[[bytes], None]
"""Takes the encoded result; is called exactly once per call, a withdrawn one included."""
Withdraw = Callable[[], object]


class Work(Protocol):
    def begin(self, call: Mapping[str, Any], finish: Finish) -> Withdraw:
        """Start on a call as `codec.encoded_request` made it. Returns what ends it early."""
        ...

    def tell(self, message: Mapping[str, Any]) -> None:
        """A session is branched or closed, in the words of `Session`."""
        ...

    def info(self) -> HostInfo: ...

    def cpu_seconds(self) -> float:
        """CPU of all this so far, seconds, apart from our own process."""
        ...


class Runner(Protocol):
    """SandboxClient, and all that has its face."""

    async def run(self, request: Request) -> Response: ...

    async def call(self, message: Mapping[str, Any]) -> Response: ...

    def tell(self, message: Mapping[str, Any]) -> None: ...

    def info(self) -> HostInfo: ...

    def cpu_seconds(self) -> float: ...


class SandboxWork:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.tasks: set[asyncio.Task[bytes]] = set()  # the loop itself holds tasks only weakly

    def begin(self, call: Mapping[str, Any], finish: Finish) -> Withdraw:
        task = asyncio.create_task(self.result_of(call))
        self.tasks.add(task)

        def ended(task: asyncio.Task[bytes]) -> None:
            self.tasks.discard(task)
            finish(codec.encoded_fault("withdrawn", call["id"]) if task.cancelled() else task.result())

        task.add_done_callback(ended)
        return task.cancel

    async def result_of(self, call: Mapping[str, Any]) -> bytes:
        try:
            if call["kind"] == "cell":
                return codec.encoded_response(await self.runner.call(call), call["id"])
            return codec.encoded_response(await self.runner.run(codec.parse_request(call)), call["id"])
        except SessionLost:
            return codec.encoded_lost(call["id"])
        except (SandboxDown, TypeError, ValueError) as error:  # the last two: a request from another version of us
            return codec.encoded_fault(str(error), call["id"])

    def tell(self, message: Mapping[str, Any]) -> None:
        self.runner.tell(message)

    def info(self) -> HostInfo:
        return self.runner.info()

    def cpu_seconds(self) -> float:
        return self.runner.cpu_seconds()
