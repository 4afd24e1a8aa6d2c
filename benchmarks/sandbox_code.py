"""Real programs, each once in the sandbox and once under bare Python: what differs? Prints a table by source, every
difference, and last one JSON line.

Programs: reference solutions of HumanEval and MBPP with their tests (do they pass?), programs of published models
(MathCoder, ToRA, Program of Thoughts, PAL) and of GSM-Hard, tests of CPython, examples in docstrings of installed
libraries. The same text twice is one program. The data lies in ../shared/data or in $ROCSTAR_DATA.

Bare Python is `python -P -s FILE` in an empty folder, with the sandbox's environment and hash seed and without stdin
(`bare_python.py`, a fork of a warm one at first). Compared are stdout, how it ended (exit status or signal, two time
limits are one), and the exception as the end of stderr tells it. What differs is run again: twice under an interpreter
started for it, once in the sandbox, all with more time. Programs whose two bare runs differ are set aside.

    nice -n 10 python benchmarks/sandbox_code.py [--only MBPP ...] [--every 1] [--slots 2] [--minutes M]
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frame import Worker, at_once, data_folder, parser, print_rows, read_rows, report
from sandbox_replay import traces

from rocstar.sandbox.call import Call, Limits, ProgramOutcome, Response
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.daemon import ENVIRONMENT

LOADED = ((), ("numpy",), ("numpy", "sympy", "mpmath", "networkx"))
"""By the interpreters that programs are forked from; the first that has what a program names is taken."""
CPU_SECONDS, AGAIN_CPU_SECONDS, WALL_SECONDS = 3, 20, 60  # a busy machine must not fail a right program
MEMORY_BYTES = 4 * 2**30
PASSED = "every test passed"
TIME = "time limit"
SUGGESTION = re.compile(r"\. Did you mean: '.*'\?$")
"""Before Python 3.12 only the interpreter's own printer has it, so it is not compared."""
# They build, install or start whole other Pythons, or need a debugger or a screen.
LEFT_OUT = re.compile(r"regrtest|venv|gdb|cppext|peg_gen|multiproc|concurrent_f|tools|idle|ensurepip|tk|turtle|winreg")
MATHS = "from sympy import *\ndef solve_it(*given):\n    return (solve(*given, dict=True) or [{}])[0]\n"
CPYTHON_TEST = """import sys, unittest
from test import support
support.use_resources = []
result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromName({name!r}).run(result)
print(result, [reason for _, reason in result.skipped])
print(*[text.splitlines()[-1] for _, text in result.errors + result.failures], sep="\\n")
sys.exit(not result.wasSuccessful())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a program ended, and what it printed until then."""

    stdout: str
    ended: str
    """Exit status, signal, or the limit that ended it."""
    said: str
    """Of an exit status of 1: the last lines of stderr, which name the exception."""

    def is_like(self, other: End) -> bool:
        return self == other or self.ended == other.ended == TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    code: str
    here: End
    """In the sandbox."""
    bare: End
    again: bool = False
    """Whether these are of the second try."""
    varies: bool = False
    """Whether two bare runs differ."""


def end(stdout: str, stderr: str, ended: str) -> End:
    lines = stderr.rstrip().splitlines()
    indented = (number for number, line in enumerate(lines, 1) if line.startswith(" "))
    said = "\n".join(lines[max(indented, default=0) :]) if ended == "1" else ""
    return End(stdout=stdout, ended=ended, said=said if sys.version_info >= (3, 12) else SUGGESTION.sub("", said))


# -- programs --------------------------------------------------------------------------------------------------------


def solutions(file: str) -> Iterator[str]:
    """Of HumanEval or MBPP, each with its tests; a mark behind the last one tells that all were reached."""
    for row in read_rows(data_folder("code_exec") / file):
        if "entry_point" in row:
            tested = f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\ncheck({row['entry_point']})"
        else:  # the challenge tests, which a few problems have, included
            tested = "\n".join([row["code"], row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]])
        yield f"{tested}\nprint({PASSED!r})\n"


def recorded() -> Iterator[str]:
    """All cells of each trace of MathCoder and ToRA."""
    return ("\n".join(trace.cells) for trace in traces(data_folder("traces")))


