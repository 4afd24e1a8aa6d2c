"""Published programs of real models, replayed: all code blocks of the MathCoder and ToRA traces, outputs compared with
the recorded ones. Prints the agreement, the rest by cause, speed and CPU over this mix, and last one JSON line.

The traces lie in traces/ of ../shared/data or of $ROCSTAR_DATA. Each trace is one session of the sandbox, each code
block one cell of it; MathCoder's were recorded in Jupyter (Python 3.9 and the sympy of 2023). What counts as equal: see
`agreement`.

    nice -n 10 python benchmarks/sandbox_replay.py [--every 1] [--slots 2] [--show 3]
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from frame import at_once, data_folder, parser, print_figures, read_rows, report, spent

from rocstar.sandbox.call import Limits, ProgramOutcome, Response
from rocstar.sandbox.client import SandboxClient

PRELOAD = ("numpy", "sympy")
# For each cell. Jupyter's own time limit is not recorded; what passes this was an endless loop, or sympy at work.
LIMITS = Limits(wall_seconds=5.0, cpu_seconds=10.0, output_bytes=2**20)
IN_FLIGHT = 8  # sessions; more than slots, so that none of those waits for us

TIME_LIMITS = ("CellTimeout", "TimeoutError", "Timeout waiting for reply")  # ours first
COLOURS = re.compile(r"\x1b?\[[0-9;]*m")
ERROR_LINE = re.compile(r"^ ?(?:[a-z_]\w*\.)*([A-Z]\w+)(?::|$)", re.MULTILINE)
SHORT_ERROR = re.compile(r"[\w.]*(?:Error|Exception)(?:: [^\n]*)?\n?")  # ToRA's way to tell of one
RANDOM, ADDRESS = re.compile(r"\brandom\b"), re.compile(r"\b0x[0-9a-f]{6,}")
NOTHING = "<empty_execution>"  # how MathCoder recorded a cell that showed nothing
TRACEBACK = re.compile(r"^-{20,}\s+([A-Za-z]\w*(?: waiting for reply)?)\s+Traceback")
TORA_BLOCK = re.compile(r"```python\n(.*?)```\s*```output\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one cell shows here."""

    text: str
    """What it printed, then its last value."""
    warnings: str = ""
    """What it wrote to stderr."""
    error: str = ""
    """Class of what it raised; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    name: str
    """File and number of its row, 1 is the first."""
    cells: tuple[str, ...]
    """Python sources, in order."""
    recorded: tuple[str, ...]
    """What each cell showed when the trace was made: one text, prints, last value and traceback together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    trace: Trace
    responses: tuple[Response, ...]
    shown: tuple[Shown, ...]
    """By each cell here."""
    how: tuple[str, ...]
    """In which way each cell agrees; empty for one that does not. See `agreement`."""


def traces(folder: Path) -> Iterator[Trace]:
    """Those with at least one cell."""
    for path in sorted([*folder.glob("mathcoder/*.jsonl.gz"), *folder.glob("tora/*.jsonl.gz")]):
        read = mathcoder_cells if path.parent.name == "mathcoder" else tora_cells
        for number, row in enumerate(read_rows(path), 1):
            if pairs := read(row):
                cells, recorded = zip(*pairs, strict=True)
                yield Trace(name=f"{path.name.partition('.jsonl')[0]}:{number}", cells=cells, recorded=recorded)


