"""Who may import whom. Each rule is stated in the failure; docs/architecture.md draws what follows from them.

Imports anywhere in a file count, those under `if TYPE_CHECKING:` do not: they are gone at run time.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rocstar

PACKAGE = Path(rocstar.__file__).parent
BOTTOM = ("types", "errors", "protocols")
SHARED = (*BOTTOM, "support", "config", "dialogue")
PARTS = (*SHARED, "tools", "engines", "rollout", "answers", "learning", "data", "record", "sandbox")
RUNS = (*PARTS, "agents", "cluster", "parts")
ROOMS: Mapping[str, tuple[str, ...]] = {
    "types": (),
    "errors": (),
    "sandbox": (),
    "protocols": ("types", "errors"),
    "support": ("types", "errors", "sandbox"),
    "config": ("errors", "support"),
    "dialogue": BOTTOM,
    # The seven rooms that work. None of them imports another: parts/ puts them together.
    "engines": (*BOTTOM, "support", "sandbox"),
    "rollout": (*BOTTOM, "dialogue"),
    "tools": (*BOTTOM, "support", "dialogue", "sandbox"),
    "answers": SHARED,
    "learning": SHARED,
    "data": SHARED,
    "record": SHARED,
    # What they become together.
    "agents": (*SHARED, "answers", "data", "rollout", "sandbox"),
    "cluster": (*SHARED, "engines", "learning", "sandbox"),
    "parts": (*PARTS, "agents"),
    "evaluation": RUNS,
    "run": (*RUNS, "evaluation"),
    "train": (*RUNS, "run"),
    "forecast": (*RUNS, "evaluation", "run"),
    "serving": (*RUNS, "evaluation"),
    "adapters": (*RUNS, "evaluation", "run"),
    "analysis": (*RUNS, "evaluation", "run"),
    "view": (*RUNS, "evaluation", "analysis"),
    "faults": (*RUNS, "evaluation", "run"),
    "__main__": ("cli",),
}
"""What each room may import of the others; cli/ may import all of them, and nothing imports cli/."""
SECTIONS = ("rocstar.config.sections", "rocstar.config.places", "rocstar.config.values")
SANDBOX_ENDS = tuple(
    f"rocstar.sandbox.{end}"
    for end in ("call", "client", "container", "settings", "service.core", "daemon.watch", "walled", "walls.folders")
)
SANDBOX_PACKAGES = {
    "rocstar.sandbox": ("msgspec",),
    "rocstar.sandbox.client": ("websockets",),
    "rocstar.sandbox.settings": ("typer",),
    "rocstar.sandbox.service": ("starlette", "uvicorn", "uvloop", "httptools", "websockets"),
}
DEEPEST_SANDBOX_CHAIN = 7
FOREIGN = ("trl", "verl", "inspect_ai", "verifiers", "openenv", "reasoning_gym")
INSIDE_VLLM = "rocstar.engines.inside_vllm"
CLI_TOP = ("typer", "typer.core", "rocstar", "rocstar.errors", "rocstar.support.exits", "rocstar.support.signals",
           "rocstar.support.threads", "rocstar.evaluation.spec", "rocstar.sandbox.settings",
           "rocstar.serving.spec")  # fmt: skip
VERBS = "rocstar.cli.verbs"


@functools.cache
def modules() -> dict[str, str]:
    """Dotted name -> source of every module of the package."""
    files = {path: path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path.read_text() for path, name in files.items()}


def violations(module: str, source: str) -> list[str]:
    """Broken rules of one module, in words."""
    return [
        f"{module} line {line} imports {target}: {rule}"
        for target, line in imported(source)
        for rule in broken_rules(module, room_of(module), target)
    ]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def broken_rules(module: str, room: str, target: str) -> Iterator[str]:
    if target.startswith("."):
        yield "imports are absolute"
    if within(target, "examples") or within(target, "word_problems"):
        yield "nothing of examples/ is imported by rocstar"
    if within(module, INSIDE_VLLM):
        there = ("torch", "safetensors", "vllm", "rocstar_vllm_receive")
        if not (is_standard(target) or any(within(target, package) for package in there)):
            yield "engines/inside_vllm runs where rocstar is not installed: torch, safetensors, vllm and its own files"
        return
    if within(target, "vllm"):
        yield "vllm is imported only in engines/inside_vllm: it has an environment of its own"
    if within(target, "torch") and not (room in ("learning", "adapters") or module.startswith("rocstar.engines.torch")):
        yield "torch is imported only in learning/ and engines/torch*, and in adapters/ for libraries that want it"
    if any(within(target, library) for library in FOREIGN) and room != "adapters":
        yield "libraries that we only adapt to are imported in adapters/ alone"
    if within(target, "ray") and room != "cluster":
        yield "ray is imported only in cluster/"
    if room == "sandbox" and not allowed_in_sandbox(module, target):
        yield "sandbox/ stands alone: the standard library, msgspec, its web server in service/, nothing else of us"
    if room in ("types", "errors") and not (is_standard(target) or within(target, "rocstar")):
        yield "types and errors import the standard library only"
    if module in SECTIONS and within(target, "rocstar") and target not in SECTIONS:
        yield "the sections of a recipe import only each other, so that every room may read its own"
    elif within(target, "rocstar") and room != "sandbox":
        yield from broken_walls(room, target)


def broken_walls(room: str, target: str) -> Iterator[str]:
    """Of imports between rooms."""
    other = room_of(target)
    if other in ("", room) or room == "cli":
        return
    if other not in ROOMS.get(room, ()):
        yield f"{room} may import {', '.join(ROOMS.get(room, ())) or 'no other room'}"
    ends = (*SANDBOX_ENDS, "rocstar.sandbox.wire") if room == "faults" else SANDBOX_ENDS  # it stands in for a daemon
    if other == "sandbox" and not any(within(target, end) for end in ends):
        yield (
            "the sandbox is used by its ends: call, client, service.core, walled; watch for what its processes took, "
            "container for what is granted to us all, folders for locks on them and for what programs left in them"
        )


def allowed_in_sandbox(module: str, target: str) -> bool:
    homes = [home for home in SANDBOX_PACKAGES if within(module, home)]
    outside = any(within(target, package) for home in homes for package in SANDBOX_PACKAGES[home])
    return within(target, "rocstar.sandbox") or is_standard(target) or outside


def within(target: str, home: str) -> bool:
    return target == home or target.startswith(f"{home}.")


def is_standard(target: str) -> bool:
    return target.split(".")[0] in sys.stdlib_module_names


def parsed(source: str) -> ast.Module:
    """Without collecting garbage meanwhile: where that shows a warning with its traceback, Python 3.11 parses the lines
    of it too, and then takes the one for the other ("AST constructor recursion depth mismatch")."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