def thoughts() -> Iterator[str]:
    """Program of Thoughts: they leave the answer in `ans`, and some expect sympy's names and a `solve_it`."""
    for path in sorted(data_folder("traces").glob("pot/*.jsonl.gz")):
        for row in read_rows(path):
            found = row.get("generated", [])
            for code in [found] if isinstance(found, str) else found:
                yield f"{MATHS if 'solve_it' in code or 'Symbol' in code else ''}{code}\nprint(ans)\n"


def functions() -> Iterator[str]:
    """GSM-Hard and the first one of each text of PAL: a function `solution`."""
    for row in read_rows(data_folder("eval_math") / "gsm_hard.jsonl.gz"):
        yield f"{row['code']}\nprint(solution())\n"
    for path in data_folder("traces").glob("pal/*.jsonl.gz"):
        for row in read_rows(path):
            yield f"{row['generated_answer'].partition('Question:')[0]}\nprint(solution())\n"


def cpython_tests() -> Iterator[str]:
    """Single methods of the interpreter's own tests, where they are installed."""
    spec = find_spec("test")
    for path in sorted(Path(spec.origin).parent.glob("test_*.py")) if spec and spec.origin else ():
        if not LEFT_OUT.search(path.name):
            for case in nodes(path, ast.ClassDef):
                if any("TestCase" in ast.unparse(base) for base in case.bases):
                    for method in (each.name for each in case.body if isinstance(each, ast.FunctionDef)):
                        if method.startswith("test"):
                            yield CPYTHON_TEST.format(name=f"test.{path.stem}.{case.name}.{method}")


