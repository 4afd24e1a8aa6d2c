"""How near is `rocstar plan` to step times that others have published?

    python benchmarks/plan_published.py                  # the shipped assumptions beside what was measured
    python benchmarks/plan_published.py --calibrate      # search the assumptions again, on one half of the rows

Rows are entered as their sources give them (`source`); what a source does not say is in docs/plan.md. Half of them were
used to choose the assumptions (`calibrate`), the others only to check. Colocated rows take turns (`cluster.colocate`),
split ones learn beside (`rollout.max_staleness_steps = 1`) or one after the other. Prints a table, last one JSON line.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from frame import Table, parser, report

from rocstar.config.recipe import recipe_of
from rocstar.forecast.plan import Assumptions, Planner, gpu_named
from rocstar.parts import shape
from rocstar.parts.shape import PUBLISHED, Shape

LLAMA8B = Shape(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_width=128, intermediate=14336, vocabulary=128256, tied=False
)
QWEN3_32B = Shape(
    hidden=5120, layers=64, heads=64, kv_heads=8, head_width=128, intermediate=25600, vocabulary=151936, tied=False
)
DISTILL_1B = replace(PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"], tied=False)
QWEN7B = PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]
LLAMA1B = Shape(
    hidden=2048, layers=16, heads=32, kv_heads=8, head_width=64, intermediate=8192, vocabulary=128256, tied=True
)
DEEPSEEK7B = Shape(
    hidden=4096, layers=30, heads=32, kv_heads=32, head_width=128, intermediate=11008, vocabulary=102400, tied=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    source: str
    half: Literal["calibrate", "check"]
    shape: Shape
    gpu: str
    gpus: int
    writing: int
    """GPUs that write; all of them where they take turns."""
    tensor: int = 1
    """GPUs of an engine."""
    beside: bool = False
    """Writing goes on while learning does."""
    problems: int
    attempts: int
    kept: int | None = None
    response: float
    """Mean tokens."""
    cap: int
    prompt: float
    updates: int
    offload: bool = False
    """The optimizer waits in the machine's memory; stands in for a pipeline of several GPUs."""
    reference: bool
    seconds: float


