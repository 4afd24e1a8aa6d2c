"""Every causal language model that the pinned transformers knows, made tiny with random weights: does it learn and run
here as it does there, or is it refused, when and why?

    python benchmarks/every_family.py                  # all: some minutes
    python benchmarks/every_family.py llama gemma3     # some
    python benchmarks/every_family.py --write docs/families.md

`learner` and `engine` are the parts of a run. "runs" means: log-probabilities of rows of 3 to 120 tokens, learnt from
together and in pages, differ from transformers' own by at most 1e-5 nats (fp32), or 1e-4 where it says so. Refused
"by its config" is refused by `--dry-run`; refused "by its weights" when the model is loaded, before the first step.
Anything else is a fault and ends this with 1.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from frame import parser, report
from transformers import AutoConfig, AutoModelForCausalLM, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from rocstar.engines.pages import PAGE
from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.engines.torch_forward import Forward, forward_of
from rocstar.errors import ConfigError
from rocstar.learning.forward import hidden_states, is_packed, prepare
from rocstar.learning.head import Head, score_tokens
from rocstar.learning.models import load_model
from rocstar.learning.pack import pack
from rocstar.parts.modelfolder import model_facts

TOLERANCE = 1e-5  # nats
COARSE = 1e-4  # where transformers' own steps with a cache differ by as much from its passes without (Nemotron-H)
OTHERWISE: tuple[Mapping[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": 4},
    {"head_dim": None, "num_key_value_heads": 4},
    {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4},
)
"""Changes of those, tried in this order; None: the config's own."""
PAGE_HEAD = """\
# Model families

Every causal language model of transformers {version}, made tiny with random weights (`python
benchmarks/every_family.py --write docs/families.md`). *Runs* means that log-probabilities are transformers' own to
1e-5 nats (or 1e-4, where it says so), by rows that exceed sliding windows and the chunks of recurrent layers.
*Refused by its config* is refused by `--dry-run`; *refused by its weights* when the model is loaded, before the first
step. vLLM as the engine takes what vLLM takes; the learner's column holds with it too. *Not made*: transformers
itself makes none here, as it says below: Gemma 3n's vision needs timm, Gemma 4's drafters (`assistant`) run only beside
another model, and MusicGen's classes do not take the config that they are registered for. All of them are refused.
Whether one can talk to a family is decided by its [chat template](dialogue.md#who-can-be-talked-to), not its layers.
By `rocstar train` itself, two steps of SFT and one of RL each with the torch engine in fp32: bamba, ernie4_5,
ernie4_5_moe, exaone4, gemma3_text, granite, granitemoehybrid, hunyuan_v1_dense, hunyuan_v1_moe, lfm2, lfm2_moe, llama,
ministral3, mistral, nemotron_h, olmo2, olmo3, olmo_hybrid, phi3, qwen3_5_text, seed_oss and smollm3; what the engine
wrote differs by at most 3e-6 nats a token from the learner's own (Nemotron-H), 1.5e-6 without that one.

"""
PAIRS: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
OWN: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        **PAIRS, "logit_scale": 0.25,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "max_seq_len": 128, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {  # with few heads of an index many of its scores are 0, and ties fall otherwise by each length
        "layer_types": ["indexed_attention", "sliding_attention"], "num_key_value_heads": 4, "head_dim": 12,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 8,
        "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "index_topk": 8, "index_head_dim": 8,
        "index_n_heads": 16, "shared_experts_intermediate_size": 16,
    },
    "gemma3n_text": {**PAIRS, "num_kv_shared_layers": 2, "laurel_rank": 8},
    "gemma4_text": {**PAIRS, "num_kv_shared_layers": 2, "global_head_dim": 16, "final_logit_softcapping": 30.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "qwen4_exp_text": {
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "hc_lowrank": 8, "ple_layer_ids": [1], "ngram_vocab_size_base": 64, "heads_per_ngram": 2,
        "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 16], "hash_seed": 0,
        "axial_pos_embds_dim": [16, 16], "feed_forward_size": 48, "attention_head_size": 8, "num_buckets": 4,
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""By the type of a config, or of one within it: sizes that few have, and what published models have beside defaults."""
MOST_WEIGHTS = 20_000_000
LENGTHS = (3, 17, 40, 120)
TINY: Mapping[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "n_inner": 48, "d_model": 32, "num_layers": 2, "n_layers": 2, "n_heads": 4, "num_heads": 4,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rotary_dim": 4, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "hidden_size_global": 32,
    "encoder_hash_byte_group_vocab": 64,
}  # fmt: skip
"""Sizes of a tiny model; a config takes those that it has."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("families", nargs="*")
    options.add_argument("--write", type=Path, help="a page with the table")
    given = options.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = given.families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows: dict[str, dict[str, str]] = {}
    for name in names:
        rows[name] = verdict(name)
        print(f"{name:24} {rows[name]['learner']:58.58} {rows[name]['engine']:58.58}", flush=True)
    counts = {
        part: dict(Counter(row[part].partition(":")[0] for row in rows.values())) for part in ("learner", "engine")
    }
    if given.write:
        given.write.write_text(page(rows))
    report(transformers=__version__, counts=counts, families=rows)
    sys.exit(any(value.startswith("FAULT") for row in rows.values() for value in row.values()))


def verdict(name: str) -> dict[str, str]:
    why = ""
    for change in OTHERWISE:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            try:
                expected = write_tiny(name, place, change)
            except Exception as error:
                why = why or line_of(error)
                continue
            return {
                "learner": tried(place, expected, learner_logprobs, torch_engine=False, trained=True),
                "engine": tried(place, expected, engine_logprobs, torch_engine=True, trained=False),
            }
    return dict.fromkeys(("learner", "engine"), f"not made: {why}")


def rows_of(ids: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, ids, (length,), generator=draw).tolist() for length in LENGTHS]


@torch.no_grad()
def write_tiny(name: str, folder: Path, change: Mapping[str, Any]) -> list[list[float]]:
    """A folder as Hugging Face models come; the log-probability of each token but the first by the model's own code."""
    torch.manual_seed(0)
    config = tiny_config(name, change)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    if weights > MOST_WEIGHTS:
        raise ValueError(f"it has {weights / 1e6:.0f}M weights at the smallest sizes known here")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():  # so that attention matters and no expert is a tie
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # whole, where the model took a part of it
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for row in rows_of(config.get_text_config().vocab_size):
        ids = torch.tensor([row])
        logprobs = again(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist())
    return found


def tiny_config(name: str, change: Mapping[str, Any]) -> Any:
    default = AutoConfig.for_model(name)
    has = {**default.to_dict(), **dict.fromkeys(getattr(default, "attribute_map", {}))}
    return AutoConfig.for_model(name, **sizes_of(has, change, OWN.get(name, {})))


def sizes_of(has: Mapping[str, Any], change: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of TINY that a config and those within it have, its own, and layers of each kind that it lists."""
    sizes = {key: value for key, value in {**TINY, **change}.items() if key in has and value is not None}
    for listed in ("layer_types", "mlp_layer_types"):
        if isinstance(has.get(listed), list):
            kinds = list(dict.fromkeys(has[listed]))
            sizes["num_hidden_layers"] = max(2, len(kinds), sizes.get("num_hidden_layers", 0))
            sizes[listed] = (kinds * sizes["num_hidden_layers"])[: sizes["num_hidden_layers"]]
    inner = {
        key: sizes_of(part, change, {**OWN.get(part["model_type"], {}), **own.get(key, {})})
        for key, part in has.items()
        if isinstance(part, dict) and "model_type" in part
    }
    return {**sizes, **own, **inner}


def tried(
    folder: Path, expected: list[list[float]], logprobs: Callable[[Path], list[list[float]]], **asked: bool
) -> str:
    try:
        model_facts(folder, **asked)
    except ConfigError as error:
        return f"refused by its config: {reason(error)}"
    try:
        found = logprobs(folder)
    except ConfigError as error:
        return f"refused by its weights: {reason(error)}"
    except Exception as error:
        return f"FAULT: {line_of(error)}"
    gap = max(
        abs(a - b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    if gap <= TOLERANCE:
        return "runs"
    return "runs to 1e-4" if gap <= COARSE else f"FAULT: differs by {gap:.2g} nats"


@torch.no_grad()
def learner_logprobs(folder: Path) -> list[list[float]]:
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    prepare(model, torch.device("cpu"))
    rows, packed = rows_of(model.config.get_text_config().vocab_size), is_packed(model)
    (micro,) = pack(
        rows,
        [[t > 0 for t in range(len(row))] for row in rows],
        999,
        torch.device("cpu"),
        share=packed,
        side_by_side=not packed,
    )
    embeddings = model.get_output_embeddings()
    head = Head(weight=embeddings.weight, bias=embeddings.bias)
    flat = score_tokens(head, hidden_states(model.eval(), micro)[micro.places_K], micro.targets_K)[0].tolist()
    found: dict[int, list[float]] = {}
    for index in micro.indices:
        found[index], flat = flat[: len(rows[index]) - 1], flat[len(rows[index]) - 1 :]
    return [found[index] for index in range(len(rows))]


@torch.inference_mode()
def engine_logprobs(folder: Path) -> list[list[float]]:
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32).eval()
    rows = rows_of(model.config.get_text_config().vocab_size)
    pages = -(-max(LENGTHS) // PAGE)
    cache = PagedCache(model, pages * len(rows))
    forward = forward_of(model, cache, max(LENGTHS))
    return [in_pages(forward, cache, row, 1 + pages * place, pages) for place, row in enumerate(rows)]


def in_pages(forward: Forward, cache: PagedCache, row: list[int], first: int, pages: int) -> list[float]:
    """Half of a row, then the rest token by token, as an engine decodes."""
    table, found = torch.arange(first, first + pages, dtype=torch.int32)[None], []
    half = max(1, len(row) // 2)
    for begin, end in ((0, half), *((place, place + 1) for place in range(half, len(row) - 1))):
        places = torch.arange(begin, end)
        cache.aim = Aim(
            rows=torch.zeros_like(places), positions=places, pages=table[0, places // PAGE].long(), tables=table
        )
        laws = forward(torch.tensor(row[begin:end]), places - begin).float().log_softmax(-1)
        found += laws.gather(1, torch.tensor(row[begin + 1 : end + 1])[:, None]).squeeze(1).tolist()
    return found


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Families by what becomes of them, then the reasons of those that are refused."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        groups.setdefault((row["learner"].partition(":")[0], row["engine"].partition(":")[0]), []).append(name)
    table = [f"| {mine} | {engine} | {len(names)} | {', '.join(names)} |" for (mine, engine), names in groups.items()]
    reasons = [
        f"| {name} | {row['learner'].partition(': ')[2]} | {row['engine'].partition(': ')[2]} |"
        for name, row in rows.items()
        if any(": " in verdict for verdict in row.values())
    ]
    return "\n".join(
        [
            *PAGE_HEAD.format(version=__version__).splitlines(),
            "| learner | torch engine | | families |",
            "|---|---|---|---|",
            *sorted(table, reverse=True),
            "",
            "## Why",
            "",
            "| family | learner | torch engine |",
            "|---|---|---|",
            *reasons,
            "",
        ]
    )


def reason(error: Exception) -> str:
    """What is told after the family's name."""
    told = " ".join(str(error).split())
    for before in ("which has ", "whose ", "can't be trained here: "):
        _, found, told_after = told.partition(before)
        if found:
            return told_after.partition("; ")[0][:120]
    return (told.partition("cannot run a model of type ")[2].partition(": ")[2] or told)[:120]


def line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


if __name__ == "__main__":
    main()
