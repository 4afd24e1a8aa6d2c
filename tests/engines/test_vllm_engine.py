"""What only the vLLM engine has, over a real server: weights that prove they arrived, a vocabulary that is cut. What it
shares with every engine is in tests/contracts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import ModelSection
from rocstar.dialogue.templates import template_named
from rocstar.engines.torch_channel import Channel
from rocstar.engines.vllm import VllmEngine
from rocstar.errors import EngineUnavailable
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy
from rocstar.run.published import PublishedWeights
from rocstar.types import Sampling, Weights
from tests.engines import plain
from tests.engines.models import HEADS, SHAPE, VOCAB, canary, lively, naive_logprobs, qwen, saved
from tests.engines.plain import until
from tests.engines.vllm_server import POSITIONS, settings, vllm_engine

PROMPT = tuple(range(3, 13))
ask = partial(plain.ask, ids=PROMPT, tokens=12)


@pytest.fixture
async def engine() -> AsyncIterator[VllmEngine]:
    async with vllm_engine() as engine:
        yield engine


def body_only(folder: Path) -> Weights:
    """The layers of the model of seed 1 under the embeddings, and so the LM head, of seed 0; claimed to be seed 1."""
    new, old = qwen(1), qwen(0)
    claimed = canary(new)
    with torch.no_grad():
        new.get_input_embeddings().weight.copy_(old.get_input_embeddings().weight)
    new.save_pretrained(folder)
    return Weights(version=3, folder=str(folder), canary=(claimed,))


async def test_weights_of_which_only_the_body_arrives_are_never_served(engine: VllmEngine, tmp_path: Path) -> None:
    """By the canary. What was in flight then is not handed out."""
    wrong, right = body_only(tmp_path / "wrong"), saved(qwen(1), tmp_path / "right", 4)
    asked = [asyncio.create_task(ask(engine, f"r{n}", tokens=POSITIONS - 200)) for n in range(3)]
    await until(lambda: engine.load().running > 0)
    with pytest.raises(EngineUnavailable, match=r"does not compute with weights 3: .* differ by up to \d.* allowed"):
        await engine.load_weights(wrong)
    for ended in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(ended, EngineUnavailable)
    with pytest.raises(EngineUnavailable, match="does not compute with weights 3"):
        await ask(engine)
    await engine.load_weights(right)
    assert [span.version for span in (await ask(engine)).version_spans] == [4]


@pytest.mark.parametrize("shares", [True, False], ids=["seen", "broadcast"])
async def test_a_server_takes_weights_sent_past_files(engine: VllmEngine, tmp_path: Path, shares: bool) -> None:
    """The canary rows prove it; those that have changed since are refused, and the server goes on."""
    known: Any = SimpleNamespace(vocab_size=VOCAB)
    policy, plain = Policy(qwen(2), known, template_named("compact")), qwen(2)
    channel = Channel(policy.device, "127.0.0.1", largest=policy.largest_tensor, shares=shares)
    with closing(PublishedWeights(tmp_path, None, channel=channel)) as published:
        assert published.publish(policy).sender is None, "engines start on a folder"
        for policy.version in (6, 7):
            with torch.no_grad():
                policy.parameters[0].mul_(1.5)
            weights = published.publish(policy)
            assert not list((tmp_path / f"{policy.version - 4:06d}").glob("*.safetensors"))
            await engine.load_weights(weights)
            found = await ask(engine, f"s{policy.version}")
            assert [span.version for span in found.version_spans] == [policy.version]
            plain.load_state_dict(policy.model.state_dict())
            ours = naive_logprobs(plain, PROMPT, found.token_ids, Sampling(max_new_tokens=1))
            assert found.logprobs == pytest.approx(ours, abs=1e-3)
        with torch.no_grad():
            policy.parameters[0].mul_(1.5)
        with pytest.raises(EngineUnavailable, match=r"weights 7 in .* were refused: .* have changed"):
            await engine.load_weights(weights)
        assert [span.version for span in (await ask(engine, "after")).version_spans] == [7]


@pytest.mark.parametrize("sent", [3, 9])  # within a layer, after one
async def test_a_server_whose_weights_broke_off_takes_them_whole_the_next_time(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """Which is at once. The canary rows prove it, though vLLM had begun to take them."""
    known: Any = SimpleNamespace(vocab_size=VOCAB)
    policy = Policy(qwen(2), known, template_named("compact"))
    channel, put, left = Channel(policy.device, "127.0.0.1", largest=policy.largest_tensor), Channel.put, [sent]

    def breaks_off(self: Channel, name: str, tensor: torch.Tensor) -> None:
        put(self, name, tensor)
        self._flush()
        left[0] -= 1
        if not left[0]:
            self.stop("another engine failed")

    monkeypatch.setattr(Channel, "put", breaks_off)
    with closing(PublishedWeights(tmp_path, None, channel=channel)) as published:
        published.publish(policy)
        policy.version = 6
        with torch.no_grad():
            policy.parameters[0].mul_(1.5)
        weights = published.publish(policy)
        await engine.load_weights(weights)
        assert left[0] < 0, "it was sent them twice"
        assert [span.version for span in (await ask(engine)).version_spans] == [6]


async def test_a_server_takes_new_experts_and_sinks_from_files_and_sent(tmp_path: Path) -> None:
    """vLLM packs experts on CPUs, and copies GPT-OSS's and its sinks past their loaders."""
    transformers, known = pytest.importorskip("transformers"), SimpleNamespace(vocab_size=VOCAB)
    shape = {**SHAPE, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = lively(transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape)))
    policy, noise = Policy(model, cast("Any", known), template_named("compact")), torch.Generator().manual_seed(0)
    channel = Channel(policy.device, "127.0.0.1", largest=policy.largest_tensor)
    with closing(PublishedWeights(tmp_path, None, channel=channel)) as published:
        asked = settings(Path(str(published.publish(policy).folder)), tmp_path / "log", max_tokens=2048)
        engine = VllmEngine(asked, vocab_size=VOCAB)
        try:
            await engine.restart(None)
            for policy.version in (1, 2, 3, 4):
                with torch.no_grad():
                    for parameter in policy.parameters:
                        parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
                await engine.load_weights(published.publish(policy, sent=policy.version > 2))
                found = await ask(engine, f"s{policy.version}")
                ours = naive_logprobs(policy.model, PROMPT, found.token_ids, Sampling(max_new_tokens=1))
                assert found.logprobs == pytest.approx(ours, abs=1e-4)
        finally:
            await engine.close()


