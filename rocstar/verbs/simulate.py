"""`rocstar simulate`: what a step's rollouts would take under each scheduling policy. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.verbs.common import AsJson, print_json

if TYPE_CHECKING:
    from rocstar.rollout.simulate import Moment, Report
    from rocstar.rollout.workload import PlannedAttempt

# Qwen3-14B in bf16 on two MI300X at 60% of their bandwidth: 28 GB of weights, 160 KiB of KV a token, 6.4 TB/s.
STEP_SECONDS = 28e9 / 6.4e12
SECONDS_PER_CACHED_TOKEN = 160 * 1024 / 6.4e12
SECONDS_PER_SEQUENCE = 8e-6
SECONDS_PER_PREFILL_TOKEN = 28e-6
CAP = 8192


def simulate(
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Replay a run's recorded step: name or `last`.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of that run; default: its last with rollouts.")] = None,
    lengths: Annotated[str, typer.Option(help="even, spread, easy-or-hard or alike; without --run.")] = "even",
    problems: Annotated[int, typer.Option(min=1, help="Without --run.")] = 128,
    attempts: Annotated[int, typer.Option(min=1, help="Per problem, without --run.")] = 32,
    cap: Annotated[int | None, typer.Option(min=1, help="Most response tokens; default: 8192, or the run's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="One after another; the last is shown.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
    engines: Annotated[int, typer.Option(min=1)] = 4,
    capacity: Annotated[int, typer.Option(min=2, help="Tokens of KV cache of one engine.")] = 610_000,
    slow: Annotated[float, typer.Option(min=0.01, help="The first engine's steps take so many times as long.")] = 1.0,
    dies: Annotated[float | None, typer.Option(min=0, help="Seconds after which the last engine dies.")] = None,
    step_seconds: Annotated[float, typer.Option(min=0, help="Of a decode step, whatever is in it.")] = STEP_SECONDS,
    cached_token_seconds: Annotated[
        float, typer.Option(min=0, help="Added to a step by each cached token that is read.")
    ] = SECONDS_PER_CACHED_TOKEN,
    sequence_seconds: Annotated[
        float, typer.Option(min=0, help="Added to a step by each running request.")
    ] = SECONDS_PER_SEQUENCE,
    prefill_token_seconds: Annotated[
        float, typer.Option(min=0, help="Added to a step by each token that is fed.")
    ] = SECONDS_PER_PREFILL_TOKEN,
    most_running: Annotated[int | None, typer.Option(min=1, help="Requests that run at once on an engine.")] = None,
    evicted_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the running requests when the cache is full; 0: one at a time.")
    ] = 0.0,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Comma list; default: all.")] = "",
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw time lines; needs matplotlib.")] = None,
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """Simulate a step's rollouts on several engines under each scheduling policy.

    Example: rocstar simulate --problems 512 --engines 32 --capacity 1700000 --policies round-robin,rocstar"""
    from rocstar.rollout.engine_model import EngineModel
    from rocstar.rollout.policies import POLICIES, scheduler
    from rocstar.rollout.simulate import simulate_steps
    from rocstar.rollout.timeline import draw
    from rocstar.rollout.workload import synthetic_workload

    if picture is not None:
        from rocstar.exits import need

        need("plot")
    model = EngineModel(
        capacity_tokens=capacity,
        step_seconds=step_seconds,
        seconds_per_cached_token=cached_token_seconds,
        seconds_per_sequence=sequence_seconds,
        seconds_per_prefill_token=prefill_token_seconds,
        evicted_share=evicted_share,
        **({} if most_running is None else {"most_running": most_running}),
    )
    fleet = {f"engine{number:02}": model for number in range(engines)}
    fleet["engine00"] = model.slower(slow)
    if run is not None:
        work = _recorded(run, step, steps, runs, cap)
    else:
        work = [
            synthetic_workload(lengths, problems=problems, attempts=attempts, limit=cap or CAP, seed=seed + number)
            for number in range(steps)
        ]
    names = [name.strip() for name in policies.split(",")] if policies else list(POLICIES)
    moments: dict[str, list[Moment]] = {}
    reports: dict[str, Report] = {}
    for name in names:
        moments[name] = []
        reports[name] = simulate_steps(
            work,
            fleet,
            scheduler(name, work),
            deaths=None if dies is None else {f"engine{engines - 1:02}": dies},
            watch=moments[name].append if picture else None,
        )[-1]
    if picture is not None:
        draw(moments, fleet, picture)
    rows = [_row(name, report) for name, report in reports.items()]
    print_json({"policies": rows}) if as_json else _print(rows)


def _recorded(run: str, last: int | None, steps: int, runs: Path, cap: int | None) -> list[list[PlannedAttempt]]:
    """The recorded steps up to `last`, `steps` of them. Raises DataError where there are not so many."""
    import json

    from rocstar.errors import DataError
    from rocstar.rollout.workload import recorded_workload
    from rocstar.runs.folder import RunFolder
    from rocstar.runs.rollouts import read_rollouts

    folder = RunFolder.find(run, runs)
    files = folder.rollout_file(0).parent.glob("step=*.parquet")
    recorded = sorted(int(file.stem.partition("=")[2]) for file in files)
    chosen = [number for number in recorded if last is None or number <= last][-steps:]
    if len(chosen) < steps or (last is not None and chosen[-1] != last):
        raise DataError(f"{folder.path} has rollouts of the steps {recorded}; choose --step and --steps among them")
    rows = [read_rollouts(folder, number) for number in chosen]
    if cap is None:
        configured = json.loads(folder.resolved.read_text())["rollout"]["max_response_tokens"]
        cap = max(configured, *(row["response_tokens"] for attempts in rows for row in attempts))
    return [recorded_workload(attempts, cap) for attempts in rows]


def _row(name: str, report: Report) -> dict[str, Any]:
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
}


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'policy':16}" + "".join(f"{title:>12}" for title, _ in COLUMNS.values()))
    for row in rows:
        print(f"{row['policy']:16}" + "".join(f"{show(row[key]):>12}" for key, (_, show) in COLUMNS.items()))
