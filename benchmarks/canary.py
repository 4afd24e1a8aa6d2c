"""Which wrong weights the canary rows find, and how often they refuse right ones: false alarms and misses.

    python benchmarks/canary.py            # two minutes on one core

Learners in bf16 over random Qwen3 shapes of 2, 8 and 24 layers, logits of three sizes; a server is transformers' own
forward with weights and everything between layers in bf16, frequencies in fp32, which is how vLLM computes. *ratio* is
its mean gap to the learner over the learner's own to fp32 (`Canary.noise`), of the row where it is largest; *now* the
share of models refused by `rocstar.engines.vllm.too_far`, *fixed* by the rule that it replaced: any token further than
0.15 nats. Prints a table and last one JSON line; exits 1 where right weights are refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import product
from statistics import fmean
from typing import Any

import torch
from frame import ROOT, parser, print_rows, report, spread
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(ROOT))

from rocstar.config.sections import ModelSection
from rocstar.dialogue.templates import template_named
from rocstar.engines.vllm import too_far
from rocstar.learning.policy import Policy
from rocstar.types import Canary, gaps
from tests.learning.examples import codec

LAYERS, SCALES = (2, 8, 24), (1.0, 2.0, 4.0)
FIXED = 0.15  # nats


def made(layers: int, scale: float, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=104, head_dim=16, num_hidden_layers=layers, tie_word_embeddings=False, **shape)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, (scale if "lm_head" in name else 1.0) * parameter.shape[1] ** -0.5)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(2.0)  # attention that is about few tokens, as in trained models
    return model


def stirred(model: Any, share: float, part: str = "") -> Any:
    """Every matrix of `part` by so much of its own size."""
    torch.manual_seed(9)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and part in name:
            parameter.data += share * parameter.std() * torch.randn_like(parameter)
    return model


def turned(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model.model.rotary_emb.inv_freq = change(model.model.rotary_emb.inv_freq)
    return model


def permuted(model: Any) -> Any:
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.data = weight.data.flip(0)
    return model


WRONG: dict[str, Callable[[Any], Any]] = {
    "right weights": lambda model: model,
    "the head of before, 10% off": lambda model: stirred(model, 0.1, "lm_head"),
    "the head of other weights": lambda model: stirred(model, 1.0, "lm_head"),
    "one layer of before, 10% off": lambda model: stirred(model, 0.1, "layers.1."),
    "one layer of other weights": lambda model: stirred(model, 1.0, "layers.1."),
    "one tensor's rows permuted": permuted,
    "rotary base 100 times as large": lambda model: turned(model, lambda it: it ** (1 + 2 / 4)),
    "rotary frequencies rounded": lambda model: turned(model, lambda it: it.bfloat16().float()),
    "all of before, 0.1% off": lambda model: stirred(model, 0.001),
    "all of before, 1% off": lambda model: stirred(model, 0.01),
    "all of before, 10% off": lambda model: stirred(model, 0.1),
}


@torch.no_grad()
def served(model: Any, row: Canary) -> list[float]:
    ids = torch.tensor([row.token_ids])
    laws = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = laws.gather(1, ids[0, 1:, None]).squeeze(1)[-len(row.logprobs) :].tolist()
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=2, help="models of each shape")
    seeds = range(options.parse_args().seeds)
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, bool, bool]]] = {name: [] for name in WRONG}
    for shape in product(LAYERS, SCALES, seeds):
        model = made(*shape)
        policy = Policy(copy.deepcopy(model), codec(), template_named("compact"), ModelSection(dtype="bfloat16"))
        rows = policy.canary()
        for name, change in WRONG.items():
            server = change(copy.deepcopy(model))
            for parameter in server.parameters():
                parameter.data = parameter.data.bfloat16()
            scored = [served(server, row) for row in rows]
            ratio = max(fmean(gaps(a, r.logprobs)) / (r.noise or 1) for a, r in zip(scored, rows, strict=True))
            now = any(too_far(r, a, "bfloat16") for a, r in zip(scored, rows, strict=True))
            fixed = max(max(gaps(a, r.logprobs)) for a, r in zip(scored, rows, strict=True)) > FIXED
            found[name].append((ratio, now, fixed))
    table = []
    for name, some in found.items():
        ratios, now, fixed = zip(*some, strict=True)
        middle, least, most = spread(ratios, 2)
        table.append(
            {"weights": name, "ratio": middle, "least": least, "most": most, "now": fmean(now), "fixed": fmean(fixed)}
        )
    print_rows(table, first=32)
    report(rows=table)
    return int(table[0]["now"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
