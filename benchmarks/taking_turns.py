"""How long is a step where learners and vLLM servers take turns on the same devices?

    python benchmarks/taking_turns.py [--steps 8] [--share 0.45] [--keep FOLDER] [SECTION.KEY=VALUE ...]

Two control groups play two GPUs: what is in one gets --share of a core, whether the other computes or not. `apart`: a
vLLM server in one, the learner in the other, and each waits for the other. `in turns` (`cluster.colocate`): a server
and a learner rank in each. Programs of the model run outside of both. Both ways begin with the weights of one cold
start of recipes/rehearsal.toml and make as many steps; the cap is high, so that a few attempts are far longer than the
others. Checked: every attempt of every step is there once, and none ended by a fault; every sampled token has one
version span and was written by the weights of its step. Prints seconds a step and last one JSON line; ends with 1 where
a check fails or taking turns is no faster. Needs root and ROCSTAR_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import psutil
from frame import ROOT, Table, environment, marked, newest_model, parser, read_rows, report, rocstar, slug, tree

RECIPE = "recipes/rehearsal.toml"
RANK, ENGINE = "rocstar.cluster", "rocstar_vllm_serve.py"  # in the command of a learner rank, of a vLLM server
MARK = "ROCSTAR_TAKING_TURNS"  # variable that every process of the run inherits
COMMON = (
    "learning.learning_rate=1e-9",  # all ways have the same work, whatever they would learn
    "cluster.launcher=processes",
    "cluster.sandbox_nodes=0",
    "evaluate.problems=0",
    "rollout.problems_per_step=8",
    "rollout.attempts_per_problem=16",
    "rollout.max_response_tokens=384",
    "rollout.engine_rows=64",
    "resample.keep=8",
)
APART = ("cluster.learners=1", "engine.v.count=1")
IN_TURNS = ("cluster.learners=2", "engine.v.count=2", "cluster.colocate=true")
WAYS = {
    "apart": APART,
    "in turns": IN_TURNS,
}
LOOK_SECONDS = 0.5
CONTROL, PERIOD = Path("/sys/fs/cgroup"), 100_000  # microseconds


class Steps(NamedTuple):
    seconds: float
    """A step, in the mean of all."""
    rollout: float
    attempts: int
    wrong: int
    """Attempts that are missing, twice there, ended by a fault, or hold a token of other weights than they may."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--share", type=float, default=0.45, help="of a core that each device has")
    options.add_argument("--keep", help="folder in which the runs stay")
    options.add_argument("settings", nargs="*")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        cold = ("model.max_positions=640", "stage.rl.steps=0")
        run(folder / "cold", given.share, *COMMON, *APART, *given.settings, *cold)
        start = (f"model.path={newest_model(folder / 'cold')}", "stage.sft.steps=0", f"stage.rl.steps={given.steps}")

        for way, places in WAYS.items():
            run(folder / slug(way), given.share, *COMMON, *places, *given.settings, *start)
        found = {way: steps_of(folder / slug(way)) for way in WAYS}
    table = Table("way", "s a step", "of it rollout", "attempts", "wrong", first=26)
    for way, steps in found.items():
        table.row(way, *steps)
    ratio = found["in turns"].seconds / found["apart"].seconds
    report(ways={way: steps._asdict() for way, steps in found.items()}, ratio=ratio)
    sys.exit(any(steps.wrong for steps in found.values()) or ratio >= 1)


def run(place: Path, share: float, *settings: str) -> None:
    """One run, whose processes stay on their devices. Nothing where it is there already."""
    if (place / "summary.json").exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)  # of a call that was interrupted
    mark = secrets.token_hex(8)
    names = (f"run.folder={place.parent}", f"run.name={place.name}")
    with (place.parent / f"{place.name}.log").open("wb") as log:
        process = subprocess.Popen(
            rocstar("train", RECIPE, *names, *settings),
            cwd=ROOT,
            env=environment(**{MARK: mark}),
            stdout=log,
            stderr=log,
        )
    ended = threading.Event()
    turns = "cluster.colocate=true" in settings
    watched = process.pid, mark, place / "events.jsonl", turns, share, ended
    keeper = threading.Thread(target=keep_apart, args=watched)
    keeper.start()
    code = process.wait()
    ended.set()
    keeper.join()
    if code:
        raise SystemExit(f"{place.name} ended with {code}; see {place.parent / place.name}.log")


