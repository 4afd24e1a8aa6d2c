"""Does rocstar compute right on this GPU, does it take the memory that its placement table says, and how fast is it?
Each check with its expectation; prints a table, writes --out, and ends with 1 where one fails. Needs no network.

    scripts/gpu_check                 on a GPU, at most ten minutes
    scripts/gpu_check --only attention
    scripts/gpu_check --rehearse      the same checks on a CPU, small: are they in order themselves? (in .ci/run)

What a machine cannot do (two ranks on one GPU, vLLM where ROCSTAR_VLLM_PYTHON names no environment) is said, and is no
failure. Speeds that are expected are floors: below them something is broken (figures of an H100: docs/results.md).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frame import ROOT, parser, read_rows, report, rocstar
from weights import measured

from rocstar.config.recipe import recipe_of
from rocstar.config.sections import LearningSection, ModelSection
from rocstar.engines.torch_cache import Aim, PagedAttention, PagedCache, _gathered
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.torch_forward import lowered
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import random_model
from rocstar.learning.policy import Policy
from rocstar.parts.placement import place
from rocstar.parts.shape import known_shape
from rocstar.types import BatchRow, Sampling

TINY = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
TINY |= {"intermediate_size": 128, "max_positions": 8192}
SMALL = {"vocab_size": 49152, "hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3}
SMALL |= {"intermediate_size": 1536, "max_positions": 2048}
"""The shape of SmolLM2-135M."""
HALF = {"vocab_size": 151936, "hidden_size": 896, "num_layers": 24, "num_heads": 14, "num_kv_heads": 2}
HALF |= {"intermediate_size": 4864, "max_positions": 4096}
"""The shape of Qwen2.5-0.5B."""
SEVEN = {"vocab_size": 152064, "hidden_size": 3584, "num_layers": 4, "num_heads": 28, "num_kv_heads": 4}
SEVEN |= {"intermediate_size": 18944, "max_positions": 4096}
"""The widths of Qwen2.5-7B, and four of its 28 layers: bytes are linear in layers."""
SETTINGS = "run.name=gpu stage.sft.steps=24 sft.batch_rows=16 stage.stage1.steps=3 stage.stage2.steps=0"
SETTINGS += " stage.stage3.steps=0 stage.stage3.data.drop_solved_attempts=2 data.pool=40 evaluate.problems=4"
REHEARSED = "stage.sft.steps=4 rollout.problems_per_step=4 rollout.attempts_per_problem=8 resample.keep=4"
WIDE = "model.hidden_size=1024 model.num_layers=24 model.num_heads=16 model.num_kv_heads=4 model.intermediate_size=2816"
LENGTHS = "def odd(completions, **_):\n    return [float(len(str(each)) % 2) for each in completions]\n"


@dataclass(frozen=True, slots=True)
class Found:
    check: str
    value: str
    expected: str
    passed: bool | None
    """None: this machine cannot do it."""
    seconds: float = 0.0


def model_of(shape: dict[str, int], device: str, dtype: str, **more: bool) -> tuple[ModelSection, Any]:
    section = ModelSection(**shape, device=device, dtype=dtype, **more)  # type: ignore[arg-type]
    if shape["hidden_size"] > 512:
        with torch.device(device):  # a CPU draws billions of numbers slowly
            return section, random_model(section, 0)
    model = random_model(section, 0)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():  # else layers begin as nothing, and no error in them would be seen
        for name, matrix in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                matrix.normal_(0, matrix.shape[1] ** -0.5, generator=chance)
    return section, model.to(device)


def rows_of(vocabulary: int, count: int, prompt: int, length: int) -> tuple[BatchRow, ...]:
    rng = random.Random(0)
    draw = [[rng.randrange(vocabulary) for _ in range(prompt + length)] for _ in range(count)]
    mask = [t >= prompt for t in range(prompt + length)]
    zeros = [0.0] * (prompt + length)
    return tuple(
        BatchRow(token_ids=ids, loss_mask=mask, sampled_logprobs=zeros, advantage=rng.choice((-1.0, 1.0)))
        for ids in draw
    )


def learner_of(shape: dict[str, int], device: str, dtype: str, **more: bool) -> tuple[GrpoLearner, Any]:
    section, model = model_of(shape, device, dtype, **more)
    return GrpoLearner(Policy(model, None, "", section), LearningSection()), model  # type: ignore[arg-type]


def worst(left: Any, right: Any) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- checks ----------------------------------------------------------------------------------------------------------


def learner_is_exact(device: str, dtype: str, most: float, of_gradient: float) -> tuple[str, str, bool]:
    """An update here and on the CPU: the logprobs of the pass, and the gradient of all weights."""
    rows, scored, gradients = tuple(row for n in (60, 90, 200) for row in rows_of(TINY["vocab_size"], 3, 16, n)), [], []
    for where, kind in (("cpu", "float32"), (device, dtype)):
        learner, model = learner_of(TINY, where, kind)
        scored.append([row.old_logprobs for row in learner.score(rows)])
        learner.update(rows)
        gradients.append(torch.cat([weights.grad.flatten().double().cpu() for weights in model.parameters()]))
    gap, apart = worst(*scored), float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    value = f"{gap:.1e} nats, gradient {apart:.1e} apart"
    return value, f"at most {most:g} and {of_gradient:g}", gap <= most and apart <= of_gradient


def engine_is_exact(device: str, dtype: str, most: float, *, fp32_head: bool = False) -> tuple[str, str, bool]:
    """The engine's logprobs of what it samples against the learner's."""
    learner, model = learner_of(TINY, device, dtype, fp32_head=fp32_head)
    copied = lowered(copy.deepcopy(model), getattr(torch, dtype), fp32_head=fp32_head)
    engine = TorchEngine(copied, rows=8, positions=1024)
    prompts = [list(row.token_ids[:16]) for row in rows_of(TINY["vocab_size"], 8, 16, 1)]

    async def sample() -> list[Any]:
        asked = (
            engine.generate(ids, Sampling(max_new_tokens=300, seed=n), request_id=f"{n}", session_id=f"{n}")
            for n, ids in enumerate(prompts)
        )
        done = await asyncio.gather(*asked)
        await engine.close()
        return list(done)

    gap = gap_of(learner, prompts, asyncio.run(sample()))
    return f"{gap:.1e} nats", f"at most {most:g}", gap <= most


def attention_is_exact(device: str, dtype: str, most: float) -> tuple[str, str, bool | None]:
    """The kernel for GPUs against the form in torch: the same pages, tokens at all places, heads of several shapes."""
    if device != "cuda":
        return "no GPU", f"at most {most:g}", None
    tables = torch.randperm(600, device=device).view(6, 100).int() + 1
    places = torch.tensor([0, 15, 16, 700, 1599, *range(100, 164)], device=device)
    rows, gaps = torch.tensor([0, 1, 2, 3, 4, *[5] * 64], device=device), []
    for heads, kv_heads, width in ((4, 2, 16), (7, 1, 64), (5, 5, 80), (20, 1, 24), (4, 2, 128)):
        shape = {**TINY, "hidden_size": heads * width, "num_heads": heads, "num_kv_heads": kv_heads}
        cache = PagedCache(model_of(shape, device, dtype)[1].to(getattr(torch, dtype)), 600)
        cache.keys.normal_()
        cache.values.normal_()
        cache.aim = Aim(rows, places, torch.zeros_like(rows), tables)
        query = torch.randn(len(rows), heads, width, device=device).to(cache.keys.dtype)
        attention = PagedAttention(cache)
        if not attention.can_be_captured:
            return "Triton does not run here", f"at most {most:g}", False
        for window in (0, 37):
            plain = _gathered(query.float(), cache.keys[0].float(), cache.values[0].float(), cache.aim, 0.3, window)
            gaps.append(float((attention(0, query, 0.3, window).float() - plain).abs().max()))
    return f"{max(gaps):.1e}", f"at most {most:g}", max(gaps) <= most


def gap_of(learner: GrpoLearner, prompts: list[list[int]], done: list[Any]) -> float:
    """The largest difference of an engine's log-probabilities from the learner's."""
    rows = tuple(
        BatchRow(
            token_ids=[*ids, *each.token_ids],
            loss_mask=[False] * len(ids) + [True] * len(each.token_ids),
            sampled_logprobs=[0.0] * len(ids) + list(each.logprobs),
            advantage=1.0,
        )
        for ids, each in zip(prompts, done, strict=True)
    )
    return worst([row.old_logprobs for row in learner.score(rows)], [row.sampled_logprobs for row in rows])


def turns_are_taken(device: str, dtype: str) -> tuple[str, str, bool]:
    """An engine writes, sleeps while the learner updates, and wakes with the new weights: what it gave back of weights
    and cache, and the gap of what it then writes."""
    learner, model = learner_of(TINY, device, dtype)
    copied = lowered(copy.deepcopy(model), getattr(torch, dtype))
    size = sum(each.numel() * each.element_size() for each in copied.parameters())
    engine = TorchEngine(copied, rows=64, positions=4096)
    pages, prompts = engine._decoder._cache, rows_of(TINY["vocab_size"], 8, 1000, 1)
    size += 2 * pages.keys.numel() * pages.keys.element_size()

    async def take_turns() -> tuple[list[Any], int]:
        await asyncio.gather(*(write(row, n) for n, row in enumerate(prompts)))
        before = held(device)
        await engine.sleep()
        given_back = before - held(device)
        waiting = [asyncio.create_task(write(row, 100 + n)) for n, row in enumerate(prompts)]
        learner.update(rows_of(TINY["vocab_size"], 8, 16, 200))
        await engine.load_weights(learner._policy.publish())
        done = list(await asyncio.gather(*waiting))
        await engine.close()
        return done, given_back

    async def write(row: BatchRow, number: int) -> Any:
        sampling = Sampling(max_new_tokens=100, seed=number)
        return await engine.generate(row.token_ids[:1000], sampling, request_id=f"{number}", session_id=f"{number}")

    done, given_back = asyncio.run(take_turns())
    gap = gap_of(learner, [list(row.token_ids[:1000]) for row in prompts], done)
    newest = all([span.version for span in each.version_spans] == [learner._policy.version] for each in done)
    enough = given_back >= (0.9 * size if device == "cuda" else 1e6)
    value = f"{given_back / 1e6:.1f} MB of {size / 1e6:.0f} given back, gap {gap:.1e}, newest weights {newest}"
    return value, "on a GPU 90%, on a CPU 1 MB; gap at most 0.15", enough and newest and gap <= 0.15


def memory_is_foretold(device: str, shape: dict[str, int]) -> tuple[str, str, bool | None]:
    """A whole update against the learner of the placement table."""
    if device != "cuda":
        return "no GPU", "within 10% of the table", None
    section = ModelSection(**shape, device=device, dtype="bfloat16")  # type: ignore[arg-type]
    tables = {"model": {**shape, "device": device, "dtype": "bfloat16"}}
    recipe = recipe_of(tables, [{"name": "rl", "kind": "rl", "steps": 1}])
    here = torch.cuda.get_device_properties(0).total_memory
    table = place(recipe, known_shape(section, None), {"here": ("0",)}, float(here))
    told = table["learner-0"].total - table["learner-0"].bytes["CUDA context"]
    before = torch.cuda.memory_allocated()
    learner, _ = learner_of(shape, device, "bfloat16")
    batch = rows_of(shape["vocab_size"], 8, 64, recipe.stage[0].learner.tokens_per_microbatch // 4 - 64)
    learner.update(batch)  # the moments are made by it
    torch.cuda.reset_peak_memory_stats()
    learner.update(batch)
    peak = torch.cuda.max_memory_allocated() - before
    return f"{peak / 1e9:.2f} GB", f"{told / 1e9:.2f} GB, within 10%", abs(peak / told - 1) <= 0.1


def learner_is_fast(device: str, dtype: str, large: dict[str, int], least: float) -> tuple[str, str, bool]:
    """FLOP of an update (6 for each weight and token, without attention) over the best matrix product."""
    shape = large if device == "cuda" else TINY
    count, length = (16, 1024) if device == "cuda" else (2, 64)
    learner, model = learner_of(shape, device, dtype)
    rows = rows_of(shape["vocab_size"], count, 64, length)
    learner.update(rows)
    taken = timed(device, lambda: learner.update(rows))
    weights = sum(p.numel() for p in model.parameters())
    rate, peak = 6 * weights * count * (64 + length) / taken, peak_rate(device, dtype)
    least = least if device == "cuda" else 0.0
    return f"{rate / peak:.0%} of {peak / 1e12:.3g} TFLOP/s", f"at least {least:.0%}", rate >= least * peak


def new_lengths_cost_nothing(device: str) -> tuple[str, str, bool]:
    """Updates of rows whose lengths were never there, over updates of the same rows again: kernels that are planned
    for each shape show here, and in every step of a run (cuDNN's attention: three times as long)."""
    shape, rows, times = (SMALL, 32, 6) if device == "cuda" else (TINY, 1, 2)
    learner, _ = learner_of(shape, device, "bfloat16")
    draw = random.Random(0)
    drawn = [[draw.randrange(110, 420) for _ in range(rows)] for _ in range(times)]
    updates = [tuple(row for n in lengths for row in rows_of(500, 1, 90, n - 90)) for lengths in drawn]
    learner.update(updates[0])
    new, again = ([timed(device, partial(learner.update, update), 1) for update in updates[1:]] for _ in range(2))
    ratio = sum(new) / sum(again)
    most = 1.5 if device == "cuda" else math.inf
    return f"{ratio:.2f} ({sum(new) / len(new):.2f} s an update)", f"at most {most:g}", ratio <= most


def decode_is_fast(device: str, dtype: str) -> tuple[str, str, bool]:
    """Tokens a second of 64 rows over what reading all weights once a token allows."""
    shape, length = (HALF, 256) if device == "cuda" else (TINY, 32)
    rate, weights = tokens_a_second(device, dtype, shape, length)
    bound, least = 64 * read_rate(device) / weights, 0.1 if device == "cuda" else 0.0
    return f"{rate:,.0f} tokens/s, {rate / bound:.0%} of the bound", f"at least {least:.0%}", rate >= least * bound


def tokens_a_second(device: str, dtype: str, shape: dict[str, int], length: int) -> tuple[float, int]:
    """What 64 rows write, in the second of two rounds; and the bytes of the weights."""
    _, model = model_of(shape, device, dtype)
    model = lowered(model, getattr(torch, dtype))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    engine, rows, seconds = TorchEngine(model, rows=64, positions=1024), 64, []

    async def write(number: int) -> int:
        sampling = Sampling(max_new_tokens=length, seed=number)
        done = await engine.generate([number % 500 + 1] * 16, sampling, request_id=f"{number}", session_id=f"{number}")
        await engine.close_session(f"{number}")
        return len(done.token_ids)

    async def rounds() -> int:
        for turn in range(2):
            started = time.perf_counter()
            made = sum(await asyncio.gather(*(write(turn * rows + n) for n in range(rows))))
            seconds.append(time.perf_counter() - started)
        await engine.close()
        return made

    return asyncio.run(rounds()) / seconds[-1], weights


def faster_than_transformers(device: str) -> tuple[str, str, bool | None]:
    """Tokens a second beside transformers' own continuous batching, of the same weights and prompts."""
    if device != "cuda":
        return "no GPU", "at least as fast", None
    from transformers import GenerationConfig

    _, model = model_of(HALF, device, "bfloat16")
    model = model.to(torch.bfloat16).eval()
    options = {"max_new_tokens": 256, "do_sample": True, "top_k": 0, "eos_token_id": -1, "pad_token_id": 0}
    prompts = [[n + 1] * 16 for n in range(64)]
    counts: list[int] = []

    def generate() -> None:
        settings = {"generation_config": GenerationConfig(**options), "persistent_manager": True}
        done = model.generate_batch(prompts, progress_bar=False, **settings)
        counts.append(sum(len(each.generated_tokens) for each in done.values()))

    taken = timed(device, generate, rounds=2)
    theirs = counts[-1] / taken
    if counts[-1] != 64 * 256:
        return f"theirs wrote {counts[-1]:,} of {64 * 256:,} tokens", "at least as fast", None
    ours = tokens_a_second(device, "bfloat16", HALF, 256)[0]
    return f"{ours:,.0f} tokens/s, theirs {theirs:,.0f}", "at least as fast", ours >= theirs


def five_steps_learn(device: str, *settings: str) -> tuple[str, str, bool]:
    """The quickstart, shortened, as a user starts it, and goes on with it after its first RL stage. Who has not learnt
    yet is rewarded for every other length, so that there is something to learn from."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lengths.py").write_text(LENGTHS)
        words = ["train", "recipes/quickstart.toml", f"run.folder={folder}", f"model.device={device}"]
        words += [f'run.modules=["{folder}"]', "evaluate.verifier=lengths:odd", *SETTINGS.split(), *settings]
        further = ("train", "--resume", f"{folder}/gpu", "stage.stage2.steps=1", "stage.stage3.steps=1")
        for command in (rocstar(*words), rocstar(*further)):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
            if done.returncode:
                return f"exit {done.returncode}: {done.stderr.strip()[-200:]}", "exit 0", False
        steps = [row for row in read_rows(Path(folder, "gpu", "metrics.jsonl")) if "reward/mean" in row]
    gap = max((row["policy/logprob_gap"] for row in steps if "policy/logprob_gap" in row), default=math.inf)
    learnt = [sum(row["learn/updates"] for row in part) for part in (steps[:3], steps[3:])]
    value = f"{len(steps)} RL steps, {learnt[0]:.0f} + {learnt[1]:.0f} updates, gap {gap:.1e}"
    passed = [r["stage"] for r in steps] == [*["stage1"] * 3, "stage2", "stage3"] and min(learnt) > 0 and gap <= 0.05
    return value, "3, 1 and 1 RL steps of its stages, updates before and after going on, gap at most 0.05 nats", passed


def five_on_a_gpu(device: str, settings: str) -> tuple[str, str, bool | None]:
    absent = "no GPU", "five RL steps", None
    return five_steps_learn(device, *settings.split()) if device == "cuda" else absent


def two_ranks_learn(device: str) -> tuple[str, str, bool | None]:
    if torch.cuda.device_count() < 2:
        return f"{torch.cuda.device_count()} GPUs", "two ranks over NCCL", None
    return five_steps_learn(device, "cluster.learners=2")


def weights_are_sent(device: str) -> tuple[str, str, bool | None]:
    """By CUDA IPC on this GPU, by NCCL to a second one where there is one."""
    seconds, whole = measured(1e9 if device == "cuda" else 1e8, 3 if device == "cuda" else 1, device)
    told = ", ".join(f"{way} {took:.2f} s" for way, took in seconds.items())
    fast = device == "cpu" or seconds["folder"] > max(took for way, took in seconds.items() if way != "folder")
    return told, "every byte, sent faster than through a folder", whole and fast


def vllm_serves(device: str) -> tuple[str, str, bool | None]:
    """The contract suite of engines over a real server on this GPU."""
    if not os.environ.get("ROCSTAR_VLLM_PYTHON"):
        return "no vLLM (ROCSTAR_VLLM_PYTHON)", "the engine contract suite", None
    command = [sys.executable, "-m", "pytest", "-q", "tests/contracts/test_engine.py", "-k", "vllm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    return done.stdout.strip().splitlines()[-1], "the engine contract suite", done.returncode == 0


# -- measures --------------------------------------------------------------------------------------------------------


def timed(device: str, work: Callable[[], object], rounds: int = 3) -> float:
    """Seconds of the fastest round; a rehearsal makes one."""
    best = math.inf
    for _ in range(rounds if device == "cuda" else 1):
        synchronise(device)
        started = time.perf_counter()
        work()
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return best


def held(device: str) -> int:
    """Bytes that this process holds of the GPU, or of main memory."""
    if device == "cuda":
        return int(torch.cuda.memory_reserved())
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_rate(device: str, dtype: str) -> float:
    """FLOP/s of the best product of square matrices."""
    size = 8192 if device == "cuda" else 512
    matrix = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    return 2 * size**3 / timed(device, lambda: matrix @ matrix, 10)


def read_rate(device: str) -> float:
    """Bytes a second that a sum reads."""
    numbers = torch.ones(2**28 if device == "cuda" else 2**22, device=device)
    return 4 * numbers.numel() / timed(device, numbers.sum, 10)


@contextmanager
def noted(found: list[Found], name: str) -> Iterator[Callable[[tuple[str, str, bool | None]], None]]:
    """A check that raises has failed, and the others go on."""
    started = time.perf_counter()

    def note(result: tuple[str, str, bool | None]) -> None:
        found.append(Found(name, *result, time.perf_counter() - started))
        print(f"{name}: {result[0]}", file=sys.stderr, flush=True)

    try:
        yield note
    except Exception as error:
        traceback.print_exc()
        note((f"{type(error).__name__}: {str(error)[:150]}", "to run", False))
    gc.collect()
    torch.cuda.empty_cache()  # for the processes of the next check


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rehearse", action="store_true", help="on a CPU, small")
    arguments.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    arguments.add_argument("--only", default="", metavar="WORD,WORD", help="checks whose name contains one of them")
    asked = arguments.parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        print("torch finds no GPU here; --rehearse runs what can run on a CPU", file=sys.stderr)
        return 3
    device = "cpu" if asked.rehearse else "cuda"
    if asked.rehearse:
        torch.set_num_threads(1)  # more would wait for one another beside what else computes here
    checks: dict[str, Callable[[], tuple[str, str, bool | None]]] = {
        "learner, fp32, against a CPU": lambda: learner_is_exact(device, "float32", 2e-4, 1e-4),
        "learner, bf16, against a CPU in fp32": lambda: learner_is_exact(device, "bfloat16", 0.15, 0.05),
        "engine to learner, fp32": lambda: engine_is_exact(device, "float32", 2e-4),
        "engine to learner, bf16": lambda: engine_is_exact(device, "bfloat16", 0.15),
        "engine to learner, bf16, fp32 head": lambda: engine_is_exact(device, "bfloat16", 0.15, fp32_head=True),
        "attention over pages, fp32": lambda: attention_is_exact(device, "float32", 2e-5),
        "attention over pages, bf16": lambda: attention_is_exact(device, "bfloat16", 2e-2),
        "colocated sleep and wake": lambda: turns_are_taken(device, "bfloat16"),
        "memory of an update, 0.5B": lambda: memory_is_foretold(device, HALF),
        "memory of an update, 7B, 4 layers": lambda: memory_is_foretold(device, SEVEN),
        "learner's speed, 0.5B": lambda: learner_is_fast(device, "bfloat16", HALF, 0.1),
        "learner's speed, 7B, 4 layers": lambda: learner_is_fast(device, "bfloat16", SEVEN, 0.3),
        "learner's speed, new lengths": lambda: new_lengths_cost_nothing(device),
        "engine's speed, bf16, 64 rows": lambda: decode_is_fast(device, "bfloat16"),
        "beside continuous batching": lambda: faster_than_transformers(device),
        "five RL steps": lambda: five_steps_learn(device, *(REHEARSED.split() if asked.rehearse else ())),
        "five RL steps, fp32 head": lambda: five_on_a_gpu(device, "model.dtype=bfloat16 model.fp32_head=true"),
        "five RL steps, 0.3B": lambda: five_on_a_gpu(device, WIDE),
        "two ranks": lambda: two_ranks_learn(device),
        "weights to another process": lambda: weights_are_sent(device),
        "vLLM": lambda: vllm_serves(device),
    }
    found: list[Found] = []
    for name, check in ((name, checks[name]) for name in checks if any(word in name for word in asked.only.split(","))):
        with noted(found, name) as note:
            note(check())
    words = {True: "yes", False: "NO", None: "cannot here"}
    rows = [{"check": f.check, "passed": words[f.passed], "value": f.value, "expected": f.expected} for f in found]
    for row in rows:
        print(f"{row['check']:38}{row['passed']:12}{row['value']} (expected: {row['expected']})")
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU, rehearsed"
    told = {"device": name, "torch": torch.__version__, "checks": [asdict(each) for each in found]}
    asked.out.write_text(json.dumps(told, indent=1) + "\n")
    report(**told)
    return 1 if any(each.passed is False for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
