"""Simulated rollouts under rocstar's scheduler, the baselines and a clairvoyant one; roomy, tight and small engines.

    python benchmarks/scheduling.py --quick               # two steps a row, the roomy regime at a quarter: minutes
    python benchmarks/scheduling.py --jobs 2              # ten steps a row at full size; CPU: see docs/rollouts.md
    python benchmarks/scheduling.py --only tight          # rows whose name holds a word
    python benchmarks/scheduling.py --keep rows.jsonl     # finished rows are written there, and not done again

A row is one training run: each seed is a step, the engines and what the scheduler has learned live on from step to
step, so the first step of a row is decided without any experience. Figures are sums over the steps of a row. Each
policy has two: its makespan over rocstar's, and over the lower bound, which no schedule reaches. The second says how
much any scheduler could win over that policy.

What an engine does when its cache is full decides how much there is to win (`ENGINES`): `one` is vLLM 0.32's default,
`half` what the paper says of SGLang. Prints a table, whether no baseline is more than 2% faster in any row and
decisions for 16,384 attempts take less than a CPU-second, and last one JSON line.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from frame import Table, parser, read_rows, report, spent

import rocstar.rollout
from rocstar.forecast.engine_model import EngineModel, torch_engine
from rocstar.forecast.policies import CLAIRVOYANT, OURS, POLICIES, scheduler
from rocstar.forecast.simulate import StepReport, simulate_steps
from rocstar.forecast.workload import TOOL_SECONDS, PlannedAttempt, shrunk, synthetic_workload
from rocstar.rollout.scheduler import Scheduler
from rocstar.types import EngineLoad

BANDWIDTH = 6.4e12  # bytes a second: two MI300X at 60%
ENGINE = EngineModel(  # Qwen3-14B in bf16
    capacity_tokens=1_700_000,
    step_seconds=28e9 / BANDWIDTH,
    seconds_per_cached_token=160 * 1024 / BANDWIDTH,
    seconds_per_sequence=8e-6,
    seconds_per_prefill_token=28e-6,
)
TIGHT_TOKENS = 610_000  # of KV cache, an engine of two ordinary GPUs
ENGINES = {
    "one": replace(ENGINE, evicted_share=0.0, watermark=0.0),
    "one-1%": replace(ENGINE, evicted_share=0.0, watermark=0.01),
    "tenth": replace(ENGINE, evicted_share=0.1, watermark=0.0),
    "half-1%": replace(ENGINE, evicted_share=0.5, watermark=0.01),
    "half": replace(ENGINE, evicted_share=0.5, watermark=0.0),
    "no-prefix": replace(ENGINE, prefix_cache=False),
    "rows": replace(ENGINE, most_running=256),
    "torch": replace(ENGINE, chunk_tokens=256, page_tokens=16, oldest_first=True, patience_seconds=1.0),
}
"""By what they give up when the next step does not fit, and the share of the cache that an admission leaves free."""
SMALL = replace(  # a model of 0.3M parameters on a CPU: most of a step is constant, feeding is cheap
    torch_engine(capacity_tokens=2048, most_running=64),
    step_seconds=2.4e-3,
    seconds_per_cached_token=1e-9,
    seconds_per_sequence=40e-6,
    seconds_per_prefill_token=25e-6,
)
SHRINK = 16  # times shorter for the small regime
REGIMES = {
    "tight": (TIGHT_TOKENS, 4, 128),
    "roomy": (ENGINE.capacity_tokens, 32, 512),
    "tiny": (41_000, 2, 8),
    "few": (122_000, 2, 16),
    "crowded": (984_000, 2, 64),
    "apart": (300_000, 3, 64),
}
"""Tokens of an engine's cache, engines, problems a step; the small regime has engines of its own."""
TUNED = ("even", "easy-or-hard", "pareto")
HELD_OUT = ("spread", "alike", "two-kinds", "uniform")
ATTEMPTS = 32
STEPS, QUICK_STEPS = 10, 2
CARRY_STEPS = 6
SMALL_STEPS = 10  # for one of the others: 64 attempts take no time to simulate, and steps differ by a tenth
BASELINES = tuple(policy for policy in POLICIES if policy not in (OURS, CLAIRVOYANT))
MOST_FASTER = 0.02  # than rocstar's, of a baseline's makespan


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    regime: str
    cap: int
    lengths: str
    eviction: str = "one"
    trouble: str = ""
    """`speeds`: one engine half as fast, one 1.3 times slower; `death`: one engine dies half way in the last step."""
    steps: int = STEPS
    quarter: bool = False
    """The roomy regime with 8 engines and 128 problems."""
    tool_seconds: float = TOOL_SECONDS
    fresh: bool = False
    """Each step is the first of a run."""

    @property
    def name(self) -> str:
        tools = "" if self.tool_seconds == TOOL_SECONDS else f" tools-{self.tool_seconds:g}"
        name = f"{self.regime} {self.cap // 1024}K {self.lengths} {self.eviction} {self.trouble}".strip()
        return f"{name}{tools}{' first' if self.fresh else ''}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="two steps a row, and the roomy regime at a quarter")
    options.add_argument("--steps", type=int, help=f"steps a row (default: {STEPS}, quick: {QUICK_STEPS})")
    options.add_argument("--only", default="", help="rows whose name holds this word")
    options.add_argument("--jobs", type=int, default=1, help="rows at once, each in a process")
    options.add_argument("--keep", type=Path, help="file of finished rows; those of this source are not done again")
    arguments = options.parse_args()
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    chosen = [case for case in cases(steps, arguments.quick) if arguments.only in case.name]
    table = Table("makespan over rocstar's / over the bound", *POLICIES, "recomputed", first=42, width=15)
    rows = []
    for row in rows_of(chosen, arguments.jobs, arguments.keep):
        rows.append(row)
        pairs = (f"{row['over_ours'][policy]:.3f} / {row['over_bound'][policy]:.2f}" for policy in POLICIES)
        table.row(row["name"], *pairs, f"{row['recomputed_share']:.1%}")
    leads = ((1 - min(row["over_ours"][policy] for policy in BASELINES), row["name"]) for row in rows)
    faster, name = max(leads, default=(0.0, "no row"))
    deciding = decision_seconds(16_384)
    marks = {
        f"no baseline more than {MOST_FASTER:.0%} faster: {faster:.1%} in {name!r}": faster <= MOST_FASTER,
        f"decisions for 16,384 attempts below 1 CPU-s: {deciding:.2f}": deciding < 1.0,
    }
    for mark, met in marks.items():
        print(f"{'met  ' if met else 'short'}  {mark}")
    print(f"{sum(row['cpu_seconds'] for row in rows):.0f} CPU-s")
    report(quick=arguments.quick, steps=steps, rows=rows, marks=marks)