@functools.cache
def imported(source: str) -> tuple[tuple[str, int], ...]:
    """(module imported, line), `from rocstar import x` resolved to the module x where there is one."""
    known = modules()
    found: list[tuple[str, int]] = []
    for node in running_nodes(parsed(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            found += [(name if (name := f"{home}.{a.name}") in known else home, node.lineno) for a in node.names]
    return tuple(found)


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from running_nodes(other)
            continue
        yield child
        yield from running_nodes(child)


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    broken = violations(module, modules()[module])
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("module", sorted(m for m in modules() if m == "rocstar.cli.main" or within(m, VERBS)))
def test_the_command_line_loads_nothing_heavy_at_its_top(module: str) -> None:
    tree = parsed(modules()[module])
    top = "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    light = [t for t, _ in imported(top) if is_standard(t) or t in CLI_TOP or within(t, VERBS)]
    heavy = [t for t, _ in imported(top) if t not in light]
    assert not heavy, f"{module} imports {heavy} at its top: every heavy import belongs inside the verb that needs it"


@functools.cache
def sandbox_imports(module: str) -> tuple[str, ...]:
    """Modules of sandbox/ that it imports; a package stands for the modules that it imports in turn."""
    known, found = modules(), []
    for target in sorted({target for target, _ in imported(known[module])} & known.keys() - {module}):
        if within(target, "rocstar.sandbox"):
            is_package = any(name.startswith(f"{target}.") for name in known)
            found += sandbox_imports(target) if is_package else [target]
    return tuple(found)


@functools.cache
def longest_chain(module: str) -> tuple[str, ...]:
    """Raises RecursionError where imports go in a circle."""
    return (module, *max(map(longest_chain, sandbox_imports(module)), key=len, default=()))


def test_imports_inside_the_sandbox_make_short_chains_and_no_cycle() -> None:
    longest = max((longest_chain(name) for name in modules() if within(name, "rocstar.sandbox")), key=len)
    assert len(longest) <= DEEPEST_SANDBOX_CHAIN, "a chain is at most seven modules long: " + " -> ".join(longest)


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("rocstar.sandbox.daemon.main", "import numpy", "stands alone"),
        ("rocstar.sandbox.call", "from rocstar.errors import DataError", "stands alone"),
        ("rocstar.sandbox.client", "import starlette", "stands alone"),
        ("rocstar.sandbox.service.native", "import mcp", "stands alone"),
        ("rocstar.answers.extract", "def f():\n    import torch.nn", "torch is imported only"),
        ("rocstar.train", "import torch", "torch is imported only"),
        ("rocstar.engines.vllm", "import torch", "torch is imported only"),
        ("rocstar.record.formats", "import inspect_ai.log", "in adapters/ alone"),
        ("rocstar.run.tasks", "from rocstar.adapters.rewards import TrlReward", "run may import"),
        ("rocstar.engines.vllm", "from vllm import LLM", "an environment of its own"),
        ("rocstar.engines.inside_vllm.rocstar_vllm_worker", "from rocstar.errors import DataError", "not installed"),
        ("rocstar.train", "import ray", "ray is imported only"),
        ("rocstar.run.tasks", "from word_problems import WordProblemTask", "nothing of examples/"),
        ("rocstar.record.show", "from rocstar.learning.step import f", "record may import"),
        ("rocstar.config.sections", "from rocstar.errors import ConfigError", "import only each other"),
        ("rocstar.rollout.episode", "from rocstar.sandbox.client import f", "rollout may import"),
        ("rocstar.dialogue.codec", "from rocstar.record import x", "dialogue may import types, errors, protocols"),
        ("rocstar.types", "import pydantic", "standard library only"),
        ("rocstar.types", "from rocstar.errors import DataError", "no other room"),
        ("rocstar.errors", "from rocstar.types import Problem", "no other room"),
        ("rocstar.tools.python", "from rocstar.sandbox.daemon.main import x", "used by its ends"),
        ("rocstar.protocols", "import rocstar.config.sections", "protocols may import types, errors"),
        ("rocstar.config.layers", "from rocstar.types import Problem", "config may import errors, support"),
        ("rocstar.train", "from rocstar.cli.main import app", "train may import"),
        ("rocstar.train", "from . import types", "imports are absolute"),
    ],
)
def test_a_forbidden_import_is_told_with_its_rule(module: str, source: str, rule: str) -> None:
    (told,) = violations(module, source)
    assert told.startswith(f"{module} line ") and rule in told
