"""Two real engines under each scheduling policy, and what the simulator said of them before.

    python benchmarks/schedule_real.py                               # 8 problems x 16 attempts, medians of 5 rounds
    python benchmarks/schedule_real.py --clock cpu --repeat 1        # on a machine that has other work
    python benchmarks/schedule_real.py --lengths easy-or-hard --kv-tokens 2048

Torch engines with small KV caches; the model has the shape of recipes/quickstart.toml and random weights. Another
engine does a few designed workloads, and the costs of the simulated engine are fitted to them. Under each policy, two
engines do a workload that was not used for the fit: turns as long, and tools that take as long, as drawn from a
distribution of lengths at a sixteenth of the paper's.

    --clock wall   engines in processes of their own, each on a core of its own, behind a fleet; seconds by the clock.
                   One of them does the designed workloads alone, before and after.
                   Where there are no more cores than engines this process takes CPU from them: its CPU seconds a
                   request, measured on the way, are added to what a request costs. `stolen` is the share of the time
                   that engines waited for a core; where it is not small, the figures are worth nothing.
    --clock cpu    their decoders in this process, each with a clock that its own CPU seconds move, counted in steps of
                   a reference decoder, so that a machine that is slower for a while does not count. One more decoder
                   does the designed workloads, a step after every few of the engines: in the same minutes, and from a
                   cache of the processor that others have used, as theirs

Idle share is one minus the CPU seconds of an engine over the makespan. Prints the costs and what the fit leaves, a
table with the simulator's figures beside the measured ones, and last one JSON line. Ends with 1 where the simulated
makespan of a policy is off by more than 15%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CAP = 8192
SHRINK = 16  # times shorter than the paper's responses of at most CAP tokens
ENGINES = 2
GOAL = 0.15


def main() -> None:
    options = parsed()
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    from rocstar.support.threads import quiet_torch

    quiet_torch(threads=1)
    figures = asyncio.run(measured(options))
    print(json.dumps(figures))
    raise SystemExit(0 if all(abs(row["error"]) <= GOAL for row in figures["rows"]) else 1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=16, help="per problem")
    parser.add_argument("--lengths", default="spread", help="a distribution of `rocstar simulate`")
    parser.add_argument("--tool-seconds", type=float, default=0.1, help="mean of the exponential wait")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="of each engine")
    parser.add_argument("--rows", type=int, default=64, help="sequences that an engine decodes at once")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--policies", nargs="+", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of the policies. By the clock the designed workloads are done before and after each, and it is compared
    with costs that were fitted to these, so that a change of the machine's speed moves both. Counted in reference steps
    the speed is out, and all trials so far give the costs."""
    import torch
    from real_engines import ByCpuSeconds, InProcesses

    from rocstar.forecast.policies import POLICIES
    from tests.rollout.played import designed

    torch.set_num_threads(1)
    make = InProcesses.start if options.clock == "wall" else ByCpuSeconds.start
    engines, work = await make(ENGINES, options.rows, options.kv_tokens), workload(options)
    print(f"{len(work)} attempts, {sum(attempt.response_tokens for attempt in work):,} tokens after the prompts")
    others = designed(torch_sizes(options), longest=CAP // SHRINK)
    rounds, names, wall = [], options.policies or POLICIES, options.clock == "wall"
    trials: list[list[Any]] = []
    try:
        for _ in range(options.repeat):
            rounds.append({})
            done = {}
            trials.append(await engines.calibrate(others))
            for name in names:
                done[name] = await rolled(engines, name, work)
                if wall or name == names[-1]:
                    trials.append(await engines.calibrate(others))
                    model = fitted([trial for some in (trials[-2:] if wall else trials) for trial in some], options)
                    compare = {policy: compared(policy, found, work, model) for policy, found in done.items()}
                    print(HEADER, *map(line, compare.values()), sep="\n", flush=True)
                    rounds[-1] |= compare
                    done = {}
    finally:
        await engines.close()
    rows = [middle([each[name] for each in rounds]) for name in names]
    if len(rounds) > 1:
        print(f"medians of {len(rounds)} rounds\n{HEADER}", *map(line, rows), sep="\n")
    return {"clock": options.clock, "attempts": len(work), "rows": rows}


def fitted(trials: Sequence[Any], options: argparse.Namespace) -> Any:
    """The simulated engine with costs fitted to the trials, which are printed with what the fit leaves."""
    from rocstar.forecast.engine_model import COSTS
    from rocstar.forecast.fit import fit

    found = fit(torch_sizes(options), trials)
    said = (f"{name} {getattr(found.model, name) * 1e6:,.2f} us" for name in COSTS)
    print(f"\nfitted: {', '.join(said)}")
    print(f"left by the fit: {found.spread:.1%} of an attempt's end; of the makespans of its workloads", end="")
    print("".join(f"{error:>+7.1%}" for error in found.errors), flush=True)
    return found.model


async def rolled(engines: Any, policy: str, work: Sequence[Any]) -> Any:
    from rocstar.forecast.policies import scheduler

    return await engines.roll(work, scheduler(policy, [work]), ENGINES)


def torch_sizes(options: argparse.Namespace) -> Any:
    from rocstar.engines.memory import kv_pages
    from rocstar.engines.pages import PAGE
    from rocstar.forecast.engine_model import torch_engine

    capacity = kv_pages(options.kv_tokens, options.rows, CAP // SHRINK) * PAGE
    return replace(torch_engine(capacity_tokens=capacity, most_running=options.rows), told_lengths=True)


def workload(options: argparse.Namespace) -> list[Any]:
    from rocstar.forecast.workload import shrunk, synthetic_workload

    drawn = synthetic_workload(
        options.lengths,
        problems=options.problems,
        attempts=options.attempts,
        limit=CAP,
        seed=options.seed,
        tool_seconds=options.tool_seconds,
    )
    return shrunk(drawn, SHRINK)


def compared(policy: str, real: Any, work: Sequence[Any], model: Any) -> dict[str, Any]:
    """Measured and simulated figures of one policy in one round."""
    from rocstar.forecast.policies import scheduler
    from rocstar.forecast.simulate import simulate

    loaded = replace(model, seconds_per_request=model.seconds_per_request + real.driver)
    report = simulate(work, {f"engine{place}": loaded for place in range(ENGINES)}, scheduler(policy, [work]))
    return {
        "policy": policy,
        "seconds": max(real.ends),
        "simulated_seconds": report.makespan,
        "error": report.makespan / max(real.ends) - 1,
        "idle": real.idle,
        "simulated_idle": mean(report.idle_share.values()),
        "evictions": real.evictions,
        "simulated_evictions": report.evictions,
        "recomputed": real.recomputed,
        "simulated_recomputed": report.recomputed_tokens,
        "produced": report.produced_tokens,
        "driver_seconds_per_request": real.driver,
        "stolen": real.stolen,
    }


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure, and the error of each round."""
    figures = {key: median(row[key] for row in rows) for key in rows[0] if key != "policy"}
    return {"policy": rows[0]["policy"], **figures, "errors": [round(row["error"], 4) for row in rows]}


HEADER = (
    f"{'policy':16}{'seconds':>9}{'simulated':>11}{'error':>8}{'idle':>8}{'simul.':>8}{'evicted':>9}{'simul.':>8}"
    f"{'fed again':>11}{'simul.':>8}{'stolen':>8}"
)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']:16}{row['seconds']:>9.2f}{row['simulated_seconds']:>11.2f}{row['error']:>+8.1%}"
        f"{row['idle']:>8.1%}{row['simulated_idle']:>8.1%}{row['evictions']:>9.0f}{row['simulated_evictions']:>8.0f}"
        f"{row['recomputed']:>11.0f}{row['simulated_recomputed']:>8.0f}{row['stolen']:>8.1%}"
    )


if __name__ == "__main__":
    main()