NEMO = "NVIDIA-NeMo/RL docs/about/performance-summary.md, "
RLINF = "RLinf/RLinf docs/source-en/rst_source/resources/blog/compare_with_verl.rst"
VERL = "veRL benchmark report, GRPO on GSM8K"
NEMO_STEP: dict[str, Any] = {"gpu": "h100", "problems": 64, "attempts": 32, "updates": 4, "reference": True}
ROWS = (
    Row(
        name="Llama-3.1-8B, 16, in turns", source=NEMO + "v0.4", half="calibrate", shape=LLAMA8B, gpus=16, writing=16,
        response=1060, cap=3964, prompt=132, seconds=97.7, **NEMO_STEP,
    ),
    Row(
        name="Llama-3.1-8B, 8 + 8, beside", source=NEMO + "v0.4", half="check", shape=LLAMA8B, gpus=16, writing=8,
        beside=True, response=1129, cap=3966, prompt=130, seconds=74.6, **NEMO_STEP,
    ),
    Row(
        name="Llama-3.1-8B, 8 + 8, beside", source=NEMO + "v0.5", half="calibrate", shape=LLAMA8B, gpus=16, writing=8,
        beside=True, response=1123, cap=3965, prompt=131, seconds=64.8, **NEMO_STEP,
    ),
    Row(
        name="Qwen3-32B, 32, in turns", source=NEMO + "v0.4", half="calibrate", shape=QWEN3_32B, gpus=32, writing=32,
        tensor=4, response=3206, cap=3986, prompt=110, offload=True, seconds=393, **NEMO_STEP,
    ),
    Row(
        name="Qwen3-32B, 32 + 32, beside", source=NEMO + "v0.4", half="check", shape=QWEN3_32B, gpus=64, writing=32,
        tensor=4, beside=True, response=3207, cap=3984, prompt=112, offload=True, seconds=215, **NEMO_STEP,
    ),
    Row(
        name="R1-Distill-1.5B, 8, in turns (verl)", source=RLINF, half="calibrate", shape=DISTILL_1B, gpu="h100",
        gpus=8, writing=8, tensor=2, problems=32, attempts=16, response=14255, cap=27648, prompt=150, updates=4,
        reference=False, seconds=363.5,
    ),
    Row(
        name="R1-Distill-7B, 64, in turns", source=RLINF, half="check", shape=QWEN7B, gpu="h100", gpus=64, writing=64,
        tensor=2, problems=128, attempts=16, response=10426, cap=27648, prompt=150, updates=4,
        reference=True, seconds=447.4,
    ),
    Row(
        name="Qwen2.5-7B, 8, in turns (verl)", source=VERL, half="calibrate", shape=QWEN7B, gpu="h100", gpus=8,
        writing=8, tensor=2, problems=1024, attempts=5, response=232, cap=1024, prompt=93, updates=4,
        reference=True, seconds=80.3,
    ),
    Row(
        name="Llama-3.2-1B, 8, in turns (verl)", source=VERL, half="check", shape=LLAMA1B, gpu="h100", gpus=8,
        writing=8, tensor=2, problems=1024, attempts=5, response=183, cap=1024, prompt=107, updates=4,
        reference=True, seconds=71,
    ),
    Row(
        name="deepseek-llm-7b, 8 MI300X, in turns (verl)", source="yushengsu-thu/verl_training_log", half="calibrate",
        shape=DEEPSEEK7B, gpu="mi300x", gpus=8, writing=8, tensor=2, problems=1024, attempts=5, response=143, cap=1024,
        prompt=83, updates=4, reference=True, seconds=82.6,
    ),
    Row(
        name="Qwen2.5-Math-7B, 8, in turns (TTRL)", source="TTRL, a log of 10 steps after tuning", half="check",
        shape=QWEN7B, gpu="h100", gpus=8, writing=8, tensor=1, problems=32, attempts=64, kept=32, response=951,
        cap=3072, prompt=95, updates=32, reference=True, seconds=118.5,
    ),
)  # fmt: skip
WRITING: dict[str, tuple[float, ...]] = {"bandwidth_share": (0.6,), "sequence_seconds": (1e-5, 2e-5, 3e-5)}
REST = {"learning_share": (0.3, 0.35, 0.4, 0.45, 0.5), "step_overhead_seconds": (5.0, 10.0, 15.0, 20.0, 25.0)}
"""What is searched: rollouts are simulated for each of the first, the rest follows from them."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--calibrate", action="store_true")
    given = options.parse_args()
    assumed = calibrated() if given.calibrate else Assumptions()
    table = Table("published step", "half", "published s", "planned s", "ratio", "writing s", "learning s")
    found = []
    for row in ROWS:
        stage = planned(row, assumed)
        ratio = stage.step_seconds / row.seconds
        found.append({"name": row.name, "half": row.half, "published": row.seconds, "ratio": ratio})
        table.row(
            row.name, row.half, row.seconds, stage.step_seconds, ratio, stage.rollout_seconds, stage.learning_seconds
        )
    report(assumed={name: getattr(assumed, name) for name in (*WRITING, *REST)}, rows=found)


def planned(row: Row, assumed: Assumptions) -> Any:
    """The plan of a step as its source lays it out. Raises RuntimeError where rocstar would refuse it."""
    shape.PUBLISHED = {**PUBLISHED, row.name: row.shape}  # type: ignore[misc]
    turns = row.writing == row.gpus
    recipe = recipe_of(
        {
            "model": {"path": row.name, "gradient_checkpointing": True},
            "data": {"train_files": ["none.jsonl"], "source": "files"},
            "rollout": {
                "problems_per_step": row.problems,
                "attempts_per_problem": row.attempts,
                "max_response_tokens": row.cap,
                "max_turns": 1,
                "engine_rows": 1024,
                "max_staleness_steps": int(row.beside),
            },
            "resample": {"keep": row.kept} if row.kept else {"method": "all"},
            "learning": {
                "updates_per_step": row.updates,
                "kl_coefficient": 0.01 if row.reference else 0.0,
                "tokens_per_microbatch": 16384,
            },
            "cluster": {
                "learners": row.gpus if turns else row.gpus - row.writing,
                "colocate": turns,
                "offload_optimizer": row.offload,
            },
            "engine": [
                {"name": "v", "kind": "vllm", "count": row.writing // row.tensor, "tensor_parallel": row.tensor}
            ],
        },
        [{"name": "rl", "kind": "rl", "steps": 1}],
    )
    mine = replace(assumed, length_share=row.response / row.cap, prompt_tokens=row.prompt)
    made = Planner(recipe=recipe, gpu=gpu_named(row.gpu), gpus=row.gpus).plan(mine)
    if made.refusals:
        raise RuntimeError(f"{row.name}: {made.refusals[0]}")
    return made.stages[0]


def calibrated() -> Assumptions:
    """The searched values whose mean error among the rows to calibrate on is least."""
    mine = [row for row in ROWS if row.half == "calibrate"]
    found: list[tuple[float, Assumptions]] = []
    for writing in itertools.product(*WRITING.values()):
        first = replace(Assumptions(), **dict(zip(WRITING, writing, strict=True)))
        pairs = [(row, planned(row, first)) for row in mine]
        for rest in itertools.product(*REST.values()):
            assumed = replace(first, **dict(zip(REST, rest, strict=True)))
            errors = [abs(math.log(seconds(row, stage, first, assumed) / row.seconds)) for row, stage in pairs]
            found.append((sum(errors), assumed))
    return min(found, key=lambda each: each[0])[1]


def seconds(row: Row, stage: Any, first: Assumptions, assumed: Assumptions) -> float:
    """Of the step under other assumptions about all but its rollouts."""
    learning = stage.learning_seconds * first.learning_share / assumed.learning_share
    both = max(stage.rollout_seconds, learning) if row.beside else stage.rollout_seconds + learning
    return float(both + stage.exchange_seconds + assumed.step_overhead_seconds)


if __name__ == "__main__":
    main()
