"""The torch engine in a process of its own: the module that `process.py` starts."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rocstar.engines.child import run
from rocstar.engines.process import EngineSettings
from rocstar.engines.torch_engine import TorchEngine
from rocstar.errors import EngineUnavailable
from rocstar.types import Weights


async def opened(settings: EngineSettings) -> TorchEngine:
    """Raises ConfigError where it does not fit into memory, EngineUnavailable where the folder cannot be read."""
    disable_progress_bar()
    torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", settings.place % torch.cuda.device_count())
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=getattr(torch, settings.dtype))
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"the model in {settings.folder} could not be loaded: {error}") from error
    model = model.to(device)
    engine = TorchEngine(
        model,
        rows=settings.rows,
        positions=settings.positions,
        kv_tokens=settings.kv_tokens,
        vocab_size=settings.vocab_size,
    )
    if settings.version:  # else it has what the folder holds
        await engine.load_weights(Weights(version=settings.version, folder=settings.folder))
    return engine


if __name__ == "__main__":
    raise SystemExit(run(opened, sys.argv[1:]))