def mathcoder_cells(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    messages = row["debug_result"]
    pairs = itertools.pairwise(messages)
    return [(code["content"], after["content"]) for code, after in pairs if code["role"] == "code"]


def tora_cells(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [found for text in row["code"] for found in TORA_BLOCK.findall(text)]


def agreement(recorded: str, shown: Shown) -> str:
    """In which way they agree, empty if they do not: `error` (of the same class; any two time limits are one class),
    `output` (equal but for white space), `warnings` (the same with what was written to stderr before it), `set order`
    (equal but for the order of sets, which IPython's printer sorts and repr does not)."""
    raised = error_of(recorded)
    if raised or shown.error:
        return "error" if raised == as_class(shown.error) else ""
    wanted = squeezed("" if recorded == NOTHING else recorded)
    if wanted == squeezed(shown.text):
        return "output"
    if shown.warnings and wanted == squeezed(shown.warnings + shown.text):
        return "warnings"
    order = sorted_sets(recorded)
    return "set order" if order and order == sorted_sets(shown.text) else ""


def error_of(recorded: str) -> str:
    """Class of the error a recorded output tells of, of a chain the last one; empty if none."""
    plain = COLOURS.sub("", recorded)
    heading = TRACEBACK.match(plain)
    if heading or plain.startswith("Cell In[") or SHORT_ERROR.fullmatch(plain):
        named = ERROR_LINE.findall(plain) or [heading[1] if heading else ""]
        return as_class(named[-1])
    return ""


def as_class(error: str) -> str:
    return "time limit" if error in TIME_LIMITS else error.rpartition(".")[2]


def squeezed(text: str) -> str:
    return "".join(text.split())


def sorted_sets(text: str) -> str:
    """The text as an expression whose sets are in order; empty when it is none or has none."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    sets = [node for node in ast.walk(tree) if isinstance(node, ast.Set)]
    for node in reversed(sets):  # inner ones first
        node.elts.sort(key=ast.dump)
    return ast.dump(tree) if sets else ""


def cause(recorded: str, shown: Shown, code: str, *, follows: bool) -> str:
    """Why a cell that differs does, as far as texts tell; the first that holds. code: of the cell and of those before
    it; follows: one of those differs too."""
    reasons = {
        "recorded: Jupyter gave up waiting": error_of(recorded) == "time limit",
        "our time limit for a cell": as_class(shown.error) == "time limit",
        "ended by a limit of the sandbox": shown.error.startswith("program:"),
        "library not installed": shown.error == "ModuleNotFoundError",
        "follows a cell that differs": follows,
        "recorded: a complaint of IPython itself": "The history saving thread" in recorded,
        "randomness or an address in memory": bool(RANDOM.search(code) or ADDRESS.search(recorded)),
        "other numpy: its scalars show their type": "np." in shown.text,
        "written to stderr": bool(shown.warnings),
        "recorded output was cut": is_cut(recorded, shown),
        "other sympy": "sympy" in code,
    }
    return next((name for name, holds in reasons.items() if holds), "other")


def is_cut(recorded: str, shown: Shown) -> bool:
    wanted, whole = squeezed(recorded).removesuffix("..."), squeezed(shown.text)
    return bool(wanted) and whole.startswith(wanted) and len(wanted) < len(whole)


def shown_by(response: Response) -> Shown:
    """What a notebook would show of this cell. Values are laid out by `repr`: IPython's printer differs from it in
    white space and in the order of sets only, which the comparison allows for."""
    stderr = response.stderr.partition("Traceback (most recent call last):")[0]
    return Shown(text=response.stdout + (response.value or ""), warnings=stderr, error=error_by(response))


def error_by(response: Response) -> str:
    """Class of what the cell raised, or what ended it; empty when nothing did."""
    if response.outcome is ProgramOutcome.OK:
        return ""
    if response.outcome in (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT):
        return TIME_LIMITS[0]
    return response.exception.type if response.exception else f"program: {response.outcome}"


async def replay(client: SandboxClient, chosen: Sequence[Trace]) -> list[Run]:
    async def one(numbered: tuple[int, Trace]) -> Run:
        number, trace = numbered
        async with client.open_session(limits=LIMITS, seed=number) as session:
            responses = [await session.run(code) for code in trace.cells]
        shown = tuple(map(shown_by, responses))
        how = tuple(map(agreement, trace.recorded, shown))
        return Run(trace=trace, responses=tuple(responses), shown=shown, how=how)

    return await at_once(IN_FLIGHT, one, enumerate(chosen))


def why(run: Run, index: int) -> str:
    """See `cause`."""
    code, follows = "\n".join(run.trace.cells[: index + 1]), not all(run.how[:index])
    return cause(run.trace.recorded[index], run.shown[index], code, follows=follows)


def figures(runs: Sequence[Run], cpu_seconds: float, wall_seconds: float) -> dict[str, Any]:
    hows = Counter(how for run in runs for how in run.how)
    causes = Counter(why(run, index) for run in runs for index, how in enumerate(run.how) if not how)
    cells, agreed = hows.total(), hows.total() - hows[""]
    # Endless loops cost what their limit is, which tells nothing about the sandbox.
    loops = [run for run in runs if any(as_class(shown.error) == "time limit" for shown in run.shown)]
    rest_cpu = cpu_seconds - sum(response.cpu_seconds for run in loops for response in run.responses)
    rest = cells - sum(len(run.how) for run in loops)
    return {
        "traces": len(runs),
        "cells": cells,
        "agreed": agreed,
        "agreed_percent": round(100 * agreed / cells, 2),
        "agreed_by": {how: count for how, count in hows.most_common() if how},
        "differ_by_cause": dict(causes.most_common()),
        "cells_per_second": round(cells / wall_seconds, 1),
        "sessions_per_second": round(len(runs) / wall_seconds, 1),
        "cells_replayed": sum(response.replayed_cells for run in runs for response in run.responses),
        "cpu_ms_per_cell": round(1000 * cpu_seconds / cells, 2),
        "cpu_ms_per_session": round(1000 * cpu_seconds / len(runs), 2),
        "sessions_with_endless_loops": len(loops),
        "cpu_ms_per_cell_of_others": round(1000 * rest_cpu / rest, 2) if rest else 0.0,
    }


def show(runs: Sequence[Run], most: int) -> None:
    """Up to so many cells of each cause, the first that differs in its trace."""
    seen: Counter[str] = Counter()
    for run in runs:
        index = next((index for index, how in enumerate(run.how) if not how), None)
        if index is None:
            continue
        reason, shown = why(run, index), run.shown[index]
        seen[reason] += 1
        if seen[reason] <= most:
            ours = f"{shown.error or shown.text!r:.110}"
            recorded = error_of(run.trace.recorded[index]) or repr(run.trace.recorded[index])[:110]
            print(f"  {reason}: {run.trace.name} cell {index + 1}\n    recorded {recorded}\n    here     {ours}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--every", type=int, default=1, help="replay one trace in so many")
    arguments.add_argument("--slots", type=int, default=2)
    arguments.add_argument("--show", type=int, default=3, help="cells of each cause to print")
    options = arguments.parse_args()
    chosen = list(traces(data_folder("traces")))[:: options.every]
    with SandboxClient.start(slots=options.slots, preload=PRELOAD) as client:
        level = client.info().isolation
        with spent(lambda: client.usage().cpu_seconds + time.process_time()) as seconds:
            runs = asyncio.run(replay(client, chosen))
    found = figures(runs, seconds.cpu, seconds.wall)
    print_figures(found)
    show(runs, options.show)
    versions = {name: metadata.version(name) for name in PRELOAD}
    report(**versions, isolation=level, slots=options.slots, **found)


if __name__ == "__main__":
    main()
