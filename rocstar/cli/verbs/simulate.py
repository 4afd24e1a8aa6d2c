"""`rocstar simulate`: what a step's rollouts would take under each scheduling policy. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import AsJson, options_of, print_json

if TYPE_CHECKING:
    from rocstar.forecast.engine_model import EngineModel
    from rocstar.forecast.simulate import StepReport
    from rocstar.forecast.workload import PlannedAttempt

# Qwen3-14B in bf16 on two MI300X at 60% of their bandwidth: 28 GB of weights, 160 KiB of KV a token.
BYTES_PER_SECOND = 6.4e12
UNBOUNDED = 1 << 30

Steps = list[list["PlannedAttempt"]]


@dataclass(frozen=True, kw_only=True)
class SimulateSpec:
    """The fields are the options of the command."""

    lengths: Annotated[str, typer.Option(help="even, spread, easy-or-hard, alike, pareto or run-on.")] = "even"
    problems: Annotated[int, typer.Option(min=1)] = 128
    attempts: Annotated[int, typer.Option(min=1, help="Per problem.")] = 32
    cap: Annotated[int, typer.Option(min=1, help="Most response tokens.")] = 8192
    steps: Annotated[int, typer.Option(min=1, help="One after another; the last is shown.")] = 1
    seed: Annotated[int, typer.Option(help="Of the first step.")] = 0
    engines: Annotated[int, typer.Option(min=1)] = 4
    capacity_tokens: Annotated[
        int, typer.Option("--capacity", min=2, help="Tokens of KV cache of one engine, by default of two 80 GB GPUs.")
    ] = 610_000
    most_running: Annotated[
        int, typer.Option(min=1, show_default=False, help="Requests that run at once on an engine; default: all.")
    ] = UNBOUNDED
    slow: Annotated[float, typer.Option(min=0.01, help="The first engine's steps take so many times as long.")] = 1.0
    dies: Annotated[float | None, typer.Option(min=0, help="Seconds after which the last engine dies.")] = None
    step_seconds: Annotated[float, typer.Option(min=0, help="Of a decode step, whatever is in it.")] = (
        28e9 / BYTES_PER_SECOND
    )
    seconds_per_cached_token: Annotated[
        float, typer.Option("--cached-token-seconds", min=0, help="Added to a step by each cached token that is read.")
    ] = 160 * 1024 / BYTES_PER_SECOND
    seconds_per_sequence: Annotated[
        float, typer.Option("--sequence-seconds", min=0, help="Added to a step by each running request.")
    ] = 8e-6
    seconds_per_prefill_token: Annotated[
        float, typer.Option("--prefill-token-seconds", min=0, help="Added to a step by each token that is fed.")
    ] = 28e-6
    seconds_per_request: Annotated[
        float, typer.Option("--request-seconds", min=0, help="Added by each request that begins.")
    ] = 0.0
    evicted_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the running requests when the cache is full; 0: one at a time.")
    ] = 0.0
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Comma list; default: all.")] = ""


@options_of(SimulateSpec)
def simulate(spec: SimulateSpec, as_json: AsJson = False) -> None:
    """Simulate a step's rollouts on several engines under each scheduling policy. Costs are those of Qwen3-14B on two
    MI300X unless given.

    Example, the paper's step on 64 GPUs as 32 engines: rocstar simulate --problems 512 --engines 32 --capacity 1700000

    Example, an engine at half speed: rocstar simulate --slow 2 --policies round-robin,rocstar"""
    from rocstar.forecast.engine_model import COSTS, EngineModel
    from rocstar.forecast.workload import synthetic_workload

    named = {name: getattr(spec, name) for name in ("capacity_tokens", "most_running", "evicted_share", *COSTS)}
    model = EngineModel(**named)
    fleet = {f"engine{number:02}": model for number in range(spec.engines)}
    fleet["engine00"] = model.slower(spec.slow)
    work = [
        synthetic_workload(spec.lengths, problems=spec.problems, attempts=spec.attempts, limit=spec.cap, seed=seed)
        for seed in range(spec.seed, spec.seed + spec.steps)
    ]
    reports = _reports(spec, work, fleet)
    rows = [_row(name, found[-1]) for name, found in reports.items()]
    if as_json:
        print_json({"engine": asdict(model), "engines": len(fleet), "policies": rows})
        return
    print(f"{'policy':16}" + "".join(f"{title:>12}" for title, _ in COLUMNS.values()))
    for row in rows:
        print(f"{row['policy']:16}" + "".join(f"{show(row[key]):>12}" for key, (_, show) in COLUMNS.items()))


def _reports(spec: SimulateSpec, work: Steps, fleet: Mapping[str, EngineModel]) -> dict[str, list[StepReport]]:
    """Of each step, by policy."""
    from rocstar.forecast.policies import POLICIES, scheduler
    from rocstar.forecast.simulate import simulate_steps

    names = [name.strip() for name in spec.policies.split(",")] if spec.policies else POLICIES
    deaths = None if spec.dies is None else {max(fleet): spec.dies}
    return {name: simulate_steps(work, fleet, scheduler(name, work), deaths=deaths) for name in names}


def _row(name: str, report: StepReport) -> dict[str, Any]:
    idle = list(report.idle_share.values())
    return {
        "policy": name,
        "makespan_seconds": round(report.makespan, 3),
        "over_lower_bound": round(report.makespan / report.lower_bound, 4),
        "idle_share": round(sum(idle) / len(idle), 4),
        "idle_share_worst": round(max(idle), 4),
        "tail_share": round(report.tail_share, 4),
        "evictions": report.evictions,
        "recomputed_share": round(report.recomputed_share, 4),
        "recomputed_after_loss": report.recomputed_after_loss,
        "moves": report.moves,
        "produced_tokens": report.produced_tokens,
    }


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "makespan_seconds": ("seconds", "{:,.1f}".format),
    "over_lower_bound": ("x bound", "{:.3f}".format),
    "idle_share": ("idle", "{:.1%}".format),
    "tail_share": ("tail", "{:.1%}".format),
    "evictions": ("evicted", "{:,}".format),
    "recomputed_share": ("recomputed", "{:.1%}".format),
    "recomputed_after_loss": ("after loss", "{:,}".format),
    "moves": ("moves", "{:,}".format),
}