async def test_a_server_merges_adapters_into_the_model_that_it_reads_itself(engine: VllmEngine, tmp_path: Path) -> None:
    """The canary rows prove it to 1e-3 nats; one that names no model there is refused, and the server goes on."""
    pytest.importorskip("peft")
    qwen(0).save_pretrained(tmp_path / "base")
    known: Any = SimpleNamespace(vocab_size=VOCAB)
    template, section = template_named("compact"), ModelSection(lora_rank=4)
    policy = Policy(load_model(tmp_path / "base"), known, template, section, seed=3)
    with torch.no_grad():
        for parameter in policy.parameters:
            if parameter.requires_grad:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    policy.version = 5
    weights = policy.publish(tmp_path / "5", merged=False)
    assert not (tmp_path / "5" / "model.safetensors").exists()
    await engine.load_weights(weights)
    assert [span.version for span in (await ask(engine)).version_spans] == [5]
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(EngineUnavailable, match=r"weights 5 in .* were refused: .*embed_tokens|q_proj|base"):
        await engine.load_weights(weights)
    assert [span.version for span in (await ask(engine, "again")).version_spans] == [5]


async def test_weights_that_cannot_be_read_change_nothing(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"weights 3 in .* were refused"):
        await engine.load_weights(Weights(version=3, folder=str(tmp_path), canary=(canary(qwen(0)),)))
    assert (await ask(engine)).version_spans == ((0, 12),)


async def test_ids_beyond_the_tokenizer_are_never_drawn_and_take_no_probability() -> None:
    async with vllm_engine(vocab_size=20) as engine:
        completion = await ask(engine, tokens=60)
    assert max(completion.token_ids) < 20
    model = qwen(0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1, :20]
    laws = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
    assert completion.logprobs == pytest.approx(laws.tolist(), abs=1e-4)


async def test_a_session_whose_prefix_is_gone_counts_as_evicted(engine: VllmEngine) -> None:
    ids = tuple(n % VOCAB for n in range(300))
    asked = Sampling(max_new_tokens=1)
    await engine.generate(ids, asked, request_id="s/0", session_id="s")
    await engine.generate((*ids, 1), asked, request_id="s/1", session_id="s")
    assert (engine.load().recomputed_tokens, engine.load().evictions) == (0, 0)
    async with httpx.AsyncClient(base_url=engine.url, timeout=60, trust_env=False) as http:
        (await http.post("/reset_prefix_cache")).raise_for_status()
    await engine.generate((*ids, 1, 2), asked, request_id="s/2", session_id="s")
    assert (engine.load().recomputed_tokens, engine.load().evictions) == (256, 1)


async def test_a_restarted_engine_has_the_weights_it_is_given(engine: VllmEngine, tmp_path: Path) -> None:
    await ask(engine)
    weights = saved(qwen(1), tmp_path, 3)
    await engine.restart(lambda: weights)
    completion = await ask(engine)
    asked = Sampling(max_new_tokens=12)
    assert completion.version_spans == ((3, 12),)
    assert completion.logprobs == pytest.approx(naive_logprobs(qwen(1), PROMPT, completion.token_ids, asked), abs=1e-4)
    waiting = asyncio.create_task(ask(engine, tokens=POSITIONS - 200))
    await asyncio.sleep(0)
    await engine.close()
    for late in (waiting, ask(engine)):
        with pytest.raises(EngineUnavailable, match="was closed"):
            await late