def cases(steps: int, quarter: bool) -> Iterator[Case]:
    def case(regime: str, cap: int, lengths: str, eviction: str = "one", trouble: str = "", **more: Any) -> Case:
        many = SMALL_STEPS * steps if regime == "small" else steps
        small = quarter and regime == "roomy"
        return Case(regime=regime, cap=cap, lengths=lengths, eviction=eviction, trouble=trouble, steps=many,
                    quarter=small, **more)  # fmt: skip

    everyone = ("even", "easy-or-hard", "spread", "alike")
    yield from (case("small", 8192, lengths) for lengths in everyone)
    for cap in (8192, 12288):
        yield from (case("tight", cap, lengths) for lengths in everyone)
        if cap == 8192:
            for trouble in ("speeds", "death"):
                yield from (case("tight", cap, lengths, trouble=trouble) for lengths in ("even", "spread"))
        yield from (case("tight", cap, lengths, "half") for lengths in everyone)
        yield from (case("roomy", cap, lengths) for lengths in everyone)
    for trouble in ("speeds", "death"):
        yield from (case("roomy", 8192, lengths, trouble=trouble) for lengths in ("even", "spread"))
    yield from (case("tight", 8192, "even", eviction) for eviction in ("one-1%", "tenth", "half-1%"))
    yield case("tight", 32768, "pareto")
    yield case("roomy", 32768, "pareto")
    for seconds in (0.1, 30.0):
        yield from (case("tight", 8192, "even", eviction, tool_seconds=seconds) for eviction in ("one", "no-prefix"))
    for regime in ("tiny", "few"):
        yield from (
            case(regime, 8192, lengths, fresh=fresh) for lengths in ("even", "spread") for fresh in (True, False)
        )
    yield case("tight", 8192, "easy-or-hard", fresh=True)
    yield from (case("crowded", 8192, lengths, "rows") for lengths in everyone)
    yield case("crowded", 8192, "even", "rows", fresh=True)
    # Kept apart: nobody looked at them before the scheduler was done
    yield case("apart", 16384, "pareto", tool_seconds=5.0)
    yield case("apart", 16384, "two-kinds")
    yield case("apart", 16384, "two-kinds", "no-prefix", tool_seconds=5.0, fresh=True)
    yield case("apart", 8192, "uniform", trouble="sizes")
    yield case("apart", 8192, "uniform", trouble="speeds", fresh=True)
    yield case("apart", 4096, "uniform", "torch", tool_seconds=2.0)


# Rows


def rows_of(chosen: Iterable[Case], jobs: int, keep: Path | None) -> Iterator[dict[str, Any]]:
    """Each case's row, those from `keep` first."""
    source = source_digest()
    kept = {}
    for row in read_rows(keep) if keep else ():
        kept[(row["source"], json.dumps(row["case"], sort_keys=True))] = row
    missing = []
    for case in chosen:
        row = kept.get((source, json.dumps(asdict(case), sort_keys=True)))
        if row is None:
            missing.append(case)
        else:
            yield row
    with Pool(min(jobs, len(missing) or 1)) as pool:
        for row in pool.imap(row_of, missing) if jobs > 1 else map(row_of, missing):
            row["source"] = source
            if keep:
                with keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row


