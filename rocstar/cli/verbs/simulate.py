"""`rocstar simulate`: what a step's rollouts would take under each scheduling policy. Nothing here loads torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rocstar.cli.verbs.common import AsJson, print_json
from rocstar.errors import ConfigError
from rocstar.support.exits import need

if TYPE_CHECKING:
    from rocstar.forecast.engine_model import EngineModel
    from rocstar.forecast.fit import Fit
    from rocstar.forecast.simulate import Moment, StepReport
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

Steps = list[list["PlannedAttempt"]]
Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Replay this run's recorded steps: name, path or `last`.", show_default=False),
]
Step = Annotated[int | None, typer.Option(help="Of RUN, the last to replay; default: its last with rollouts.")]
Lengths = Annotated[
    str | None, typer.Option(help="even, spread, easy-or-hard, alike, pareto or run-on; without RUN.  [default: even]")
]
Cap = Annotated[int | None, typer.Option(min=1, help="Most response tokens; default: 8192, or the run's.")]
Engines = Annotated[int | None, typer.Option(min=1, help="Default: 4, or as many as the run had.")]
Capacity = Annotated[
    int | None, typer.Option(min=2, help="Tokens of KV cache of one engine; default: 610,000, or the run's.")
]
Rows = Annotated[int | None, typer.Option(min=1, help="Requests that run at once on an engine; default: the run's.")]
Dies = Annotated[float | None, typer.Option(min=0, help="Seconds after which the last engine dies.")]
StepCost = Annotated[float | None, typer.Option(min=0, help="Of a decode step, whatever is in it.")]
CachedCost = Annotated[float | None, typer.Option(min=0, help="Added to a step by each cached token that is read.")]
SequenceCost = Annotated[float | None, typer.Option(min=0, help="Added to a step by each running request.")]
PrefillCost = Annotated[float | None, typer.Option(min=0, help="Added to a step by each token that is fed.")]
RequestCost = Annotated[float | None, typer.Option(min=0, help="Added by each request that begins.")]
Evicted = Annotated[
    float, typer.Option(min=0, max=1, help="Of the running requests when the cache is full; 0: one at a time.")
]
Carry = Annotated[
    float, typer.Option(min=0, max=0.99, help="Also do all --steps, at least 4, with this rollout.carry_over.")
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw time lines; needs matplotlib.")]


def simulate(
    run: Run = None,
    step: Step = None,
    lengths: Lengths = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Without RUN.  [default: 128]")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="Per problem, without RUN.  [default: 32]")] = None,
    cap: Cap = None,
    steps: Annotated[int, typer.Option(min=1, help="One after another; the last is shown.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the first step, without RUN.  [default: 0]")] = None,
    engines: Engines = None,
    capacity: Capacity = None,
    most_running: Rows = None,
    slow: Annotated[float, typer.Option(min=0.01, help="The first engine's steps take so many times as long.")] = 1.0,
    dies: Dies = None,
    step_seconds: StepCost = None,
    cached_token_seconds: CachedCost = None,
    sequence_seconds: SequenceCost = None,
    prefill_token_seconds: PrefillCost = None,
    request_seconds: RequestCost = None,
    evicted_share: Evicted = 0.0,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Comma list; default: all.")] = "",
    carry_over: Carry = 0.0,
    picture: Picture = None,
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """Simulate a step's rollouts on several engines under each scheduling policy.

    Costs are those of Qwen3-14B on two MI300X, or with RUN fitted to when its attempts ended. A RUN with
    rollout.max_staleness_steps or carry_over needs costs as options: its attempts shared engines with those of other
    steps.

    Example, the paper's step on 64 GPUs as 32 engines: rocstar simulate --problems 512 --engines 32 --capacity 1700000

    Example, a run's last step on two small engines: rocstar simulate last --engines 2 --capacity 8192"""
    if picture is not None:
        need("plot")
    costs = _given(
        step_seconds=step_seconds,
        seconds_per_cached_token=cached_token_seconds,
        seconds_per_sequence=sequence_seconds,
        seconds_per_prefill_token=prefill_token_seconds,
        seconds_per_request=request_seconds,
    )
    sizes = _given(capacity_tokens=capacity, most_running=most_running)
    drawn = _given(lengths=lengths, problems=problems, attempts=attempts, seed=seed)
    _refuse_unused(run, step, drawn)
    if run is None:
        case = _drawn(**{**DRAWN, **drawn}, limit=cap or CAP, steps=steps)
    else:
        case = _replayed(run, runs, step, steps, cap, costs)
    model = replace(case.model, evicted_share=evicted_share, **sizes, **costs)
    fleet = _fleet(model, engines or case.engines, slow)
    if carry_over and (steps < 4 or dies is not None):
        raise ConfigError("--carry-over looks at a stage of at least 4 steps without a death; set --steps, not --dies")
    reports = _reports(case.work, fleet, policies, dies, picture)
    rows = [_row(name, found[-1]) for name, found in reports.items()]
    for row, found in zip(rows if carry_over else (), reports.values(), strict=False):
        row |= _with_carry_over(case.work, fleet, carry_over, row["policy"], sum(report.makespan for report in found))
    print_json({"engine": asdict(model), "engines": len(fleet), "policies": rows}) if as_json else _print(rows)


