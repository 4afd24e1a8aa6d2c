"""The torch engine against plain transformers, and what it does with prompts, siblings, new weights and misuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines import torch_cache, torch_compact
from rocstar.engines.process import EngineSettings
from rocstar.engines.torch_cache import PagedCache
from rocstar.engines.torch_engine import TorchEngine, opened
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.types import Completion, Sampling, Weights
from tests.engines.models import MODELS, VOCAB, llama, mistral, qwen, resident, saved
from tests.engines.plain import until

SHORT = tuple(range(1, 12))
LONG = tuple(n * 7 % VOCAB for n in range(90))


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    made = TorchEngine(qwen(0), rows=4, positions=256)
    yield made
    await made.close()


async def ask(engine: TorchEngine, ids: Any, session: str = "s", tokens: int = 12, **sampling: Any) -> Completion:
    asked = Sampling(max_new_tokens=tokens, **{"seed": 11, **sampling})
    return await engine.generate(ids, asked, request_id=f"{session}/{len(ids)}", session_id=session)


def held(model: Any) -> int:
    """Bytes of the weights that a model holds itself."""
    tensors = [each for each in model.state_dict().values() if not each.is_meta]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.data_ptr()}.values())


async def test_new_weights_take_no_more_memory_than_the_old() -> None:
    """The engine's thread made anew what another one had made, whose memory the C library kept."""
    engine = TorchEngine(
        model := llama(0, hidden_size=512, intermediate_size=2048, num_hidden_layers=8), rows=1, positions=32
    )
    tensors = {name: torch.zeros(each.shape) for name, each in model.state_dict().items()}
    before = resident()
    await engine.load_weights(Weights(version=1, tensors=tensors))
    assert resident() - before < 2**24
    await engine.close()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "as on a GPU"])
@pytest.mark.parametrize("kind", ["qwen", "llama", "mistral"])
async def test_asleep_it_holds_neither_weights_nor_cache_and_takes_both_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, packed: bool
) -> None:
    """As on a GPU, where the memory of the cache is a tensor's. Weights that cannot be read leave it asleep."""

    def zeros(cache: PagedCache, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    monkeypatch.setattr(PagedCache, "_zeros", zeros)
    monkeypatch.setattr(torch_compact, "PACKED_FROM", 0 if packed else torch.inf)
    make, model = MODELS[kind], MODELS[kind](0)
    engine, fresh = TorchEngine(model, rows=4, positions=256), TorchEngine(make(1), rows=4, positions=256)
    before, cache = await ask(engine, LONG), engine._decoder._cache
    size = held(model)
    await engine.sleep()
    await engine.sleep()
    assert size > 0 == held(model)
    assert not any(each.weight.numel() for each in getattr(engine._decoder._forward, "_reordered", ()))
    assert cache.keys.numel() == cache.values.numel() == engine.load().used_tokens == 0
    request = asyncio.create_task(ask(engine, (*LONG, *before.token_ids, 3)))
    with pytest.raises(EngineUnavailable, match="could not be read"):
        await engine.load_weights(Weights(version=1, folder=str(tmp_path)))
    await asyncio.sleep(0.05)
    assert not request.done() and not cache.keys.numel() and not held(model)
    await engine.load_weights(saved(make(1), tmp_path, 1))
    assert held(model) == size
    completion, expected = await request, await ask(fresh, (*LONG, *before.token_ids, 3))
    assert (completion.token_ids, completion.logprobs) == (expected.token_ids, expected.logprobs), "to the bit"
    await engine.close()
    await fresh.close()


async def test_folders_that_cannot_be_used_are_refused_in_words(engine: TorchEngine, tmp_path: Path) -> None:
    """As new weights, and when an engine is opened on them."""
    missing, torn = tmp_path / "missing", tmp_path / "torn"
    qwen(0).save_pretrained(torn)
    sound = (torn / "config.json").read_text()
    kernel = {"_attn_implementation": "someone/kernel"}  # code of the hub, which is not fetched
    (torn / "config.json").write_text(json.dumps({**json.loads(sound), **kernel}))
    settings = EngineSettings(folder=str(torn), rows=1, positions=16, vocab_size=VOCAB)
    fine = await opened(settings)
    mapped = await asyncio.to_thread(Path("/proc/self/maps").read_text)
    assert str(torn) not in mapped, "a run's weights in memory would stay when deleted"
    await fine.close()
    changed = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (torn / "config.json").write_text(json.dumps({**json.loads(sound), **changed}))
    with pytest.raises(
        EngineUnavailable, match=r"its config\.json describes \(tensors unknown to such a model: \d+, s"
    ):
        await opened(settings)
    (torn / "config.json").write_text(sound)
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineUnavailable, match="could not be loaded"):
        await opened(settings)
    for folder in (missing, torn):
        with pytest.raises(EngineUnavailable, match="could not be read"):
            await engine.load_weights(Weights(version=1, folder=str(folder)))
    with pytest.raises(EngineUnavailable, match="do not fit the model"):
        await engine.load_weights(saved(MODELS["llama"](0), tmp_path / "llama", 1))


async def test_a_request_that_makes_no_sense_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        await ask(engine, ())
    with pytest.raises(ConfigError, match="at least one new token"):
        await ask(engine, SHORT, tokens=0)
    for strange in (-1, VOCAB):
        with pytest.raises(ConfigError, match=f"token ids must lie below {VOCAB}"):
            await ask(engine, (1, strange, 2))


async def test_a_failure_of_the_arithmetic_reaches_all(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*unused: Any) -> None:
        raise RuntimeError("out of memory")

    requests = [asyncio.create_task(ask(engine, LONG, f"s{n}", tokens=100)) for n in range(7)]
    await until(lambda: engine.load().running == 4)
    with monkeypatch.context() as broken:
        broken.setattr(engine._decoder, "_forward", fail)
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert {str(result) for result in results} == {"decoding failed: out of memory"}
    assert all(isinstance(result, EngineUnavailable) for result in results)
    assert (engine.load().running, engine.load().used_tokens) == (0, 0)
    assert len((await ask(engine, SHORT, "later")).token_ids) == 12


async def test_closing_the_engine_tells_whoever_waits() -> None:
    engine = TorchEngine(qwen(0), rows=4, positions=256)
    request = asyncio.create_task(ask(engine, SHORT, tokens=200))
    await until(lambda: engine.load().running > 0)
    await engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await request
    for late in (ask(engine, SHORT), engine.load_weights(Weights(version=1, folder="anywhere"))):
        with pytest.raises(EngineUnavailable, match="closed"):
            await late


def test_a_model_whose_windows_no_attention_function_is_told_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check by rows within its window would not find that."""
    untold = torch_cache._attend_in_library
    monkeypatch.setattr(
        torch_cache, "_attend_in_library", lambda *given, sliding_window, **more: untold(*given, **more)
    )
    with pytest.raises(ConfigError, match=r"cannot run a model of type mistral: .* next tokens would differ"):
        TorchEngine(mistral(0), rows=4, positions=64)
