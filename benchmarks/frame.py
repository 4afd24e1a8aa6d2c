"""What the benchmarks share: arguments, data, CPU, rounds by turns, tables, the JSON line, children, tiny models.

Importing it loads nothing of rocstar, because some benchmarks then run rocstar from another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 180.0  # in which a service has to answer
T = TypeVar("T")
S = TypeVar("S")


def parser(text: str | None) -> argparse.ArgumentParser:
    """With a module's docstring as its help."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


# -- data ------------------------------------------------------------------------------------------------------------


def data_folder(part: str = "") -> Path:
    """A part of $ROCSTAR_DATA, or of ../shared/data beside this checkout. Ends with code 3 where it is absent."""
    folder = Path(os.environ.get("ROCSTAR_DATA", ROOT.parent / "shared" / "data")) / part
    if not folder.is_dir():
        print(f"there is no data in {folder}; set ROCSTAR_DATA to the data folder", file=sys.stderr)
        raise SystemExit(3)
    return folder


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Of a JSONL file, plain or gzip; none where it is absent. A last line that is still being written is left out."""
    if not path.exists():
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.endswith("\n"))


# -- CPU -------------------------------------------------------------------------------------------------------------


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(*pids: int) -> float:
    """CPU of these trees so far, of processes they have reaped included; each process counts in steps of 10 ms."""
    total = 0.0
    for process in (process for pid in pids for process in tree(pid)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


@dataclass(slots=True)
class Spent:
    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def spent(cpu: Callable[[], float] = time.process_time) -> Iterator[Spent]:
    """Seconds that the block takes, known when it is over. cpu: whose CPU counts; this process alone by default."""
    seconds = Spent()
    wall_before, cpu_before = time.monotonic(), cpu()
    yield seconds
    seconds.wall, seconds.cpu = time.monotonic() - wall_before, cpu() - cpu_before


# -- rounds ----------------------------------------------------------------------------------------------------------


def by_turns(contestants: Mapping[str, Callable[[], T]], rounds: Iterable[object]) -> list[dict[str, T]]:
    """What each contestant says in each round. Every round begins with another one: none always follows the same."""
    names = list(contestants)
    found = []
    for number, _ in enumerate(rounds):
        start = number % len(names)
        done = {name: contestants[name]() for name in [*names[start:], *names[:start]]}
        found.append({name: done[name] for name in names})
    return found


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """Median, least, most."""
    return [round(figure(values), digits) for figure in (median, min, max)]


async def at_once(limit: int, work: Callable[[S], Awaitable[T]], items: Iterable[S]) -> list[T]:
    """The work on all items, at most so many at a time."""
    turns = asyncio.Semaphore(limit)

    async def one(item: S) -> T:
        async with turns:
            return await work(item)

    return await asyncio.gather(*map(one, items))


# -- what is printed -------------------------------------------------------------------------------------------------


class Table:
    """Prints its head at once and a row when it comes; the first column to the left, the others to the right."""

    def __init__(self, *columns: str, first: int = 24, width: int = 0) -> None:
        """first, width: letters of the first column, and of each other at the least."""
        self._widths = [first, *(max(width, len(column) + 2, 11) for column in columns[1:])]
        self.row(*columns)

    def row(self, *cells: object) -> None:
        texts = [shown(cell) for cell in cells]
        rest = (f"{cell:>{width}}" for cell, width in zip(texts[1:], self._widths[1:], strict=True))
        print(f"{texts[0]:{self._widths[0]}}" + "".join(rest), flush=True)


def print_rows(rows: Sequence[Mapping[str, Any]], first: int = 24) -> None:
    """A table of mappings with the same keys."""
    table = Table(*rows[0], first=first)
    for row in rows:
        table.row(*row.values())


def shown(cell: object) -> str:
    if isinstance(cell, bool | str):
        return str(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    return "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def print_figures(figures: Mapping[str, Any]) -> None:
    """One a line; those of a mapping below its name."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            print(name.replace("_", " "), *(f"  {key!s:<42}{shown(each):>12}" for key, each in value.items()), sep="\n")
        else:
            print(f"{name.replace('_', ' '):<44}{shown(value):>12}")


def report(**figures: Any) -> None:
    """The last line: figures as JSON, with the benchmark's name and what it ran on."""
    about = {"benchmark": Path(sys.argv[0]).stem, "python": platform.python_version(), "cores": os.cpu_count()}
    print(json.dumps({**about, **figures}))


# -- children --------------------------------------------------------------------------------------------------------


def rocstar(*words: str) -> list[str]:
    """The command, of this checkout where the child has `environment()`."""
    return [sys.executable, "-c", "from rocstar.__main__ import main; main()", *words]


def environment(**more: str) -> dict[str, str]:
    """Of a child that runs this checkout's rocstar."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def run_cell(folder: Path, verb: str, recipe: str, settings: Sequence[str]) -> None:
    """One run in a process of its own; nothing when it is already there. Raises CalledProcessError, and SystemExit
    where it is there with other settings."""
    if (folder / "summary.json").exists():
        require_settings(folder, settings)
        return
    print(f"running {folder.name}", file=sys.stderr, flush=True)
    names = [f"run.folder={folder.parent}", f"run.name={folder.name}"]
    command = rocstar(verb, recipe, *names, *settings, "--json")
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)


def require_settings(run: Path, settings: Sequence[str]) -> None:
    """Raises SystemExit where a run was made without these settings."""
    made_with = json.loads((run / "run.json").read_text())["argv"]
    if other := [setting for setting in settings if setting not in made_with]:
        raise SystemExit(f"{run} is of other settings: it was made without {', '.join(other)}; give another --out")


def newest_model(run: Path) -> Path:
    return max(run.glob("checkpoints/step=*")) / "model"


def slug(name: str) -> str:
    """As part of a folder's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Every other process with this in its environment, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int, answers: Callable[[], bool], **more: Any) -> Iterator[int]:
    """A service as a child, from its first answer on; its process id. Ends this process where it does not answer."""
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, **more)
    try:
        until = time.monotonic() + START_SECONDS
        while not answered(answers):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} ended, or did not answer within {START_SECONDS:.0f} seconds")
            time.sleep(0.005)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def answered(answers: Callable[[], bool]) -> bool:
    with suppress(OSError, EOFError):
        return answers()
    return False


def of_child(*words: object) -> Any:
    """What this benchmark prints last, as JSON, when a process of its own runs it with these arguments. Ends this
    process where that one fails."""
    command = [sys.executable, sys.argv[0], *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes(pid: int | str = "self") -> int:
    """Of a process's resident set."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Worker:
    """A child that stays and answers a line for a line."""

    def __init__(self, command: Sequence[str], **more: Any) -> None:
        self.command = command
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """The end of its input ends it."""
        self.process.communicate()

    def ask(self, line: str) -> str:
        with suppress(BrokenPipeError):  # `line` says that it has ended
            print(line, file=self.process.stdin, flush=True)
        return self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            code = self.process.wait()
            raise SystemExit(f"a contestant ended with {code}; its words stand above: {' '.join(self.command)}")
        return line


# -- models ----------------------------------------------------------------------------------------------------------


def qwen3(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any) -> Any:
    """A Qwen3 with random weights, the same each time, and heads of its width / heads. more: of its config."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
    }
    fixed = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**settings, **{**fixed, **more})).eval()