class Scenario(NamedTuple):
    """What is to be simulated."""

    work: Steps
    model: EngineModel
    engines: int


def _given(**settings: Any) -> dict[str, Any]:
    """Those that are not left out."""
    return {name: value for name, value in settings.items() if value is not None}


def _refuse_unused(run: str | None, step: int | None, drawn: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    if run is not None and drawn:
        raise ConfigError(f"--{next(iter(drawn))} draws a workload, and the one of {run} is recorded; leave one out")
    if run is None and step is not None:
        raise ConfigError(f"--step {step} is a step of a run; name the run")


def _drawn(*, lengths: str, problems: int, attempts: int, seed: int, limit: int, steps: int) -> Scenario:
    from rocstar.forecast.engine_model import EngineModel
    from rocstar.forecast.workload import synthetic_workload

    work = [
        synthetic_workload(lengths, problems=problems, attempts=attempts, limit=limit, seed=number)
        for number in range(seed, seed + steps)
    ]
    return Scenario(work, EngineModel(capacity_tokens=CAPACITY, **PAPER_COSTS), ENGINES)


def _replayed(
    run: str, runs: Path, last: int | None, steps: int, cap: int | None, given: Mapping[str, float]
) -> Scenario:
    """A run's work and engines; what these cost is fitted where it is not all given."""
    from rocstar.forecast.replay import recorded

    found = recorded(run, runs, last=last, steps=steps, cap=cap)
    model = found.model
    if not set(PAPER_COSTS) <= set(given):
        fitted = found.fitted()
        print(_fit_sentence(fitted), file=sys.stderr)
        model = fitted.model
    return Scenario([list(step.attempts) for step in found.steps], model, found.engines)


def _fit_sentence(found: Fit) -> str:
    from rocstar.forecast.engine_model import COSTS

    costs = ", ".join(f"{name} {getattr(found.model, name):.3g}" for name in COSTS)
    errors = ", ".join(f"{error:+.1%}" for error in found.errors)
    return f"costs fitted to the run: {costs}\nsimulated steps beside recorded ones: {errors}"


def _fleet(model: EngineModel, count: int, slow: float) -> dict[str, EngineModel]:
    fleet = {f"engine{number:02}": model for number in range(count)}
    fleet["engine00"] = model.slower(slow)
    return fleet


def _reports(
    work: Steps, fleet: Mapping[str, EngineModel], policies: str, dies: float | None, picture: Path | None
) -> dict[str, list[StepReport]]:
    """Of each step, by policy; the last one drawn where a picture is wanted."""
    from rocstar.forecast.policies import POLICIES, scheduler
    from rocstar.forecast.simulate import draw, simulate_steps

    names = [name.strip() for name in policies.split(",")] if policies else list(POLICIES)
    moments: dict[str, list[Moment]] = {name: [] for name in names}
    deaths = None if dies is None else {max(fleet): dies}
    found = {}
    for name in names:
        watch = moments[name].append if picture else None
        found[name] = simulate_steps(work, fleet, scheduler(name, work), deaths=deaths, watch=watch)
    if picture is not None:
        draw(moments, fleet, picture)
    return found


def _with_carry_over(
    work: Steps, fleet: Mapping[str, EngineModel], share: float, policy: str, without: float
) -> dict[str, Any]:
    """What a stage takes with rollout.carry_over, and without it; seconds."""
    from rocstar.forecast.carry import simulate_carry_over
    from rocstar.forecast.policies import scheduler

    found = simulate_carry_over(work, share, fleet, scheduler(policy, work))
    return {
        "stage_seconds": round(without, 3),
        "stage_seconds_carried": round(sum(found.makespans), 3),
        "carried_attempts": round(found.attempts, 4),
        "carried_groups": round(found.groups, 4),
    }


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
        "decision_cpu_seconds": round(report.decision_seconds, 3),
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
    "stage_seconds": ("stage", "{:,.1f}".format),
    "stage_seconds_carried": ("carried", "{:,.1f}".format),
    "carried_attempts": ("attempts", "{:.1%}".format),
    "carried_groups": ("groups", "{:.1%}".format),
}


def _print(rows: list[dict[str, Any]]) -> None:
    columns = {key: column for key, column in COLUMNS.items() if key in rows[0]}
    print(f"{'policy':16}" + "".join(f"{title:>12}" for title, _ in columns.values()))
    for row in rows:
        print(f"{row['policy']:16}" + "".join(f"{show(row[key]):>12}" for key, (_, show) in columns.items()))