@contextmanager
def devices(share: float) -> Iterator[Sequence[Path]]:
    """The process lists of two control groups that get so much of a core each."""
    old = CONTROL / "cpu"  # version 1
    groups = [(old if old.is_dir() else CONTROL) / f"rocstar-device-{place}" for place in range(2)]
    for group in groups:
        group.mkdir(exist_ok=True)
        limit = group / ("cpu.cfs_quota_us" if old.is_dir() else "cpu.max")
        limit.write_text(f"{PERIOD * share:.0f}" if old.is_dir() else f"{PERIOD * share:.0f} {PERIOD}")
    try:
        yield [group / "cgroup.procs" for group in groups]
    finally:
        for group in groups:
            group.rmdir()


def keep_apart(run: int, mark: str, begun: Path, turns: bool, share: float, ended: threading.Event) -> None:
    """From its RL stage on: learner rank n and server n on device n; servers that take no turns begin after the ranks.
    All on one core, so that its two threads do not slow each other."""
    while not ended.wait(LOOK_SECONDS) and not any(row.get("kind") == "rl" for row in read_rows(begun)):
        pass
    with devices(share) as lists:
        while True:
            for place, pid in placed(run, mark, turns):
                with suppress(psutil.Error, OSError):  # it has ended meanwhile
                    lists[place].write_text(str(pid))
                    for thread in psutil.Process(pid).threads():
                        os.sched_setaffinity(thread.id, {max(os.sched_getaffinity(0))})
            if ended.wait(LOOK_SECONDS):
                break


def placed(run: int, mark: str, turns: bool) -> Iterator[tuple[int, int]]:
    """(device, process) of the run's ranks and servers."""
    words = {}
    for process in marked(MARK, mark):
        with suppress(psutil.Error):
            words[process.pid] = " ".join(process.cmdline())
    ranks = [run, *sorted(pid for pid in words if RANK in words[pid])]
    servers = sorted(pid for pid in words if ENGINE in words[pid])
    yield from enumerate(ranks)
    for place, server in enumerate(servers, 0 if turns else len(ranks)):
        with suppress(psutil.Error):
            yield from ((place, process.pid) for process in tree(server))


def rl_rows(run: Path) -> list[dict[str, Any]]:
    """Metrics of the RL steps that are done."""
    return [row for row in read_rows(run / "metrics.jsonl") if row["stage"] == "rl"]


def steps_of(run: Path) -> Steps:
    import pyarrow.parquet as parquet

    rows, asked = rl_rows(run), json.loads((run / "config.resolved.json").read_text())
    stage = next(stage for stage in asked["stage"] if stage["kind"] == "rl")
    wanted = stage["rollout"]["problems_per_step"] * stage["rollout"]["attempts_per_problem"] * len(rows)
    columns = ["problem_id", "index", "stop", "policy_version", "turns", "loss_mask"]
    seen, wrong = 0, 0
    for row in rows:
        attempts = parquet.read_table(run / "rollouts" / f"step={row['step']:06d}.parquet", columns=columns).to_pylist()
        seen += len({(attempt["problem_id"], attempt["index"]) for attempt in attempts})
        for attempt in attempts:
            spans = [span for turn in json.loads(attempt["turns"]) for span in turn["version_spans"]]
            newest = attempt["policy_version"]
            whole = sum(tokens for _, tokens in spans) == sum(attempt["loss_mask"])
            versions = [version for version, _ in spans]
            exact = whole and set(versions) <= {newest}
            wrong += attempt["stop"] == "environment_failed" or not exact
    return Steps(
        seconds=mean(row["step/seconds"] for row in rows),
        rollout=mean(row["seconds/rollout"] for row in rows),
        attempts=seen,
        wrong=wrong + abs(wanted - seen),
    )


if __name__ == "__main__":
    main()
