"""Why a call cannot be run, as one sentence. A call refused here never runs; one that passes is obeyed exactly."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence

from rocstar.sandbox.call import MAX_OUTPUT_BYTES, OF_LIMITS, Call, Limits

MAX_NAME = 10_000  # characters of an id; it comes back in the response
MAX_SESSION_NAME = 200  # characters
MAX_CODE = 16 * 2**20  # characters
MAX_INPUT_BYTES = 48 * 2**20  # standard input and files: they lie in a working directory of 64 MiB
MAX_FILES = 1_000  # and as many to fetch
MAX_PATHS = 100_000  # characters of all paths of `files`, or of `fetch`, together
MAX_PATH = (4_000, 255, 50)  # bytes (the kernel takes 4,095), of each name, and folders on the way
MAX_FOLDERS = 900  # with MAX_FILES below the 2,048 inodes of a working directory
OWN_NAME = ".stdin"
"""The one name in the working directory that a slot uses itself."""

BOUNDS: dict[str, tuple[float, float]] = {
    "wall_seconds": (0.01, 10**6),
    "cpu_seconds": (0.01, 10**6),
    "memory_bytes": (4 * 2**20, 2**40),  # a program starts with one, in every tier
    "output_bytes": (1, MAX_OUTPUT_BYTES),
    "processes": (1, 1024),
}
"""Smallest and largest value of each field of `Limits`."""
HARD_LIMITS = (
    ("cpu_seconds", resource.RLIMIT_CPU, "t", 1),
    ("processes", resource.RLIMIT_NPROC, "u", 2),
    ("memory_bytes", resource.RLIMIT_AS, "v", 2**30),
    ("memory_bytes", resource.RLIMIT_DATA, "d", 2**30),
)
"""(field of `Limits`, the hard limit of this user that bounds it, its letter for `ulimit`, what the sandbox itself
takes: the second after a program's last; processes of a slot; at most, addresses of Python and a tier's modules)."""
START_BYTES = 2 * 2**20  # memory that a process takes before its program runs
INPUT_COPIES = 2  # copies of a program's text, standard input and files in its process while it starts
MAX_PATIENCE_SECONDS = 10**9


def complaint(call: Call) -> str:
    """Why this call cannot be run, else empty."""
    return next(filter(None, _complaints(call)), "")


def _complaints(call: Call) -> Iterator[str]:
    if len(call.id) > MAX_NAME:
        yield f"the id is {len(call.id)} characters long; at most {MAX_NAME} are accepted"
    if len(call.code) > MAX_CODE:
        yield f"the program is {len(call.code)} characters long; at most {MAX_CODE} are accepted"
    yield of_session(call) or of_limits(call.limits) or of_machine(call.limits)
    if not 0 <= call.patience_seconds <= MAX_PATIENCE_SECONDS:
        yield f"patience_seconds must be from 0 to {MAX_PATIENCE_SECONDS}, got {call.patience_seconds}"
    files = sum(map(len, call.files.values())) + size_of(call.stdin)
    if files > MAX_INPUT_BYTES:
        yield f"files and standard input have {files} bytes together; at most {MAX_INPUT_BYTES} are accepted"
    if call.files:
        yield of_paths("files", [*call.files]) or of_tree([*map(os.path.normpath, call.files)])
    size = size_of(call.code) + files  # the process reads all of its input before its program runs
    least, limit = START_BYTES + INPUT_COPIES * size, call.limits.memory_bytes
    if limit < least:
        yield f"a call of {size} bytes needs {least} bytes of memory, and limit memory_bytes is {limit}"
    if call.fetch:
        yield of_paths("fetch", call.fetch)


def of_session(call: Call) -> str:
    if call.branches:
        if call.cell < 2:
            return "a session is forked after its first cell; run one"
        if len(set(call.branches)) < len(call.branches):
            return "two branches have the same name"
        if not all(0 < len(name) <= MAX_SESSION_NAME for name in call.branches):
            return f"the name of a branch must have from 1 to {MAX_SESSION_NAME} characters"
        if call.code or call.files or call.fetch:
            return "a fork runs nothing; leave out code and files"
    if not call.session:
        return f"cell {call.cell} has no session; name the session, or leave cell at 0" if call.cell else ""
    if len(call.session) > MAX_SESSION_NAME:
        return f"the session's name is {len(call.session)} characters long; at most {MAX_SESSION_NAME} are accepted"
    if call.cell < 1:
        return f"cells of a session are numbered from 1, got {call.cell}"
    return "a session's cell has no standard input; put the text into a file" if call.stdin else ""


def of_limits(limits: Limits) -> str:
    for name, (least, most) in BOUNDS.items():
        value = getattr(limits, name)
        if not least <= value <= most:  # NaN fails this test too
            return f"{OF_LIMITS}{name} must be from {least} to {most}, got {value}"
    return ""


def of_machine(limits: Limits) -> str:
    """Where this machine allows less: a process can't raise its hard limit for the program that it starts."""
    for name, which, letter, own in HARD_LIMITS:
        hard, value = resource.getrlimit(which)[1], getattr(limits, name)
        if hard != resource.RLIM_INFINITY and value + own > hard:
            return (
                f"{OF_LIMITS}{name} is {value}, and of the {hard} that this user may have here the sandbox needs "
                f"{own}; raise the hard limit (ulimit -H{letter}), or lower {OF_LIMITS}{name}"
            )
    return ""


def of_paths(field: str, paths: Sequence[str]) -> str:
    if len(paths) > MAX_FILES:
        return f"{field} has {len(paths)} entries; at most {MAX_FILES} are accepted"
    length = sum(map(len, paths))
    if length > MAX_PATHS:
        return f"the paths in {field} have {length} characters together; at most {MAX_PATHS} are accepted"
    return next(filter(None, map(of_path, paths)), "")


def of_path(path: str) -> str:
    components = path.split("/")
    if path.startswith("/") or ".." in components or components[-1] in ("", ".") or "\0" in path:
        return f"{path!r:.300} is not a relative path of a file below the working directory"
    sizes = size_of(path), max(map(size_of, components)), len(components) - 1
    if all(size <= most for size, most in zip(sizes, MAX_PATH, strict=True)):
        return ""
    most = "{} bytes, {} a name, and {} folders".format(*MAX_PATH)
    return f"the path {path[:80]!r}... is too long: it may have {most} at most"


def of_tree(paths: Sequence[str]) -> str:
    """`paths`: the normalized paths of all files."""
    files: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        if path in files:
            return f"the file {path!r:.300} is given twice"
        files.add(path)
        while path := os.path.dirname(path):
            folders.add(path)
    if len(folders) > MAX_FOLDERS:
        return f"the files are in {len(folders)} folders; at most {MAX_FOLDERS} are accepted"
    if conflicts := sorted(files & folders):
        return f"{conflicts[0]!r:.300} cannot be a file and the folder of another"
    if OWN_NAME in files | folders:
        return f"the name {OWN_NAME!r} is taken; choose another for this file"
    return ""


def size_of(text: str) -> int:
    """Bytes of its UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
