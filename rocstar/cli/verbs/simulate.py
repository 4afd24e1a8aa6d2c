"""`rocstar simulate`: what a step's rollouts would take under each scheduling policy. Nothing here loads torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import AsJson, Runs, options_of, print_json
from rocstar.errors import ConfigError

if TYPE_CHECKING:
    from rocstar.forecast.engine_model import EngineModel
    from rocstar.forecast.simulate import StepReport
    from rocstar.forecast.workload import PlannedAttempt

# Qwen3-14B in bf16 on two MI300X at 60% of their bandwidth: 28 GB of weights, 160 KiB of KV a token, 6.4 TB/s.
PAPER_COSTS: dict[str, Any] = {
    "step_seconds": 28e9 / 6.4e12,
    "seconds_per_cached_token": 160 * 1024 / 6.4e12,
    "seconds_per_sequence": 8e-6,
    "seconds_per_prefill_token": 28e-6,
}
CAPACITY = 610_000  # tokens of KV cache on two 80 GB GPUs beside those weights
ENGINES = 4
CAP = 8192
DRAWN: dict[str, Any] = {"lengths": "even", "problems": 128, "attempts": 32, "seed": 0}
SIZES = ("capacity_tokens", "most_running")
"""Options that are fields of EngineModel, as its COSTS are."""

Steps = list[list["PlannedAttempt"]]


@dataclass(frozen=True, kw_only=True)
class SimulateSpec:
    """The fields are the arguments and options of the command, None where it is silent."""

    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Replay this run's recorded steps: name, path or `last`.")
    ] = None
    step: Annotated[int | None, typer.Option(help="Of RUN, the last to replay; default: its last with rollouts.")] = (
        None
    )
    lengths: Annotated[
        str | None,
        typer.Option(help="even, spread, easy-or-hard, alike, pareto or run-on; without RUN.  [default: even]"),
    ] = None
    problems: Annotated[int | None, typer.Option(min=1, help="Without RUN.  [default: 128]")] = None
    attempts: Annotated[int | None, typer.Option(min=1, help="Per problem, without RUN.  [default: 32]")] = None
    cap: Annotated[int | None, typer.Option(min=1, help="Most response tokens; default: 8192, or the run's.")] = None
    steps: Annotated[int, typer.Option(min=1, help="One after another; the last is shown.")] = 1
    seed: Annotated[int | None, typer.Option(help="Of the first step, without RUN.  [default: 0]")] = None
    engines: Annotated[int | None, typer.Option(min=1, help="Default: 4, or as many as the run had.")] = None
    capacity_tokens: Annotated[
        int | None,
        typer.Option("--capacity", min=2, help="Tokens of KV cache of one engine; default: 610,000, or the run's."),
    ] = None
    most_running: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once on an engine; default: the run's.")
    ] = None
    slow: Annotated[float, typer.Option(min=0.01, help="The first engine's steps take so many times as long.")] = 1.0
    dies: Annotated[float | None, typer.Option(min=0, help="Seconds after which the last engine dies.")] = None
    step_seconds: Annotated[float | None, typer.Option(min=0, help="Of a decode step, whatever is in it.")] = None
    seconds_per_cached_token: Annotated[
        float | None,
        typer.Option("--cached-token-seconds", min=0, help="Added to a step by each cached token that is read."),
    ] = None
    seconds_per_sequence: Annotated[
        float | None, typer.Option("--sequence-seconds", min=0, help="Added to a step by each running request.")
    ] = None
    seconds_per_prefill_token: Annotated[
        float | None, typer.Option("--prefill-token-seconds", min=0, help="Added to a step by each token that is fed.")
    ] = None
    seconds_per_request: Annotated[
        float | None, typer.Option("--request-seconds", min=0, help="Added by each request that begins.")
    ] = None
    evicted_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the running requests when the cache is full; 0: one at a time.")
    ] = 0.0
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Comma list; default: all.")] = ""
    runs: Runs = Path("runs")

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of the named options that were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@options_of(SimulateSpec)
def simulate(spec: SimulateSpec, as_json: AsJson = False) -> None:
    """Simulate a step's rollouts on several engines under each scheduling policy.

    Costs are those of Qwen3-14B on two MI300X, or with RUN fitted to when its attempts ended. A RUN with
    rollout.max_staleness_steps or refill needs costs as options: the attempts of a step did not begin together.

    Example, the paper's step on 64 GPUs as 32 engines: rocstar simulate --problems 512 --engines 32 --capacity 1700000

    Example, a run's last step on two small engines: rocstar simulate last --engines 2 --capacity 8192"""
    from rocstar.forecast.engine_model import COSTS

    costs, sizes, drawn = spec.given(COSTS), spec.given(SIZES), spec.given(DRAWN)
    if spec.run is not None and drawn:
        raise ConfigError(
            f"--{next(iter(drawn))} draws a workload, and the one of {spec.run} is recorded; leave one out"
        )
    if spec.run is None and spec.step is not None:
        raise ConfigError(f"--step {spec.step} is a step of a run; name the run")
    drawn_or_recorded = _drawn(spec, **{**DRAWN, **drawn}) if spec.run is None else _replayed(spec, spec.run, costs)
    work, engine, engines = drawn_or_recorded
    model = replace(engine, evicted_share=spec.evicted_share, **sizes, **costs)
    fleet = {f"engine{number:02}": model for number in range(spec.engines or engines)}
    fleet["engine00"] = model.slower(spec.slow)
    reports = _reports(spec, work, fleet)
    rows = [_row(name, found[-1]) for name, found in reports.items()]
    if as_json:
        print_json({"engine": asdict(model), "engines": len(fleet), "policies": rows})
        return
    columns = {key: column for key, column in COLUMNS.items() if key in rows[0]}
    print(f"{'policy':16}" + "".join(f"{title:>12}" for title, _ in columns.values()))
    for row in rows:
        print(f"{row['policy']:16}" + "".join(f"{show(row[key]):>12}" for key, (_, show) in columns.items()))


def _drawn(
    spec: SimulateSpec, *, lengths: str, problems: int, attempts: int, seed: int
) -> tuple[Steps, EngineModel, int]:
    """(work, what an engine is like, how many there are)."""
    from rocstar.forecast.engine_model import EngineModel
    from rocstar.forecast.workload import synthetic_workload

    work = [
        synthetic_workload(lengths, problems=problems, attempts=attempts, limit=spec.cap or CAP, seed=number)
        for number in range(seed, seed + spec.steps)
    ]
    return work, EngineModel(capacity_tokens=CAPACITY, **PAPER_COSTS), ENGINES


def _replayed(spec: SimulateSpec, run: str, given: Mapping[str, float]) -> tuple[Steps, EngineModel, int]:
    """The same of a run; what its engines cost is fitted where it is not all given."""
    from rocstar.forecast.engine_model import COSTS
    from rocstar.forecast.fit import recorded

    found = recorded(run, spec.runs, last=spec.step, steps=spec.steps, cap=spec.cap)
    model = found.model
    if not set(PAPER_COSTS) <= set(given):
        model, off = found.fitted()
        said = ", ".join(f"{name} {getattr(model, name):.3g}" for name in COSTS)
        errors = ", ".join(f"{error:+.1%}" for error in off)
        print(f"costs fitted to the run: {said}\nsimulated steps beside recorded ones: {errors}", file=sys.stderr)
    return [list(step.attempts) for step in found.steps], model, found.engines


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
