"""The engine in bf16 beside the learner in bf16, at positions up to 5,000: for each family they differ by no more than
the learner does from itself in fp32. And the canary rows, which tell other weights from rounding."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.engines.pages import PAGE
from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.torch_forward import forward_of, lowered
from rocstar.engines.vllm import TOLERANCES, too_far
from rocstar.errors import ConfigError
from rocstar.learning.learner import GrpoLearner
from rocstar.types import Canary, Sampling, gaps
from tests.learning.examples import policy_of, written
from tests.learning.test_attention import causal_lm

STRETCH = 500
FAR = "Qwen3"
"""Tried to position 5,000, which costs the square of it: where errors of angles grow is one code for all."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma": {"head_dim": 32},
    "Mistral": {"sliding_window": 512},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def lively(kind: str, **changes: Any) -> Any:
    """Of matrices that make the next token depend on all tokens before it, and of norms that are not 1."""
    size = {"hidden_size": 64, "max_position_embeddings": 8192}
    model = causal_lm(kind, **{**size, **FAMILIES.get(kind, {}), **changes}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def learnt(model: Any, ids: Sequence[int], dtype: str, *, fp32_head: bool = False) -> list[float]:
    """Logprobs of all tokens but the first by the learner."""
    mine = policy_of(copy.deepcopy(model), dtype=dtype, fp32_head=fp32_head)
    (scored,) = GrpoLearner(mine, LearningSection()).score([written(ids)])
    return list(scored.old_logprobs)[1:]


@torch.inference_mode()
def decoded(model: Any, ids: Sequence[int]) -> list[float]:
    """The same by the engine's forward, fed in stretches."""
    pages = -(-len(ids) // PAGE)
    cache = PagedCache(model, pages)
    forward, table = forward_of(model, cache, len(ids)), torch.arange(1, pages + 1, dtype=torch.int32)[None]
    everything, found = torch.tensor(ids), []
    for begin in range(0, len(ids) - 1, STRETCH):
        places = torch.arange(begin, min(begin + STRETCH, len(ids) - 1))
        rows = torch.zeros_like(places)
        cache.aim = Aim(rows=rows, positions=places, pages=table[0, places // PAGE].long(), tables=table)
        laws = forward(everything[places], places - begin).float().log_softmax(-1)
        found += laws.gather(1, everything[places + 1, None]).squeeze(1).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_engine_in_bf16_is_as_near_to_the_learner_as_that_to_itself_in_fp32(kind: str) -> None:
    """Angles err more with the position."""
    model, chance = lively(kind), random.Random(1)
    ids = [chance.randrange(104) for _ in range(5000 if kind == FAR else 2500)]
    coarse, exact = (learnt(model, ids, dtype) for dtype in ("bfloat16", "float32"))
    ours = decoded(lowered(copy.deepcopy(model), torch.bfloat16), ids)
    for part in itertools.starmap(slice, itertools.pairwise((0, 500, len(ids) // 2, len(ids)))):
        assert fmean(gaps(ours[part], coarse[part])) <= fmean(gaps(coarse[part], exact[part])), part


EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": FAMILIES["Qwen3Moe"],
    "Mixtral": {"head_dim": 32, "num_local_experts": 4},
    "GptOss": {"head_dim": 32, "num_local_experts": 4},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_in_bf16_a_learner_rounds_experts_like_all_matrices(kind: str) -> None:
    """Rounded before, they give the same bits; and they learn."""
    model, ids = lively(kind, **EXPERTS[kind]), [token * 7 % 104 for token in range(60)]
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if "experts" in name:
            parameter.data = parameter.data.bfloat16().float()
    assert learnt(model, ids, "bfloat16") == learnt(rounded, ids, "bfloat16") != learnt(model, ids, "float32")
    policy = policy_of(model, dtype="bfloat16")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "experts" in name}
    GrpoLearner(policy, LearningSection(learning_rate=1e-2, warmup_steps=0)).update((written(ids),))
    assert all(not torch.equal(dict(model.named_parameters())[name], value) for name, value in before.items())


@pytest.mark.parametrize("tied", [True, False])
async def test_a_head_in_fp32_brings_engine_and_learner_nearer_and_takes_new_weights(tied: bool) -> None:
    """The engine begins with other weights than the learner's, which it is given then."""
    model, other = (lively("Llama", tie_word_embeddings=tied) for _ in range(2))
    gap = {}
    for wide in (False, True):
        policy = policy_of(copy.deepcopy(model), dtype="bfloat16", fp32_head=wide)
        engine = TorchEngine(lowered(copy.deepcopy(other), torch.bfloat16, fp32_head=wide), rows=2, positions=256)
        await engine.load_weights(policy.publish())
        wrote = await engine.generate([1, 2, 3], Sampling(max_new_tokens=120, seed=1), request_id="a", session_id="a")
        await engine.close()
        ids = [1, 2, 3, *wrote.token_ids]
        row = written(ids, begin=3)
        learner = GrpoLearner(policy, LearningSection())
        gap[wide] = fmean(gaps(wrote.logprobs, list(learner.score([row])[0].old_logprobs)[3:]))
        assert learner.update((row,)).metrics["grad_norm"] > 0
    assert gap[True] < gap[False] < 0.1
    coarse, exact = (learnt(model, ids, "bfloat16", fp32_head=wide) for wide in (False, True))
    assert fmean(gaps(exact, learnt(model, ids, "float32"))) < fmean(gaps(coarse, learnt(model, ids, "float32")))


def test_an_engine_that_runs_a_models_own_code_has_no_head_in_fp32() -> None:
    model = lowered(lively("Olmo2"), torch.bfloat16, fp32_head=True)
    with pytest.raises(ConfigError, match=r"cannot run a model of type olmo2 with model\.fp32_head"):
        forward_of(model, PagedCache(model, 4), 64)


@pytest.mark.parametrize("kind", ["Qwen3", "Olmo2"])
def test_matrices_alone_are_lowered(kind: str) -> None:
    model = lowered(lively(kind), torch.bfloat16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.dtype == (torch.bfloat16 if tensor.ndim > 1 else torch.float32), name


# -- canary rows ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def served(model: Any, row: Canary) -> list[float]:
    """By a server that rounds everything but its frequencies to bf16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    ids = torch.tensor([row.token_ids])
    laws = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = laws.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
    return found


def rounded_angles(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()


def other_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.normal_(0, 0.2)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_canary_rows_know_the_noise_of_the_model_at_hand(scale: float) -> None:
    model = lively("Llama", tie_word_embeddings=False)
    model.lm_head.weight.data *= scale
    rows = policy_of(copy.deepcopy(model), dtype="bfloat16").canary()
    assert max(len(row.token_ids) for row in rows) == 1024
    right = [served(copy.deepcopy(model), row) for row in rows]
    assert not any(too_far(row, ours, "bfloat16") for row, ours in zip(rows, right, strict=True))
    assert (
        scale == 1.0
        or max(map(max, map(gaps, [r[-256:] for r in right], [r.logprobs for r in rows]))) > TOLERANCES["bfloat16"]
    )
    for change in (rounded_angles, other_layer):
        wrong = copy.deepcopy(model)
        change(wrong)
        assert any(too_far(row, served(wrong, row), "bfloat16") for row in rows), change.__name__
    assert "in the mean by inf nats" in (too_far(rows[0], [], "bfloat16") or "")