def source_digest() -> str:
    """Of what the figures depend on."""
    files = [*sorted(Path(rocstar.rollout.__path__[0]).glob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def row_of(case: Case) -> dict[str, Any]:
    engines, problems = engines_of(case)
    work = [workload(case, problems, seed) for seed in range(case.steps)]
    with spent() as seconds_taken:
        deaths = deaths_of(case, engines, work)
        reports = {policy: reports_of(case, policy, engines, work, deaths) for policy in POLICIES}
    assert all(len(report.ends) == len(work[0]) for found in reports.values() for report in found), "attempts were lost"
    ours = reports[OURS]
    seconds = {policy: sum(report.makespan for report in found) for policy, found in reports.items()}
    bound = sum(report.lower_bound for report in ours)
    produced = sum(report.produced_tokens for report in ours)
    return {
        "case": asdict(case),
        "name": case.name,
        "seconds": {policy: round(value, 1) for policy, value in seconds.items()},
        "over_ours": {policy: round(value / seconds[OURS], 4) for policy, value in seconds.items()},
        "over_bound": {policy: round(value / bound, 4) for policy, value in seconds.items()},
        "recomputed_share": round(sum(report.recomputed_tokens for report in ours) / produced, 4),
        "cpu_seconds": round(seconds_taken.cpu, 1),
    }


def reports_of(
    case: Case,
    policy: str,
    engines: Mapping[str, EngineModel],
    work: list[list[PlannedAttempt]],
    deaths: Mapping[str, float] | None,
) -> list[StepReport]:
    runs = [[step] for step in work] if case.fresh else [work]
    return [report for run in runs for report in simulate_steps(run, engines, scheduler(policy, run), deaths=deaths)]


def workload(case: Case, problems: int, seed: int) -> list[PlannedAttempt]:
    if case.regime != "small":
        return synthetic_workload(
            case.lengths,
            problems=problems,
            attempts=ATTEMPTS,
            limit=case.cap,
            seed=seed,
            tool_seconds=case.tool_seconds,
        )
    drawn = synthetic_workload(
        case.lengths, problems=problems, attempts=ATTEMPTS // 2, limit=case.cap, seed=seed, tool_seconds=0.1
    )
    return shrunk(drawn, SHRINK)


def engines_of(case: Case) -> tuple[dict[str, EngineModel], int]:
    """Engines by name, and problems a step."""
    if case.regime == "small":
        return {"engine00": SMALL, "engine01": SMALL}, 4
    capacity, number, problems = REGIMES[case.regime]
    model = replace(ENGINES[case.eviction], capacity_tokens=capacity)
    if case.quarter:
        number, problems = number // 4, problems // 4
    engines = {f"engine{index:02}": model for index in range(number)}
    if case.trouble == "sizes":
        engines["engine00"] = replace(model, capacity_tokens=capacity // 3)
    if case.trouble == "speeds":
        engines |= {"engine00": model.slower(2.0), "engine01": model.slower(1.3)}
    return engines, problems


def deaths_of(
    case: Case, engines: Mapping[str, EngineModel], work: list[list[PlannedAttempt]]
) -> Mapping[str, float] | None:
    if case.trouble != "death":
        return None
    last = work[-1:]
    return {max(engines): simulate_steps(last, engines, scheduler("round-robin", last))[0].makespan / 2}


# What decisions cost


class Trace:
    """A scheduler that remembers what it was told, so that its decisions can be timed without the simulation."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return getattr(self.inner, name)(*arguments)

        return call

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> dict[str, str]:
        seen = Seen(engines)
        self.calls.append(("assign", (seen, now)))
        return self.inner.assign(seen, now)

    def replay(self, fresh: Scheduler) -> float:
        """CPU seconds that a fresh scheduler takes for the same calls."""
        calls = [(getattr(fresh, name), arguments) for name, arguments in self.calls]
        gc.collect()
        gc.freeze()  # what is remembered here is no work of the scheduler's
        started = time.thread_time()
        for call, arguments in calls:
            call(*arguments)
        return time.thread_time() - started


class Seen(Mapping[str, EngineLoad]):
    """Load facts, remembered when they are read."""

    def __init__(self, engines: Mapping[str, EngineLoad]) -> None:
        self.engines = engines
        self.loads: dict[str, EngineLoad] = {}

    def __getitem__(self, name: str) -> EngineLoad:
        if name not in self.loads:
            self.loads[name] = self.engines[name]
        return self.loads[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.engines)

    def __len__(self) -> int:
        return len(self.engines)

    def __contains__(self, name: object) -> bool:
        return name in self.engines


def decision_seconds(attempts: int) -> float:
    """CPU of the scheduler for one step of `attempts` attempts on the roomy regime's engines."""
    engines = {f"engine{index:02}": ENGINE for index in range(32)}
    work = [synthetic_workload("even", problems=attempts // ATTEMPTS, attempts=ATTEMPTS, limit=8192, seed=0)]
    trace = Trace(scheduler(OURS, work))
    simulate_steps(work, engines, trace)
    return trace.replay(scheduler(OURS, work))


if __name__ == "__main__":
    main()
