"""Who may import whom. Each rule is stated in the failure; docs of the rooms say why.

Imports anywhere in a file count, those under `if TYPE_CHECKING:` do not: they are gone at run time.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rocstar

PACKAGE = Path(rocstar.__file__).parent
ROOMS = ("rollout", "learning", "engines", "tools", "answers", "data", "runs")
NOUNS = ("rocstar", "rocstar.types", "rocstar.errors")
SEAMS = (*NOUNS, "rocstar.protocols")
CONFIG = ("rocstar.config", "rocstar.places", "rocstar.values")
SHARED = (*CONFIG, "rocstar.plugins")
SANDBOX_CLIENTS = ("tools",)
SANDBOX_ENDS = ("rocstar.sandbox.call", "rocstar.sandbox.client")
SANDBOX_PACKAGES = {
    "rocstar.sandbox": ("msgspec",),
    "rocstar.sandbox.client": ("websockets",),
    "rocstar.sandbox.service": ("starlette", "uvicorn", "uvloop", "httptools", "websockets", "prometheus_client"),
    "rocstar.sandbox.service.mcp": ("mcp", "pydantic"),
}
DEEPEST_SANDBOX_CHAIN = 7
FOREIGN = ("trl", "verl", "inspect_ai")
INSIDE_VLLM = "rocstar.engines.inside_vllm"
CLI_TOP = ("typer", "typer.core", "rocstar", "rocstar.errors", "rocstar.exits", "rocstar.signals")
VERBS = "rocstar.verbs"


@functools.cache
def modules() -> dict[str, str]:
    """Dotted name -> source of every module of the package."""
    files = {path: path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path.read_text() for path, name in files.items()}


def violations(module: str, source: str) -> list[str]:
    """Broken rules of one module, in words."""
    room = module.split(".")[1] if "." in module else ""
    return [
        f"{module} line {line} imports {target}: {rule}"
        for target, line in imported(source)
        for rule in broken_rules(module, room, target)
    ]


def broken_rules(module: str, room: str, target: str) -> Iterator[str]:
    own = within(target, "rocstar")
    if target.startswith("."):
        yield "imports are absolute"
    if within(target, "examples") or within(target, "word_problems"):
        yield "nothing of examples/ is imported by rocstar"
    if within(module, INSIDE_VLLM):
        if not (is_standard(target) or any(within(target, package) for package in ("torch", "safetensors", "vllm"))):
            yield "engines/inside_vllm runs where rocstar is not installed: torch, safetensors and vllm only"
        return
    if within(target, "vllm"):
        yield "vllm is imported only in engines/inside_vllm: it has an environment of its own"
    if within(target, "torch") and not (room in ("learning", "adapters") or module.startswith("rocstar.engines.torch")):
        yield "torch is imported only in learning/ and engines/torch*, and in adapters/ for libraries that want it"
    if any(within(target, library) for library in FOREIGN) and room != "adapters":
        yield "libraries that we only adapt to are imported in adapters/ alone"
    if within(target, "rocstar.adapters") and not (room == "adapters" or within(module, VERBS)):
        yield "nothing imports adapters/ but a verb, inside the function that needs it"
    if within(target, "ray") and room != "cluster":
        yield "ray is imported only in cluster/"
    if room == "sandbox" and not allowed_in_sandbox(module, target):
        yield "sandbox/ stands alone: the standard library, msgspec, its web server in service/, nothing else of us"
    if (within(module, "rocstar.types") or module == "rocstar.errors") and not allowed_in_nouns(module, target):
        yield "types and errors import the standard library only, and types each other"
    if module == "rocstar.protocols" and own and target not in NOUNS:
        yield "protocols imports only types and errors"
    if room == "dialogue" and own and target not in SEAMS and not within(target, "rocstar.dialogue"):
        yield "dialogue imports only types, errors and protocols"
    if room in ROOMS and own and not allowed_in_room(room, target):
        yield "a room imports types, protocols, errors, config and dialogue, never another room; parts.py wires them"
    if within(module, "rocstar.toml") and own and not (within(target, "rocstar.toml") or target in NOUNS):
        yield "toml imports only errors: it serves any typed tree"
    if module == "rocstar.plugins" and not (is_standard(target) or target == "rocstar.errors"):
        yield "plugins imports the standard library and errors only: every room may use it"
    if within(target, "rocstar.cli") and module not in ("rocstar.cli", "rocstar.__main__"):
        yield "nothing imports cli but python -m rocstar"
    if module in CONFIG and own and target not in CONFIG:
        yield "config imports nothing of rocstar but places and values, so that every room may read its own section"


def allowed_in_nouns(module: str, target: str) -> bool:
    siblings = within(module, "rocstar.types") and within(target, "rocstar.types")
    return is_standard(target) or siblings


def allowed_in_sandbox(module: str, target: str) -> bool:
    homes = [home for home in SANDBOX_PACKAGES if within(module, home)]
    outside = any(within(target, package) for home in homes for package in SANDBOX_PACKAGES[home])
    return within(target, "rocstar.sandbox") or is_standard(target) or outside


def allowed_in_room(room: str, target: str) -> bool:
    clients = SANDBOX_ENDS if room in SANDBOX_CLIENTS else ()
    homes = (f"rocstar.{room}", "rocstar.dialogue", *clients)
    return target in (*SEAMS, *SHARED) or any(within(target, home) for home in homes)


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


def imported(source: str) -> list[tuple[str, int]]:
    """(module imported, line), `from rocstar import x` resolved to the module x where there is one."""
    known = modules()
    found = []
    for node in running_nodes(parsed(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            found += [(name if (name := f"{home}.{a.name}") in known else home, node.lineno) for a in node.names]
    return found


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


@pytest.mark.parametrize("module", sorted(m for m in modules() if m == "rocstar.cli" or within(m, VERBS)))
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
        ("rocstar.engines.scripted", "import torch", "torch is imported only"),
        ("rocstar.engines.vllm", "import torch", "torch is imported only"),
        ("rocstar.attempts.formats", "import inspect_ai.log", "in adapters/ alone"),
        ("rocstar.training.tasks", "from rocstar.adapters.rewards import TrlReward", "nothing imports adapters/"),
        ("rocstar.engines.vllm", "from vllm import LLM", "an environment of its own"),
        ("rocstar.engines.inside_vllm.rocstar_vllm_worker", "from rocstar.errors import DataError", "not installed"),
        ("rocstar.train", "import ray", "ray is imported only"),
        ("rocstar.training.tasks", "from word_problems import WordProblemTask", "nothing of examples/"),
        ("rocstar.runs.show", "from rocstar.learning.loss import f", "never another room"),
        ("rocstar.config", "from rocstar.errors import ConfigError", "config imports nothing of rocstar"),
        ("rocstar.places", "from rocstar.types import Problem", "config imports nothing of rocstar"),
        ("rocstar.rollout.episode", "from rocstar.sandbox.client import f", "never another room"),
        ("rocstar.dialogue.codec", "from rocstar.runs import x", "dialogue imports only"),
        ("rocstar.types.problems", "import pydantic", "standard library only"),
        ("rocstar.types.problems", "from rocstar.errors import DataError", "standard library only"),
        ("rocstar.errors", "from rocstar.types import Problem", "standard library only"),
        ("rocstar.runs.show", "from rocstar.types.groups import Group", "never another room"),
        ("rocstar.protocols", "import rocstar.config", "only types and errors"),
        ("rocstar.plugins", "from rocstar.config import Recipe", "plugins imports the standard library"),
        ("rocstar.toml.read", "from rocstar.config import Recipe", "toml imports only errors"),
        ("rocstar.train", "from rocstar.cli import app", "nothing imports cli"),
        ("rocstar.train", "from . import types", "imports are absolute"),
    ],
)
def test_a_forbidden_import_is_told_with_its_rule(module: str, source: str, rule: str) -> None:
    (told,) = violations(module, source)
    assert told.startswith(f"{module} line ") and rule in told


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rocstar.sandbox.daemon.main", "import msgspec\nfrom rocstar.sandbox.wire import FrameKind"),
        ("rocstar.sandbox.service.app", "import starlette.routing\nfrom rocstar.sandbox.client import SandboxClient"),
        ("rocstar.sandbox.service.mcp", "from mcp.server.mcpserver import MCPServer"),
        ("rocstar.tools.python", "from rocstar.sandbox.client import SandboxClient"),
        ("rocstar.tools.choose", "from rocstar.plugins import load"),
        ("rocstar.runs.folder", "if TYPE_CHECKING:\n    from rocstar.config import Recipe"),
        ("rocstar.learning.loss", "import torch\nfrom rocstar.types import Batch"),
        ("rocstar.learning.loss", "from rocstar.config import LearningSection"),
        ("rocstar.engines.torch_engine", "import torch"),
        ("rocstar.adapters.trl", "import torch\nimport trl"),
        ("rocstar.verbs.runs", "def f():\n    from rocstar.adapters.inspect_logs import import_log"),
        ("rocstar.train", "from rocstar.learning import loss\nfrom rocstar.runs.folder import RunFolder"),
        ("rocstar.dialogue.codec", "from rocstar.protocols import TextCodec"),
        ("rocstar.types.groups", "from rocstar.types.problems import Problem"),
    ],
)
def test_an_allowed_import_is_not_told(module: str, source: str) -> None:
    assert violations(module, source) == []