def examples(module: str, first: str = "") -> Iterator[str]:
    """Of each docstring below a package, or beside a module: its examples as at a prompt, but those that raise.
    first: what they take as given; `*` is all names of their module."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & {*inside.parts}:
            continue
        given = f"from {'.'.join(inside.with_suffix('').parts)} import *" if first == "*" else first
        for node in nodes(path, ast.Module, ast.ClassDef, ast.FunctionDef):
            text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
            try:
                found = [each.source for each in doctest.DocTestParser().get_examples(text) if not each.exc_msg]
            except ValueError:
                continue  # not well formed
            if found:
                yield "\n".join([given, *(f"exec(compile({each!r}, '<example>', 'single'))" for each in found)]) + "\n"


def nodes(path: Path, *kinds: type[ast.AST]) -> Iterator[Any]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


SOURCES: Mapping[str, tuple[int, Callable[[], Iterable[str]]]] = {
    "HumanEval": (1, lambda: solutions("HumanEval.jsonl.gz")),
    "MBPP": (1, lambda: solutions("mbpp.jsonl.gz")),
    "GSM-Hard, PAL": (1, functions),
    "MathCoder, ToRA": (1, recorded),
    "Program of Thoughts": (1, thoughts),
    "examples of Python": (1, lambda: examples("doctest", "*")),
    "examples of numpy": (1, lambda: examples("numpy", "import numpy as np")),
    "examples of sympy": (1, lambda: examples("sympy")),
    "examples of mpmath": (1, lambda: examples("mpmath", "from mpmath import *")),
    "examples of networkx": (1, lambda: examples("networkx", "import networkx as nx")),
    "tests of CPython": (40, cpython_tests),
}
"""One program in so many, and where they come from. There are more of some than an hour has room for."""


# -- the two sides ---------------------------------------------------------------------------------------------------


class Bare:
    """Runs programs under bare Python, one after another."""

    def __init__(self, stack: ExitStack, loaded: Sequence[Sequence[str]] = LOADED) -> None:
        self.loaded = loaded
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-P", "-s", str(Path(__file__).with_name("bare_python.py"))]
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "LD_BIND_NOW"}
        # A session each: kernels that group by sessions then give a program what they give one in a slot.
        self.workers = [
            stack.enter_context(Worker([*command, *modules], env=environment, start_new_session=True))
            for modules in loaded
        ]

    def run(self, code: str, cpu_seconds: int, *, new: bool = False) -> End:
        file = self.folder / "program.py"
        file.write_text(code, encoding="utf-8", errors="surrogatepass")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            asked = [str(file), empty, cpu_seconds, WALL_SECONDS, new]
            named = {name for name in self.loaded[-1] if name in code}
            pairs = zip(self.workers, self.loaded, strict=True)
            worker = next(worker for worker, modules in pairs if named <= {*modules})
            status = int(worker.ask(json.dumps(asked)))
        stdout, stderr = ((self.folder / name).read_bytes().decode(errors="replace") for name in ("out", "err"))
        if os.WIFEXITED(status):
            return end(stdout, stderr, str(os.WEXITSTATUS(status)))
        name = signal.Signals(os.WTERMSIG(status)).name
        return end(stdout, stderr, TIME if name in ("SIGXCPU", "SIGKILL") else name)


async def in_sandbox(client: SandboxClient, code: str, cpu_seconds: int) -> End:
    limits = Limits(wall_seconds=WALL_SECONDS, cpu_seconds=cpu_seconds, memory_bytes=MEMORY_BYTES)
    return end_of(await client.run(Call(id="", code=code, limits=limits, seed=0)))


def end_of(response: Response) -> End:
    if response.outcome in (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT):
        ended = TIME
    elif response.exit_code is None:
        of_itself = response.signal and not response.kill_reason
        ended = str(response.signal if of_itself else response.outcome) + f" {response.message}".rstrip()
    else:
        ended = str(response.exit_code)
    return end(response.stdout, response.stderr, ended)


class Comparison:
    """Both sides of a program; as many programs at once as there are interpreters."""

    def __init__(self, client: SandboxClient, bares: Sequence[Bare], until: float) -> None:
        """until: on the monotonic clock; what is not begun by then is left out."""
        self.client = client
        self.until = until
        self.bares = list(bares)

    async def of_all(self, codes: Sequence[str]) -> list[Compared]:
        found = await at_once(len(self.bares), self.of, codes)
        return [each for each in found if each is not None]

    async def of(self, code: str) -> Compared | None:
        if time.monotonic() > self.until:
            return None
        bare = self.bares.pop()
        try:
            here = await in_sandbox(self.client, code, CPU_SECONDS)
            there = await asyncio.to_thread(bare.run, code, CPU_SECONDS)
            if here.is_like(there) or here.ended.startswith("internal"):  # which no second try excuses
                return Compared(code=code, here=here, bare=there)
            here = await in_sandbox(self.client, code, AGAIN_CPU_SECONDS)
            runs = [await asyncio.to_thread(bare.run, code, AGAIN_CPU_SECONDS, new=True) for _ in range(2)]
            return Compared(code=code, here=here, bare=runs[0], again=True, varies=not runs[0].is_like(runs[1]))
        finally:
            self.bares.append(bare)


# -- what is told ----------------------------------------------------------------------------------------------------


def figures(name: str, found: Sequence[Compared]) -> dict[str, Any]:
    """A row of the table."""
    counted = [each for each in found if not each.varies]
    return {
        "source": name,
        "programs": len(counted),
        "alike": sum(each.here.is_like(each.bare) for each in counted),
        "at second try": sum(each.again and each.here.is_like(each.bare) for each in counted),
        "time limit": sum(each.here.ended == each.bare.ended == TIME for each in counted),
        "raise": sum(each.here.ended == "1" for each in counted),
        "tests passed": sum(each.here.stdout.endswith(f"{PASSED}\n") for each in counted),
        "internal": sum(each.here.ended.startswith("internal") for each in found),
        "set aside": len(found) - len(counted),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    arguments.add_argument("--every", type=int, default=1, help="one program in so many")
    arguments.add_argument("--slots", type=int, default=2, help="of the sandbox; as many bare programs at once")
    arguments.add_argument("--minutes", type=float, default=1e9, help="end sooner, with the programs done by then")
    options = arguments.parse_args()
    chosen: dict[str, str] = {}  # program: its source
    for name in options.only:
        every, programs = SOURCES[name]
        fresh = [code for code in dict.fromkeys(programs()) if code not in chosen]
        chosen |= dict.fromkeys(fresh[:: every * options.every], name)
    with SandboxClient.start(slots=options.slots, preload=()) as client, ExitStack() as stack:
        level = client.info().isolation
        bares = [Bare(stack) for _ in range(options.slots)]
        found = asyncio.run(Comparison(client, bares, time.monotonic() + 60 * options.minutes).of_all(list(chosen)))
    rows = [figures(name, [each for each in found if chosen[each.code] == name]) for name in options.only]
    rows.append(figures("together", found))
    differ = [each for each in found if not each.varies and not each.here.is_like(each.bare)]
    print_rows(rows)
    for each in differ:
        print(f"{chosen[each.code]}\n  {each.code!r:.1000}\n  here {each.here!s:.1000}\n  bare {each.bare!s:.1000}")
    report(isolation=level, rows=rows, differ=len(differ))


if __name__ == "__main__":
    main()
