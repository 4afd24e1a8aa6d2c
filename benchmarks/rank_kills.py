"""Learner ranks that are killed (SIGKILL) at any moment, from the start of their process to the end of the run: is each
named within ten seconds, and is no process left?

    python benchmarks/rank_kills.py [--kills 30] [--ranks 3] [--recipe recipes/first.toml] [SECTION.KEY=VALUE ...]

Each run is a fresh one and has one kill, at a moment drawn between the start of the ranks and the end of a run left
alone; one kill in five hits rank 0, which cannot name itself: then its children must end. Seconds are from the kill to
the end of the run's process, and of all of its children. Prints a table of kills by what the run did, last one JSON
line; ends with 1 where a rank was not named, or not within --within seconds.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from frame import ROOT, Table, environment, parser, report, rocstar

RANK = "rocstar.cluster"
LOOK_SECONDS = 0.02
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Kill(NamedTuple):
    phase: str
    rank: int
    seconds: float | None
    """From the kill until the run had ended; None where it ended before, or did not in time."""
    told: str


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "first.toml")
    options.add_argument("--within", type=float, default=10.0, help="seconds")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("settings", nargs="*")
    given = options.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = left_alone(Path(folder) / "calm", given)
        kills: list[Kill] = []
        for run in count():
            if len(kills) == given.kills:
                break
            rank = 0 if draw.random() < 0.2 else draw.randrange(1, given.ranks)
            kill = killed(Path(folder) / f"{run}", given, rank, draw.uniform(0, whole))
            if kill:
                kills.append(kill)
                print(
                    f"{kill.phase:10} rank {kill.rank}  {kill.seconds or float('inf'):5.1f} s  {kill.told}", flush=True
                )
    table = Table("phase", "kills", "slowest s", "not named")
    for phase in dict.fromkeys(kill.phase for kill in kills):
        mine = [kill for kill in kills if kill.phase == phase]
        table.row(phase, len(mine), max(kill.seconds or float("inf") for kill in mine), sum(map(is_missed, mine)))
    report(kills=[kill._asdict() for kill in kills], missed=sum(map(is_missed, kills)))
    sys.exit(any(map(is_missed, kills)))


def is_missed(kill: Kill) -> bool:
    return kill.seconds is None or (kill.rank > 0 and f"rank {kill.rank} ended with SIGKILL" not in kill.told)


def started(folder: Path, given: Any) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    settings = [f"run.folder={folder}", "run.name=run", "run.threads=1", f"cluster.learners={given.ranks}"]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            rocstar("train", str(given.recipe), *settings, *given.settings),
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment(**ONE_THREAD),
            start_new_session=True,
        )


def left_alone(folder: Path, given: Any) -> float:
    """Seconds from the start of the ranks to the end."""
    process = started(folder, given)
    ranks_of(process, given.ranks - 1)
    began = time.monotonic()
    if process.wait():
        raise SystemExit((folder / "log.txt").read_text())
    return time.monotonic() - began


def ranks_of(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """Of rank 1 and up, in order, as soon as all are there; none where the run ends first."""
    while process.poll() is None:
        with suppress(psutil.Error):
            found = [p for p in psutil.Process(process.pid).children() if RANK in " ".join(p.cmdline())]
            if len(found) == count:
                return sorted(found, key=lambda rank: rank.pid)
        time.sleep(LOOK_SECONDS)
    return []


def killed(folder: Path, given: Any, rank: int, after: float) -> Kill | None:
    """None where the run had ended before."""
    process = started(folder, given)
    ranks = ranks_of(process, given.ranks - 1)
    deadline = time.monotonic() + after
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if process.poll() is not None or not ranks:
        return None
    phase = phase_of(folder)
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    (everybody[0] if rank == 0 else ranks[rank - 1]).send_signal(signal.SIGKILL)
    began = time.monotonic()
    while any(is_alive(one) for one in everybody) and time.monotonic() - began < 3 * given.within:
        process.poll()
        time.sleep(LOOK_SECONDS)
    seconds = time.monotonic() - began
    for one in everybody:
        with suppress(psutil.Error):
            one.kill()
    process.wait()
    told = (folder / "log.txt").read_text().replace("\r", "\n").strip().splitlines()
    if rank and process.returncode == 0:
        return None  # it was over but for its own end
    return Kill(phase, rank, seconds if seconds <= given.within else None, told[-1][:200] if rank else "")


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def phase_of(folder: Path) -> str:
    """What the run says that it does."""
    said = (folder / "log.txt").read_text().replace("\r", "\n").strip().splitlines()
    last = said[-1] if said else ""
    found = re.match(r"(sft|rl|stage\d|rollout|learning|evaluation|pool|cold start|saving)", last)
    return found[1] if found else "start"


if __name__ == "__main__":
    main()
