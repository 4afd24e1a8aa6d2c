"""Does a run that Ray places lose anything when one of its engines and one of its sandbox services are killed?

    python benchmarks/rehearsal.py [--steps 60] [--engine-step 2] [--sandbox-step 3] [--keep FOLDER]
        [SECTION.KEY=VALUE ...]

Runs recipes/rehearsal.toml (two learner ranks, two vLLM servers, two sandbox services on one machine). In the middle of
the RL steps named, after a third of the tokens that the step before had, one vLLM server and one service get `kill -9`.
Checked: the run ends well; every attempt of every step is there once and none ended by a fault of ours; in every step
the log-probabilities of engine and learner agree within 1e-3 nats and every token was written by the weights of that
step; the server is back within the run, and in each step that begins after that it writes at least a tenth of the
tokens; afterwards no process is left, and in /dev/shm nothing of what processes of this run were seen to hold there.
Told besides: seconds of each step, how long the engine was away, and addresses beyond loopback on which anything
listened. On two cores the recipe's five RL steps are over before a server has started anew, and how long that takes
depends on what else the machine does. So the stage is ended by hand when two steps have begun and ended since the
server was back, after five at the least and --steps at the most. Prints a table, and last one JSON line; exit code 1
where a check fails. Settings change the recipe, as model.hidden_size=96.
Needs psutil, Ray and ROCSTAR_VLLM_PYTHON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from frame import ROOT, Table, environment, marked, parser, read_rows, report, rocstar

MARK = "ROCSTAR_REHEARSAL"  # variable that every process of the run inherits
GAP = 1e-3  # nats
SHARE = 1 / 3  # of a step's tokens, after which it is in its middle
SERVED = 0.1  # of a step's tokens, from which on a server does its part; one of two equal ones writes about half
ENGINE, SANDBOX = "rocstar_vllm_serve.py", "sandbox serve"
LEAST_STEPS, STEPS_AFTER = 5, 2  # in all; those that a server must do its part of after it is back
LOOK_SECONDS = 0.05
LOOK_CLOSELY_SECONDS = 1.0  # between two looks at the servers' tokens and at all maps of the run's processes
IN_MEMORY = re.compile(r"/dev/shm/[^/\s]+")
LEFT_SECONDS = 30.0  # for what ends with the run to end


class Kill(NamedTuple):
    what: str
    step: int
    """Of RL, from 1."""
    tokens: int
    """That the engines had produced in it."""
    running: int
    """Requests that the servers were decoding."""


class Step(NamedTuple):
    number: int
    seconds: float
    attempts: int
    missing: int
    twice: int
    failed: int
    """Ended by faults of ours."""
    of_other_weights: int
    """Tokens that other weights wrote than those that the step began with."""
    gap: float | None
    """Mean and largest difference of log-probabilities, nats; None where no attempt was kept to learn from."""
    gap_max: float | None
    moved: int
    """Turns begun again on another engine."""
    lost: int
    back: int


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary) / "runs"
        figures = rehearsed(folder, options)
    report(**figures)
    raise SystemExit(0 if figures["passed"] else 1)


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=60, help="of RL, at the most")
    arguments.add_argument(
        "--engine-step", type=int, default=2, help="RL step in which a vLLM server is killed; 0: none"
    )
    arguments.add_argument("--sandbox-step", type=int, default=3, help="RL step in which a service is killed; 0: none")
    arguments.add_argument("--keep", help="folder in which the run stays")
    arguments.add_argument("settings", nargs="*")
    return arguments.parse_args()


def rehearsed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    mark, began = secrets.token_hex(8), time.monotonic()
    recipe = ["recipes/rehearsal.toml", f"run.folder={folder}", f"stage.rl.steps={options.steps}", *options.settings]
    outside = environment(**{MARK: mark})
    process = subprocess.Popen(rocstar("train", *recipe), cwd=ROOT, env=outside, stdout=sys.stderr)
    run = folder / "rehearsal"
    watcher = Watcher(run, mark, lambda: process.poll() is None)
    kills = []
    try:
        victims = ((options.engine_step, ENGINE), (options.sandbox_step, SANDBOX))
        for step, what in sorted(victims):
            if step:
                kills += watcher.kill_in_the_middle(what, step)
        open_to_others = watcher.listening_beyond_loopback()
        watcher.look_until_it_ends(lambda rows: is_enough(rows, killed=bool(options.engine_step)))
    finally:
        process.terminate()
        process.wait()
    steps = list(steps_of(run)) if run.exists() else []
    left = left_over(mark)
    files = sorted(file for file in watcher.memory if Path(file).exists())
    lost, back = happened(run, "engine_lost"), happened(run, "engine_back")
    shares = [share for event in back for share in shares_after(event["url"], steps, watcher.written)]
    say(steps, kills)
    wanted = sum(bool(step) for step in (options.engine_step, options.sandbox_step))
    checks = {
        "run_ended_well": process.returncode == 0,
        "kills_in_mid_step": len(kills) == wanted,
        "every_attempt_once": bool(steps) and not any(step.missing or step.twice for step in steps),
        "no_fault_of_ours": not any(step.failed for step in steps),
        "gap_below_1e-3": bool(steps) and all(step.gap_max is not None and step.gap_max < GAP for step in steps),
        "tokens_of_the_step's_weights": bool(steps) and not any(step.of_other_weights for step in steps),
        "the_death_was_seen": len(lost) == bool(options.engine_step),
        "the_engine_came_back": len(back) == len(lost) and sum(step.back for step in steps) == len(lost),
        "it_served_again": bool(shares) == bool(options.engine_step) and all(share >= SERVED for share in shares),
        "nothing_left": not left and not files,
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "steps": [step._asdict() for step in steps],
        "kills": [kill._asdict() for kill in kills],
        "gap_max": max((step.gap_max for step in steps if step.gap_max is not None), default=None),
        "engine_away_seconds": [event["seconds"] for event in back],
        "engine_shares_after": [round(share, 3) for share in shares],
        "engine_restarts_that_failed": [event["reason"] for event in happened(run, "engine_still_out")],
        "left_processes": left,
        "left_shared_memory": files,
        "listening_beyond_loopback": open_to_others,
        "seconds": round(time.monotonic() - began, 1),
    }


# -- the run under way ------------------------------------------------------------------------------------------------


class Watcher:
    """Sees a run through its folder, its processes, and what its servers say of themselves."""

    def __init__(self, run: Path, mark: str, alive: Callable[[], bool]) -> None:
        self._run, self._mark, self._alive = run, mark, alive
        self._http = httpx.Client(trust_env=False, timeout=5)
        self.memory: set[str] = set()
        """Entries of /dev/shm that processes of the run were seen to hold."""
        self.written: Counter[tuple[str, int]] = Counter()
        """Tokens by server and RL step, as seen each second."""
        self._produced_before: dict[str, int] = {}
        self._looked = 0.0

    def kill_in_the_middle(self, what: str, step: int) -> Iterator[Kill]:
        """Nothing where the step was over before its middle was seen."""
        while not self._is_under_way(step):
            if not self._alive():
                return
            self._look()
            time.sleep(LOOK_SECONDS)
        servers = self._servers()
        before, expected = self._produced(servers), self._tokens_of(step - 1)
        while self._is_under_way(step) and self._alive():
            now = self._produced(servers)
            tokens = sum(count - before[url][0] for url, (count, _) in now.items() if url in before)
            running = {url: running for url, (_, running) in now.items()}
            self._look()
            if tokens > SHARE * expected and any(running.values()):
                busiest = servers[max(running, key=lambda url: running[url])]
                victim = busiest if what == ENGINE else self._processes(what)[0]
                victim.kill()
                yield Kill(what, step, tokens, sum(running.values()))
                return
            time.sleep(LOOK_SECONDS)

    def look_until_it_ends(self, is_enough: Callable[[Sequence[Mapping[str, Any]]], bool]) -> None:
        """is_enough: of the RL steps' metrics, whether the stage may end."""
        from rocstar.errors import ConfigError
        from rocstar.record.folder import RunFolder

        asked = False
        while self._alive():
            self._look()
            if not asked and is_enough(rl_rows(self._run)):
                with suppress(ConfigError):  # it has ended meanwhile
                    RunFolder(self._run).request_end()
                asked = True
            time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        """Once a second, at /dev/shm, because a server that is killed leaves there what it held, and at tokens."""
        if time.monotonic() - self._looked >= LOOK_CLOSELY_SECONDS:
            self._looked = time.monotonic()
            for process in marked(MARK, self._mark):
                self.memory |= held_in_memory(process.pid)
            self._count_tokens(len(rl_rows(self._run)) + 1)

    def _count_tokens(self, step: int) -> None:
        for url, (tokens, _) in self._produced(self._servers()).items():
            self.written[url, step] += tokens - self._produced_before.get(url, 0)
            self._produced_before[url] = tokens

    def _is_under_way(self, step: int) -> bool:
        """Attempts of RL step `step` are made, or it learns."""
        begun = any(event.get("kind") == "rl" for event in read_rows(self._run / "events.jsonl"))
        return begun and len(rl_rows(self._run)) == step - 1

    def _tokens_of(self, step: int) -> float:
        return sum(row["step/tokens"] for row in rl_rows(self._run) if row["stage_step"] == step)

    def listening_beyond_loopback(self) -> list[str]:
        found = {
            f"{name(process)} {connection.laddr.ip}"
            for process in marked(MARK, self._mark)
            for connection in connections(process)
            if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip)
        }
        return sorted(found)

    def _processes(self, what: str) -> list[psutil.Process]:
        return [process for process in marked(MARK, self._mark) if what in " ".join(process.cmdline())]

    def _servers(self) -> dict[str, psutil.Process]:
        """vLLM servers by address."""
        found = {}
        for process in self._processes(ENGINE):
            words = dict(word.partition("=")[::2] for word in process.cmdline())
            found[f"http://{words['--host']}:{words['--port']}"] = process
        return found

    def _produced(self, servers: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Tokens so far and requests that decode, by address; of those that answer."""
        from rocstar.engines.vllm_client import read_metrics
        from rocstar.errors import EngineUnavailable

        found = {}
        for url in servers:
            with suppress(httpx.HTTPError, EngineUnavailable):
                metrics = read_metrics(self._http.get(f"{url}/metrics").text, url)
                found[url] = metrics.produced_tokens, metrics.running
        return found


def connections(process: psutil.Process) -> Sequence[Any]:
    try:
        return process.net_connections()
    except psutil.Error:
        return ()


def name(process: psutil.Process) -> str:
    return " ".join(Path(word).name for word in process.cmdline()[:3])[:60] or process.name()


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


# -- what is left of it -----------------------------------------------------------------------------------------------


def rl_rows(run: Path) -> list[dict[str, Any]]:
    """Metrics of the RL steps that are done."""
    return [row for row in read_rows(run / "metrics.jsonl") if row["stage"] == "rl"]


def is_enough(rows: Sequence[Mapping[str, Any]], *, killed: bool) -> bool:
    """Whether these RL steps show what is to be shown, a killed server's return where there is one."""
    after = itertools.islice(itertools.dropwhile(lambda row: killed and not row["engine/back"], rows), 1, None)
    return len(rows) >= LEAST_STEPS and len(list(after)) >= STEPS_AFTER


def steps_of(run: Path) -> Iterator[Step]:
    import pyarrow.parquet as parquet

    asked = json.loads((run / "config.resolved.json").read_text())
    stage = next(stage for stage in asked["stage"] if stage["kind"] == "rl")
    wanted = stage["rollout"]["problems_per_step"] * stage["rollout"]["attempts_per_problem"]
    for row in rl_rows(run):
        columns = ["problem_id", "index", "stop", "policy_version", "turns"]
        file = run / "rollouts" / f"step={row['step']:06d}.parquet"
        attempts = parquet.read_table(file, columns=columns).to_pylist()
        counts = Counter((attempt["problem_id"], attempt["index"]) for attempt in attempts)
        yield Step(
            number=row["stage_step"],
            seconds=round(row["step/seconds"], 1),
            attempts=len(attempts),
            missing=wanted - len(counts),
            twice=sum(count > 1 for count in counts.values()),
            failed=sum(attempt["stop"] == "environment_failed" for attempt in attempts),
            of_other_weights=sum(map(of_other_weights, attempts)),
            gap=row.get("policy/logprob_gap"),
            gap_max=row.get("policy/logprob_gap_max"),
            moved=int(row["engine/moved_turns"] + row["engine/repeated_turns"]),
            lost=int(row["engine/lost"]),
            back=int(row["engine/back"]),
        )


def of_other_weights(attempt: Mapping[str, Any]) -> int:
    """Tokens of an attempt that were not written by the weights that learn from it."""
    spans = (span for turn in json.loads(attempt["turns"]) for span in turn["version_spans"])
    return sum(tokens for version, tokens in spans if version != attempt["policy_version"])


def shares_after(url: str, steps: Sequence[Step], written: Mapping[tuple[str, int], int]) -> Iterator[float]:
    """What the server at `url` wrote of all tokens of each step that began after it was back."""
    for step in itertools.islice(itertools.dropwhile(lambda step: not step.back, steps), 1, None):
        total = sum(tokens for (_, number), tokens in written.items() if number == step.number)
        yield written[url, step.number] / max(1, total)


def happened(run: Path, what: str) -> list[dict[str, Any]]:
    """Events of a kind."""
    return [event for event in read_rows(run / "events.jsonl") if event["event"] == what]


def left_over(mark: str) -> list[str]:
    """Processes of the run that do not end after it."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := marked(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"{process.pid} {name(process)}" for process in left]


def held_in_memory(pid: int) -> set[str]:
    """What a process maps or has open in /dev/shm, with the folder where it is a file in one."""
    found: set[str] = set()
    with suppress(OSError):  # it has ended meanwhile
        place = Path("/proc", str(pid))
        found.update(IN_MEMORY.findall((place / "maps").read_text()))
        for link in (place / "fd").iterdir():
            with suppress(OSError):
                found.update(IN_MEMORY.findall(os.readlink(link)))
    return found


def say(steps: Sequence[Step], kills: Sequence[Kill]) -> None:
    for what, step, tokens, running in kills:
        print(f"kill -9 of {what} in step {step}, at {tokens} tokens with {running} requests running")
    table = Table(*Step._fields, first=8)
    for each in steps:
        table.row(*each)


if __name__ == "__main__":
    main()
