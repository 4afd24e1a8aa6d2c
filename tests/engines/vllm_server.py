"""One real vLLM server for all tests of a process: started when the first of them asks, ended with the process."""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rocstar.engines.vllm import VllmEngine
from rocstar.engines.vllm_client import VllmClient
from rocstar.engines.vllm_server import VllmServer, VllmSettings
from tests.engines.models import MODELS, VOCAB, saved

POSITIONS, ROWS, CAPACITY = 16384, 4, 32768  # tokens; so long a completion lasts for half a minute
SKIPPED = "no vLLM environment: make one with scripts/vllm_env and name its interpreter in ROCSTAR_VLLM_PYTHON"


def vllm_python() -> Path:
    """Skips the test where there is none."""
    if not (named := os.environ.get("ROCSTAR_VLLM_PYTHON")):
        pytest.skip(SKIPPED)
    return Path(named)


def settings(model: Path, log: Path, **changes: Any) -> VllmSettings:
    options = {"max_tokens": POSITIONS, "rows": ROWS, "capacity_tokens": CAPACITY, "dtype": "float32", **changes}
    return VllmSettings(model=model, python=vllm_python(), log=log, **options)


class Shared:
    """The server, once there is one."""

    server: VllmServer | None = None

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)

    async def url(self) -> str:
        if self.server is None:
            model = MODELS["qwen"](0)
            model.config.max_position_embeddings = POSITIONS
            saved(model, self.folder / "0", 0)
            self.server = await VllmServer.start(settings(self.folder / "0", self.folder / "vllm.log"))
        return self.server.url


@functools.cache
def shared() -> Shared:
    return Shared()


async def idle(url: str) -> None:
    """Returns when nothing is left there of the test before."""
    client = VllmClient(url)
    while (await client.metrics()).running:  # noqa: ASYNC110 - a server tells nobody
        await asyncio.sleep(0.05)
    await client.close()


@asynccontextmanager
async def vllm_engine(vocab_size: int = VOCAB) -> AsyncIterator[VllmEngine]:
    """A fresh engine over it that holds the model of seed 0 as version 0."""
    vllm_python()
    await idle(await shared().url())
    engine = VllmEngine(await shared().url(), vocab_size=vocab_size)
    await engine.restart(None)
    if engine.load().policy_version != 0:
        await engine.load_weights(saved(MODELS["qwen"](0), shared().folder / "0", 0))
        await engine.close()
        engine = VllmEngine(engine.url, vocab_size=vocab_size)  # its counters begin here
        await engine.restart(None)
    try:
        yield engine
    finally:
        await engine.close()
